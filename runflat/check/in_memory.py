"""Collectives between threads of one process without sockets: a fake network that is exact, ordered and fast.

It stands in for gloo where many layouts are run and the network is not the subject. Reductions add in rank order, so
that results depend on nothing but the plan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class _Meeting:
    """One collective of one group: it runs in the thread of the last member to arrive."""

    def __init__(self, size: int):
        self.arrived: dict[int, Any] = {}
        self.size = size
        self.done = threading.Event()
        self.error: str | None = None

    def wait(self, timeout: timedelta) -> bool:
        """Whether the collective has run within `timeout`; RuntimeError when it failed (torch's contract of Work)."""
        finished = self.done.wait(timeout.total_seconds())
        if self.error is not None:
            raise RuntimeError(self.error)
        return finished

    def is_completed(self) -> bool:
        """Whether the collective has run or failed."""
        return self.done.is_set()


class InMemoryNetwork:
    """All groups of one run of ranks as threads; `backend` is what `Network(backend=...)` takes."""

    def __init__(self) -> None:
        """Nobody has met yet."""
        self._lock = threading.Lock()
        self._meetings: dict[tuple[str, int], _Meeting] = {}
        self._broken: str | None = None

    def backend(self, name: str, rank: int, size: int) -> _Backend:
        """The backend of one member of the group `name`."""
        return _Backend(self, name, rank, size)

    def fail(self, reason: str) -> None:
        """Make every pending and every later collective raise RuntimeError, as when a member has gone."""
        with self._lock:
            self._broken = reason
            waiting = list(self._meetings.values())
        for meeting in waiting:
            meeting.error = reason
            meeting.done.set()

    def join(self, key: tuple[str, int], rank: int, size: int, part: Any, run: Callable[[list[Any]], None]) -> _Meeting:
        """Bring `part` to the meeting `key`; the last of `size` members calls `run` with all parts in rank order."""
        with self._lock:
            if self._broken is not None:
                raise RuntimeError(self._broken)
            meeting = self._meetings.setdefault(key, _Meeting(size))
            meeting.arrived[rank] = part
            complete = len(meeting.arrived) == size
            if complete:
                del self._meetings[key]
        if complete:
            run([meeting.arrived[member] for member in range(size)])
            meeting.done.set()
        return meeting


class _Backend:
    """What `Group` needs of a torch process group."""

    def __init__(self, network: InMemoryNetwork, name: str, rank: int, size: int):
        self._network = network
        self._name = name
        self._rank = rank
        self._size = size
        self._turn = 0

    def _join(self, part: Any, run: Callable[[list[Any]], None]) -> _Meeting:
        self._turn += 1
        return self._network.join((self._name, self._turn), self._rank, self._size, part, run)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> _Meeting:
        """Reduce in place, by sum or maximum."""
        combine = torch.maximum if options.reduceOp == dist.ReduceOp.MAX else torch.add

        def run(parts: list[torch.Tensor]) -> None:
            total = parts[0]
            for part in parts[1:]:
                total = combine(total, part)
            for part in parts:
                part.copy_(total)

        return self._join(tensors[0].detach(), run)

    def alltoall_base(
        self, output: torch.Tensor, source: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> _Meeting:
        """Send consecutive slices of `source` to the members, gather theirs in `output`."""

        def run(parts: list[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]) -> None:
            for target, (slots, _) in enumerate(parts):
                for origin, (_, pieces) in enumerate(parts):
                    slots[origin].copy_(pieces[target])

        return self._join((output.split(list(received)), source.split(list(sent))), run)
