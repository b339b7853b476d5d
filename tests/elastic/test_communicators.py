"""The end of a generation's communicators: all at once, in time, or the process ends."""

from __future__ import annotations

import threading

import pytest

from runflat.check.live import until
from runflat.elastic.communicators import ABORT_S, Communicators, Verdict, verdict
from runflat.elastic.formation import PATIENCE
from runflat.elastic.state import Limits
from runflat.parallel import nccl

LONG_S = 30.0


class Backend:
    """A backend whose abort waits until `peers` aborts are under way, as kernels of one GPU wait for each other."""

    def __init__(self, meeting: threading.Barrier | None = None, error: str | None = None) -> None:
        self.meeting = meeting
        self.error = error
        self.aborted = threading.Event()
        self.num_aborts = 0

    def abort(self) -> None:
        self.num_aborts += 1
        if self.meeting is not None:
            self.meeting.wait(LONG_S)
        if self.error is not None:
            raise RuntimeError(self.error)
        self.aborted.set()

    def shutdown(self) -> None:
        raise AssertionError("never destroyed (pytorch#194679)")


def test_waits_are_one_inside_the_other() -> None:
    """Catches a limit that ends before one inside of it: the outer one would blame a device that is about to answer.

    A call of NCCL in torch, the abort that needs its lock, the controller's wait for whoever leaves a generation; and
    the wait of members for one that still aborts.
    """
    assert nccl.NONBLOCKING_S < ABORT_S < Limits().progress_floor_s
    assert ABORT_S < PATIENCE.meet_timeout_s <= Limits().timeout_s


@pytest.mark.parametrize(
    ("num_pending", "num_failed", "waited_s", "expected"),
    [
        (0, 0, 0.0, Verdict.GONE),
        (0, 0, 99.0, Verdict.GONE),
        (1, 0, 6.9, Verdict.WAIT),
        (1, 0, 7.0, Verdict.STUCK),
        (3, 1, 0.0, Verdict.STUCK),
        (0, 1, 0.0, Verdict.STUCK),
    ],
)
def test_verdicts(num_pending: int, num_failed: int, waited_s: float, expected: Verdict) -> None:
    """Catches an abort that hangs for ever, one that failed taken for done, and one that is given no time."""
    assert verdict(num_pending, num_failed, waited_s, 7.0) is expected


def test_all_of_a_generation_are_aborted_at_once_and_others_stay() -> None:
    """Catches aborts one after the other, which deadlock on a GPU (pytorch#119797), and of the next generation."""
    meeting = threading.Barrier(3)
    old, new = [Backend(meeting) for _ in range(3)], Backend()
    groups = Communicators("127.0.0.1", pytest.fail, deadline_s=LONG_S)
    for backend in old:
        groups.made(4, backend)
    groups.made(5, new)
    groups.abort(4)
    groups.abort(4)  # the main thread leaves too
    with groups.recording(5):
        assert all(backend.aborted.is_set() for backend in old), "the next groups form when the old ones are gone"
    assert [backend.num_aborts for backend in old] == [1, 1, 1]
    assert not new.num_aborts


def test_one_that_is_made_after_its_generation_was_left_goes_at_once() -> None:
    """Catches a group that forms on the side thread while the abort passes, and that nobody aborts any more."""
    groups, late = Communicators("127.0.0.1", pytest.fail, deadline_s=LONG_S), Backend()
    groups.abort(4)
    groups.made(4, late)
    assert late.aborted.wait(LONG_S)


@pytest.mark.parametrize("error", [None, "unhandled cuda error"])
def test_an_abort_that_hangs_or_fails_ends_the_process_once(error: str | None) -> None:
    """Catches a worker that keeps its GPU busy for ever: NCCL's abort itself may hang (pytorch#149153)."""
    said: list[str] = []
    never = None if error else threading.Barrier(2)
    groups = Communicators("127.0.0.1", said.append, deadline_s=LONG_S if error else 0.05)
    groups.made(4, Backend())
    groups.made(4, Backend(never, error))
    groups.abort(4)
    until("the end of the process", lambda: bool(said), LONG_S)
    if never is not None:
        never.abort()
    assert len(said) == 1
    assert said[0].startswith("the abort of its communicators of generation 4")
    assert (error or "did not end") in said[0]


def test_what_is_over_goes_too_after_a_while() -> None:
    """Catches communicators of each generation that stay until the process ends (pytorch#129868), or are destroyed."""
    groups, over = Communicators("127.0.0.1", pytest.fail, deadline_s=LONG_S, linger_s=0.01), Backend()
    groups.made(4, over)
    groups.forget(4)
    assert over.aborted.wait(LONG_S)
    groups.forget(4)


@pytest.mark.parametrize("left", [True, False])
def test_nothing_is_kept_of_a_generation(left: bool) -> None:
    """Catches a record of each generation ever (pytorch#40400)."""
    groups = Communicators("127.0.0.1", pytest.fail, deadline_s=LONG_S, linger_s=0.0)
    groups.made(4, Backend())
    if left:
        groups.abort(4)
    groups.forget(4)
    until("everything of it is gone", lambda: not (groups._backends or groups._left or groups._aborts), LONG_S)
