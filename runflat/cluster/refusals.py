"""Who was turned away, counted by address, and told in lines whose number strangers do not decide."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

NOTE_EVERY_S = 10.0
MAX_ADDRESSES = 64
"""Addresses whose refusals are counted apart."""
OTHERS = "other addresses"


class Refusals:
    """Counts who was turned away, and says so in few lines: the first at once, then a sum every `NOTE_EVERY_S`."""

    def __init__(self) -> None:
        """Nobody yet."""
        self._counts: dict[str, tuple[int, str]] = {}
        self._noted_at: dict[str, float] = {}

    def add(self, address: str, reason: str) -> None:
        """One more from `address`."""
        known = address in self._counts or address in self._noted_at
        if not known and len(self._counts.keys() | self._noted_at.keys()) >= MAX_ADDRESSES:
            address = OTHERS
        self._counts[address] = (self._counts.get(address, (0, ""))[0] + 1, reason)

    def due(self, now: float, *, all_of_them: bool = False) -> list[str]:
        """Lines that are due."""
        for address in [a for a, at in self._noted_at.items() if now - at >= NOTE_EVERY_S and a not in self._counts]:
            del self._noted_at[address]
        due = [a for a in self._counts if all_of_them or now - self._noted_at.get(a, -NOTE_EVERY_S) >= NOTE_EVERY_S]
        lines = []
        for address in due:
            count, reason = self._counts.pop(address)
            self._noted_at[address] = now
            calls = "a call" if count == 1 else f"{count} calls"
            lines.append(f"refused {calls} from {address}: {reason}")
        return lines


class RefusalLog:
    """`Refusals` of a listener whose threads share them; `log` takes the lines, which begin with `name`."""

    def __init__(self, name: str, log: Callable[[str], object], clock: Callable[[], float] = time.monotonic):
        """Nobody yet."""
        self._name = name
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._refusals = Refusals()

    def add(self, address: str, reason: str) -> None:
        """One more from `address`; said when `note` is called next and it is due."""
        with self._lock:
            self._refusals.add(address, reason)

    def note(self, *, all_of_them: bool = False) -> None:
        """Say what is due."""
        with self._lock:
            lines = self._refusals.due(self._clock(), all_of_them=all_of_them)
        for line in lines:
            self._log(f"{self._name}: {line}")
