"""The time of what a GPU does, in seconds of the host's clock."""

from __future__ import annotations

from collections.abc import Callable

import torch

MILLISECONDS = 1e3


class DeviceClock:
    """Marks in the stream of a GPU. Only the first one, and asking for the time of one, waits for the device."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is the host's, in seconds."""
        self._clock = clock
        self._origin: tuple[torch.cuda.Event, float] | None = None

    def mark(self) -> Callable[[], float]:
        """A mark behind what the current stream has been given so far; returns what tells when it was reached."""
        if self._origin is None:
            first = self._record()
            first.synchronize()
            self._origin = first, self._clock()
        begin, begin_s = self._origin
        event = self._record()

        def seconds() -> float:
            event.synchronize()
            return begin_s + float(begin.elapsed_time(event)) / MILLISECONDS

        return seconds

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
