"""Feeds whose ends die, lie, or take too long: training never notices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from runflat.check.clock import ManualClock
from runflat.check.live import until
from runflat.elastic.feed import Feeder, Link
from runflat.elastic.frames import FeedError, FeedLimits, Hello
from runflat.elastic.receive import Receiver

Make = Callable[..., Any]
Listen = Callable[..., Receiver]
WAIT_S = 20.0


def test_wrong_token(make_job: Make, listen: Listen, log: list[str]) -> None:
    """Catches a receiver that lets anybody in, or that a stranger puts out of action."""
    job = make_job()
    receiver = listen(job)
    device = next(iter(job.slabs))
    state = job.states[device]
    stranger = Feeder(state, job.slabs[device], Hello(source=device, token="guess"), receiver.address, 0, 0)
    with pytest.raises(FeedError, match="does not know the token"):
        stranger.flush(0, WAIT_S)
    stranger.close()
    for device in job.slabs:
        job.feed(device, receiver)
    job.flush(receiver)
    job.assert_right(receiver)
    receiver.close()
    (line,) = log
    assert "refused a call" in line
    assert "does not know the token" in line


def test_dead_newcomer(make_job: Make, listen: Listen) -> None:
    """Catches a training thread that learns of a newcomer's death by an error or a wait."""
    job = make_job()
    receiver = listen(job)
    device = next(iter(job.slabs))
    feeder = job.feed(device, receiver)
    feeder.flush(0, WAIT_S)
    receiver.close()
    for _ in range(100):
        job.step()
        if feeder.error:
            break
    with pytest.raises(FeedError, match=r"feed to 127\.0\.0\.1:\d+ has failed"):
        feeder.flush(job.committed, WAIT_S)
    assert feeder.error
    assert not feeder.caught_up
    late = job.feed(device, receiver)
    with pytest.raises(FeedError, match="no connection"):
        late.flush(job.committed, WAIT_S)
    job.step()
    feeder.close()


def said(receiver: Receiver, words: str) -> bool:
    """Whether the receiver refuses its state in these words."""
    try:
        receiver.state()
    except FeedError as error:
        return words in str(error)
    return False


def test_dead_source(make_job: Make, listen: Listen) -> None:
    """Catches a newcomer that waits for a source that is gone, does not say which, or takes none in its place."""
    job = make_job()
    whole_again = threading.Event()
    receiver = listen(job, lambda committed: whole_again.set() if committed == 1 else None)
    first, *others = job.slabs
    for device in job.slabs:
        job.feed(device, receiver)
    job.flush(receiver)
    job.feeders.pop(first).close()
    job.step()
    for device in others:
        job.feeders[device].flush(1, WAIT_S)
    with pytest.raises(FeedError, match=f"the feed of {first} has ended"):
        receiver.wait_for(1, WAIT_S)
    assert first in receiver.ended
    # A flush has handed its gradients over; that they have arrived is seen here only.
    until("pieces of two steps", lambda: said(receiver, "not of one"), WAIT_S)
    job.feed(first, receiver)
    assert whole_again.wait(WAIT_S)
    assert not receiver.ended
    job.assert_right(receiver)


def test_deadlines_are_named(make_job: Make, listen: Listen) -> None:
    """Catches a wait without an end, or one that does not say for what."""
    job = make_job()
    receiver = listen(job)
    with pytest.raises(FeedError, match=r"step 5 are not all here after 0\.1 s: missing is every source"):
        receiver.wait_for(5, 0.1)
    device = next(iter(job.slabs))
    clock = ManualClock()
    feeder = job.feed(device, receiver, Link(1.0, clock.clock, clock.sleep))
    with pytest.raises(FeedError, match=r"not done with step 0 within 0\.1 s: it is at step 0, with \d+ of \d+ pieces"):
        feeder.flush(0, 0.1)
    with pytest.raises(FeedError, match=f"missing is {device}|missing is every source"):
        receiver.wait_for(0, 0.1)
    clock.open()
    feeder.flush(0, WAIT_S)
    with pytest.raises(FeedError, match="it is at step 0, with 0 of"):
        feeder.flush(1, 0.1)


def test_close_wakes_a_feeder_on_a_slow_link(make_job: Make, listen: Listen) -> None:
    """Catches a feed that keeps its thread for as long as the link is busy."""
    job = make_job()
    receiver = listen(job)
    calls = threading.Semaphore(0)

    def clock() -> float:
        calls.release()
        return 0.0

    link = Link(1e-3, clock)  # it is asked when made, and before it waits
    feeder = job.feed(next(iter(job.slabs)), receiver, link)
    assert calls.acquire(timeout=WAIT_S)
    assert calls.acquire(timeout=WAIT_S)
    feeder.close()
    assert feeder.error is None
    with pytest.raises(FeedError, match="closed"):
        feeder.flush(0, WAIT_S)
    job.step()


def test_no_moments(make_job: Make, listen: Listen) -> None:
    """Catches zeros sent in place of moments that the optimizer has given up."""
    job = make_job()
    receiver = listen(job)
    job.step()
    device = next(iter(job.slabs))
    job.states[device].optimizer.state.clear()
    with pytest.raises(FeedError, match="has no moments at step 1"):
        job.feed(device, receiver).flush(1, WAIT_S)


def test_a_quiet_source_stays(make_job: Make, listen: Listen) -> None:
    """Catches a feed that is given up because a training step takes longer than the newcomer's patience."""
    job = make_job()
    receiver = listen(job, limits=FeedLimits(timeout_s=0.3))
    for device in job.slabs:
        job.feed(device, receiver, limits=FeedLimits(alive_s=0.02))
    job.flush(receiver)
    with pytest.raises(FeedError, match=r"after 1\.0 s"):
        receiver.wait_for(1, 1.0)
    assert not receiver.ended
    job.step()
    job.flush(receiver)
    job.assert_right(receiver)
