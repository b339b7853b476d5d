"""NCCL's communicators of a process by generation, and the end of all of one: one abort, under a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

from runflat.elastic.side_thread import start_thread

ABORT_S = 7.0
"""Longest abort: longer than torch may hold a communicator's lock (`nccl.NONBLOCKING_S`), and shorter than the 10 s
after which the controller gives up on whoever has not left a generation."""
LINGER_S = 2.0
"""How long communicators that are over stay: peers may still be reading what this device sent last."""


class Verdict(Enum):
    """How an abort stands."""

    WAIT = "wait"
    GONE = "gone"
    STUCK = "stuck"


def verdict(num_pending: int, num_failed: int, waited_s: float, deadline_s: float) -> Verdict:
    """What to make of an abort of several communicators, `waited_s` after its start.

    One that failed is as bad as one that hangs: its kernel may hold the device, and nobody may destroy it.
    """
    if num_failed or (num_pending and waited_s >= deadline_s):
        return Verdict.STUCK
    return Verdict.WAIT if num_pending else Verdict.GONE


@dataclass
class _Abort:
    """The communicators of a generation on their way out."""

    generation: int
    num_pending: int
    began_s: float
    errors: list[str] = field(default_factory=list)


class Communicators:
    """NCCL's communicators of one process by generation: to NCCL what `Sockets` is to gloo.

    Each ends by an abort, be it that its generation was lost or that it is over; none is ever destroyed, since a
    destruction waits for peers (pytorch#194679, NVIDIA/nccl#863). `stuck` is told why when an abort does not
    succeed within `deadline_s`, and ends the process; the launcher starts it again.
    """

    def __init__(
        self,
        host: str,
        stuck: Callable[[str], object],
        deadline_s: float = ABORT_S,
        linger_s: float = LINGER_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`host` is the address at which other workers reach this one."""
        self.host = host
        self.exempt: set[int] = set()
        self._stuck = stuck
        self._deadline_s = deadline_s
        self._linger_s = linger_s
        self._clock = clock
        self._forming = threading.Lock()
        self._changed = threading.Condition()
        self._backends: dict[int, list[Any]] = {}
        self._left: set[int] = set()
        self._aborts: list[_Abort] = []

    def address(self, generation: int) -> str:
        """Address on which groups listen."""
        return self.host

    @contextmanager
    def recording(self, generation: int) -> Iterator[None]:
        """While it lasts the groups of `generation` form. Waits until older ones that are aborted are gone.

        Kernels that still spin would hold up whatever a new communicator allocates.
        """
        with self._forming:
            with self._changed:
                self._changed.wait_for(lambda: not self._aborts, self._deadline_s)
            yield

    def made(self, generation: int, backend: Any) -> None:
        """A backend of `generation` is there. If that has been left meanwhile, it goes at once."""
        with self._changed:
            self._backends.setdefault(generation, []).append(backend)
            late = generation in self._left
        if late:
            self.abort(generation)

    def abort(self, generation: int) -> None:
        """Begin to abort all communicators of `generation`, also those that still connect; returns at once.

        All at the same time: one after the other, each would wait for kernels of the next one (pytorch#119797,
        NVIDIA/nccl#564). A thread for each, as torch hands each abort to a thread of its own, where an
        ncclGroupStart of the caller does not count.
        """
        with self._changed:
            self._left.add(generation)
            backends = self._backends.pop(generation, [])
            if not backends:
                return
            abort = _Abort(generation, len(backends), self._clock())
            self._aborts.append(abort)
            self._changed.notify_all()
        for backend in backends:
            start_thread("nccl abort", partial(self._abort_one, abort, backend))
        start_thread("nccl deadline", partial(self._watch, abort))

    def forget(self, generation: int) -> None:
        """The groups of `generation` are over. They would stay for ever (pytorch#129868, pytorch#40400)."""
        with self._changed:
            if generation in self._backends:
                start_thread("nccl retire", partial(self._retire, generation))
            self._left.discard(generation)

    def _retire(self, generation: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: generation not in self._backends, self._linger_s)
        self.abort(generation)
        with self._changed:
            self._left.discard(generation)

    def _abort_one(self, abort: _Abort, backend: Any) -> None:
        problem = None
        try:
            backend.abort()
        except RuntimeError as error:
            problem = str(error)
        with self._changed:
            abort.num_pending -= 1
            if problem is not None:
                abort.errors.append(problem)
            self._changed.notify_all()

    def _watch(self, abort: _Abort) -> None:
        """End the process where the abort hangs, as NCCL's own may (pytorch#149153, pytorch#119215)."""
        with self._changed:
            while (state := self._verdict(abort)) is Verdict.WAIT:
                self._changed.wait(max(abort.began_s + self._deadline_s - self._clock(), 0.0))
            self._aborts.remove(abort)
            self._changed.notify_all()
        if state is Verdict.STUCK:
            how = f"failed ({abort.errors[0]})" if abort.errors else f"did not end within {self._deadline_s:.0f} s"
            self._stuck(f"the abort of its communicators of generation {abort.generation} {how}")

    def _verdict(self, abort: _Abort) -> Verdict:
        waited_s = self._clock() - abort.began_s
        return verdict(abort.num_pending, len(abort.errors), waited_s, self._deadline_s)
