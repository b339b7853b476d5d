"""The agent's log: one JSON line for everything that it did or refused, appended and never rewritten."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MAX_REFUSALS = 20
"""Refusals written down in each `WINDOW_S`; more are counted, so that no caller can fill the disk."""
WINDOW_S = 10.0


class AuditLog:
    """Appends (event, facts) to a file, and to stdout if `echo`; a disk that is full costs lines, not the agent."""

    def __init__(self, path: Path, clock: Callable[[], float], *, echo: bool = False):
        """Open the file; `clock` is seconds since 1970."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o640)
        self._clock = clock
        self._echo = echo
        self._window_s = 0.0
        self._num_refusals = 0

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        """Write one line."""
        now = self._clock()
        dropped = 0
        if now - self._window_s >= WINDOW_S:
            dropped = max(self._num_refusals - MAX_REFUSALS, 0)
            self._window_s, self._num_refusals = now, 0
        if event == "refused":
            self._num_refusals += 1
            if self._num_refusals > MAX_REFUSALS:
                return
        record = {"time": datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"), "event": event, **facts}
        if dropped:
            record["refusals_not_written"] = dropped
        line = json.dumps(record)
        if self._echo:
            print(line, flush=True)
        try:
            os.write(self._file, line.encode() + b"\n")
        except OSError as error:
            print(f"runflat power-agent: the log cannot be written ({error}): {line}", file=sys.stderr)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
