"""The event engine: a heap of (time, number, kind, value); equal times run in the order in which they were put in.

It knows nothing of devices. Its state is plain data, so that it can be printed and replayed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Value = TypeVar("Value")

Entry = tuple[float, int, str, Value]
"""(time in seconds, sequence number, kind, value)."""


class Engine(Generic[Value]):
    """A clock and the events still to come, in order of time and then of sequence number."""

    def __init__(self, entries: Iterable[tuple[float, str, Value]] = ()) -> None:
        self.now_s = 0.0
        self.num_done = 0
        self._heap: list[Entry[Value]] = [(time_s, i, kind, value) for i, (time_s, kind, value) in enumerate(entries)]
        self._next_number = len(self._heap)
        heapq.heapify(self._heap)

    def put(self, time_s: float, kind: str, value: Value) -> None:
        """Add an event, now or later.

        Raises:
            ValueError: if the time is past, which would run history backwards.
        """
        if time_s < self.now_s:
            raise ValueError(f"event {kind!r} at {time_s} s is before now, {self.now_s} s")
        heapq.heappush(self._heap, (time_s, self._next_number, kind, value))
        self._next_number += 1

    def pending(self) -> list[Entry[Value]]:
        """The events still to come, in the order in which they will run."""
        return sorted(self._heap, key=lambda entry: entry[:2])

    def run(self, until_s: float, handle: Callable[[float, str, Value], None]) -> int:
        """Hand each event up to and including ``until_s`` to ``handle`` and advance the clock to ``until_s``.

        Args:
            until_s: End of the run in seconds.
            handle: Called with (time, kind, value); it may put further events.

        Returns:
            Number of events handled.
        """
        done = self.num_done
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now_s, _, kind, value = heapq.heappop(heap)
            self.num_done += 1
            handle(self.now_s, kind, value)
        self.now_s = max(self.now_s, until_s)
        return self.num_done - done
