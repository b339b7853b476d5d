"""Training goes on while a newcomer is fed: emulated links on clocks that the test moves, bits compared at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from runflat.check.clock import ManualClock
from runflat.elastic.feed import Feeder, Link
from runflat.elastic.frames import FeedLimits
from runflat.elastic.receive import Receiver

Make = Callable[..., Any]
Listen = Callable[..., Receiver]
WAIT_S = 20.0


def drive(clock: ManualClock, time_s: float, feeder: Feeder) -> None:
    """Lets a feeder send what its link carries until `time_s`."""
    clock.run_until(time_s, lambda: feeder.caught_up or feeder.error is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_before", [0, 3])
def test_training_goes_on(make_job: Make, listen: Listen, dtype: torch.dtype, num_before: int) -> None:
    """Catches torn pieces, a gradient lost or used twice, another rate, decay or step count, a skipped step."""
    job = make_job(dtype)
    assert len(job.slabs) > 1
    for _ in range(num_before):
        job.step()
    fed: list[int] = []
    receiver = listen(job, fed.append)
    clocks = {device: ManualClock() for device in job.slabs}
    for device, clock in clocks.items():
        # A copy at the boundary would take two steps; the feed needs a few more, as gradients share the link with it.
        rate = job.num_bytes[device] / 1.9
        job.feed(device, receiver, Link(rate, clock.clock, clock.sleep))
    for step in range(1, 12):
        for device, clock in clocks.items():
            drive(clock, float(step), job.feeders[device])
        if step == 2:
            assert not fed
            assert all(0 < f.progress.num_claimed < f.progress.num_pieces for f in job.feeders.values())
        job.step(skipped=step in (3, 9))
    assert all(f.progress.num_given_up == 0 and not f.progress.behind for f in job.feeders.values())
    for clock in clocks.values():
        clock.open()
    job.flush(receiver)
    assert all(feeder.caught_up for feeder in job.feeders.values())
    assert fed == sorted(set(fed))
    assert fed[0] < job.committed == fed[-1] == receiver.fed
    assert receiver.received_bytes > sum(job.num_bytes.values())
    job.assert_right(receiver)


def test_link_slower_than_gradients(make_job: Make, listen: Listen, log: list[str]) -> None:
    """Catches a backlog that grows without end, silence about it, and pieces given up that never become right."""
    job = make_job()
    receiver = listen(job)
    clocks = {device: ManualClock() for device in job.slabs}
    for device, clock in clocks.items():
        link = Link(job.num_bytes[device] / 9.0, clock.clock, clock.sleep)
        cap = job.num_bytes[device] // 6
        job.feed(device, receiver, link, limits=FeedLimits(piece_bytes=20_000, backlog_bytes=cap), log=log.append)
    behind: set[str] = set()
    for step in range(1, 30):
        for device, feeder in job.feeders.items():
            drive(clocks[device], float(step), feeder)
            behind |= {device} if feeder.progress.behind else set()
        job.step(skipped=step == 12)
        for device, feeder in job.feeders.items():
            with feeder._turn:
                waiting = [pending.tensor for pending in feeder._queue if pending.tensor is not None]
                assert feeder._backlog == sum(t.nbytes for t in waiting) <= job.num_bytes[device] // 6
    assert behind == set(job.feeders)
    assert receiver.fed is None
    for clock in clocks.values():
        clock.open()
    job.flush(receiver)
    assert sum("cannot keep up" in line for line in log) == len(job.feeders)
    assert all(f.progress.num_given_up > 0 for f in job.feeders.values())
    assert not any(f.progress.behind for f in job.feeders.values())
    job.assert_right(receiver)
    job.step()
    job.flush(receiver)
    job.assert_right(receiver)


def test_behind_is_told_before_the_backlog_is_full(make_job: Make, listen: Listen) -> None:
    """Catches a caller who waits for ever for a feed whose backlog grows too slowly to be given up."""
    job = make_job()
    receiver = listen(job)
    device = next(iter(job.slabs))
    clock = ManualClock()
    link = Link(job.num_bytes[device] / 4.0, clock.clock, clock.sleep)
    feeder = job.feed(device, receiver, link, limits=FeedLimits(piece_bytes=20_000, backlog_bytes=1 << 40, patience=4))
    for step in range(1, 60):
        drive(clock, float(step), feeder)
        job.step()
        if feeder.progress.behind:
            break
    assert feeder.progress.behind
    assert feeder.progress.num_given_up == 0
    clock.open()


def test_full_speed(make_job: Make, listen: Listen) -> None:
    """Catches a race between commits and claims that a slow link hides: steps follow each other without a pause."""
    job = make_job()
    receiver = listen(job)
    for device in job.slabs:
        job.feed(device, receiver)
    for _ in range(30):
        job.step()
    job.flush(receiver)
    job.assert_right(receiver)


class Watched(dict[str, nn.Parameter]):
    """Parameters that may be looked at by name only under the lock that commits take."""

    lock: threading.Lock

    def __getitem__(self, name: str) -> nn.Parameter:
        assert self.lock.locked()
        return super().__getitem__(name)


def test_claims_take_the_lock(make_job: Make, listen: Listen) -> None:
    """Catches a piece that is copied while a step is applied: half of it old, half new."""
    job = make_job()
    receiver = listen(job)
    for device, state in job.states.items():
        watched = Watched(state.params)
        watched.lock = state.lock
        job.states[device] = replace(state, params=watched)
        job.feed(device, receiver)
    job.flush(receiver)
    job.assert_right(receiver)
