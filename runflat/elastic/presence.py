"""What a worker says of itself while it works: its phase, what it waits for; and a heartbeat thread that says it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from runflat.elastic.side_thread import start_thread

HEARTBEAT_S = 0.25


class Presence:
    """Phase and wait of the main thread, as the heartbeat thread sees them."""

    def __init__(self) -> None:
        """Importing."""
        self.generation = -1
        self.committed = 0
        self._phase = "import"
        self._waits_for: str | None = None
        self._waited_s = 0.0
        self._since = time.monotonic()

    @property
    def phase(self) -> str:
        """Name of the part of the work in hand."""
        return self._phase

    def enter(self, phase: str, waits_for: str | None = None) -> None:
        """The main thread begins `phase`; `waits_for` says for what it waits, None when it computes."""
        if (phase, waits_for) != (self._phase, self._waits_for):
            self._since = time.monotonic()
        self._phase, self._waits_for = phase, waits_for

    def waits(self, what: str | None) -> None:
        """In the phase in hand, the main thread waits for `what`; None: no more."""
        self.enter(self._phase, what)

    def waited(self, seconds: float) -> None:
        """The main thread has waited for peers."""
        self._waited_s += seconds

    def message(self) -> dict[str, Any]:
        """The heartbeat."""
        return {
            "type": "heartbeat",
            "generation": self.generation,
            "committed": self.committed,
            "phase": self._phase,
            "waits_for": self._waits_for,
            "since_s": time.monotonic() - self._since,
            "waited_s": self._waited_s,
        }


class Heart:
    """Sends the presence four times a second until it is stopped."""

    def __init__(self, presence: Presence, send: Callable[[Mapping[str, Any]], None]):
        """Start beating."""
        self._presence = presence
        self._send = send
        self._stopped = threading.Event()
        start_thread("heartbeat", self._beat)

    def _beat(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S):
            self._send(self._presence.message())

    def stop(self) -> None:
        """Beat no more."""
        self._stopped.set()
