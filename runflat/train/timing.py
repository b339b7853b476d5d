"""Where the time of a step goes: seconds by part, and on request a timeline in Chrome's trace format."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "profile"
"""Of a run: one file for each device, and `trace.json` of all."""
MERGED = "trace.json"
FIRST_STEP = 2
"""Of those that a device does: before it, memory is allocated and kernels are chosen."""
MICROSECONDS = 1e6


@dataclass(frozen=True)
class Span:
    """Something that took time, on the row of its kind, in seconds of a clock that all processes share."""

    row: str
    name: str
    begin_s: float
    end_s: float


Mark = Callable[[], float]
"""A moment: tells its seconds, perhaps only once a device has come to it."""


class Timeline:
    """The spans of `num_steps` steps of one device. Collectives end on threads of their own."""

    def __init__(
        self,
        path: Path,
        device: str,
        num_steps: int,
        clock: Callable[[], float] = time.monotonic,
        mark: Callable[[], Mark] | None = None,
    ):
        """Nothing is recorded before `step` says so; `path` is written when the last of the steps is over.

        `mark` marks the present moment of what the device does, where that is not what the host does.
        """
        self._path = path
        self._device = device
        self._left = num_steps
        self._before = FIRST_STEP
        self._clock = clock
        self._mark = mark
        self._since: Mark | None = None
        self._marked: list[tuple[str, str, Mark, Mark]] = []
        self._lock = threading.Lock()
        self.on = False

    def step(self) -> None:
        """A step begins, anew or again."""
        if self._before:
            self._before -= 1
        elif self._left:
            self._left -= 1
            self.on = True
            self._since = self._mark() if self._mark else None

    def stepped(self) -> None:
        """A step has been committed."""
        if self.on and not self._left:
            self.on = False
            self._write()

    def part(self, name: str, begin_s: float, end_s: float) -> None:
        """A part of the step is over, on the host; the device may come to its end later."""
        self._add("step", name, lambda: begin_s, lambda: end_s)
        if self.on and self._mark is not None and self._since is not None:
            begin, self._since = self._since, self._mark()
            self._add("device", name, begin, self._since)

    def launched(self, group: str, operation: str, num_bytes: int) -> Callable[[], None] | None:
        """A collective is launched; returns what is to be called when it has ended, if this is the time to record.

        That call may come before the end, with a current stream that waits for it, as torch does on GPUs.
        """
        if not self.on:
            return None
        begin, name = self._now(), group.rpartition("/")[2]
        row = "tensor parallel" if name.startswith("tp") else "exchange"
        return lambda: self._add(row, f"{operation} {name}, {num_bytes} bytes", begin, self._now())

    def _now(self) -> Mark:
        if self._mark is not None:
            return self._mark()
        now_s = self._clock()
        return lambda: now_s

    def _add(self, row: str, name: str, begin: Mark, end: Mark) -> None:
        if self.on:
            with self._lock:
                self._marked.append((row, name, begin, end))

    def _write(self) -> None:
        with self._lock:
            marked, self._marked = self._marked, []
        spans = [Span(row, name, begin(), end()) for row, name, begin, end in marked]
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_text(json.dumps(chrome_trace(self._device, spans)), encoding="utf-8")


def chrome_trace(device: str, spans: Iterable[Span]) -> dict[str, Any]:
    """The spans as chrome://tracing and Perfetto load them: a process for the device, a thread for each row."""
    replica, _, slot = device.partition(":")
    pid = int(replica) * 1000 + int(slot) if slot else 10**6 + int(device.removeprefix("s"))
    found = sorted(spans, key=lambda span: span.begin_s)
    rows = {row: number for number, row in enumerate(dict.fromkeys(span.row for span in found))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"device {device}"}},
        *(
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": number, "args": {"name": row}}
            for row, number in rows.items()
        ),
    ]
    for span in found:
        begin, end = span.begin_s * MICROSECONDS, span.end_s * MICROSECONDS
        where = {"cat": span.row, "pid": pid, "tid": rows[span.row]}
        events.append({"ph": "X", "name": span.name, **where, "ts": begin, "dur": end - begin})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def merge_traces(folder: Path) -> Path | None:
    """Write `trace.json` of all devices' files in `folder`; None where there is none."""
    files = sorted(path for path in folder.glob("*.json") if path.name != MERGED)
    if not files:
        return None
    events = [event for path in files for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]]
    merged = folder / MERGED
    merged.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}), encoding="utf-8")
    return merged


class StepTimes:
    """Seconds of a step by part. A part lasts until the next one begins."""

    def __init__(
        self,
        told: Callable[[str], None],
        timeline: Timeline | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`told` hears of each part as it begins."""
        self._told = told
        self._timeline = timeline
        self._clock = clock
        self._parts: dict[str, float] = {}
        self._name, self._since_s = "", clock()

    def begin(self, name: str) -> None:
        """A step begins, with part `name`; nobody is told of that."""
        self._parts = {}
        self._name, self._since_s = name, self._clock()

    def enter(self, name: str) -> None:
        """Part `name` begins."""
        self._close()
        self._name = name
        self._told(name)

    def end(self) -> dict[str, float]:
        """The step has ended: its parts, in order."""
        self._close()
        self._name = ""
        if self._timeline is not None:
            self._timeline.stepped()
        return self._parts

    def _close(self) -> None:
        now_s = self._clock()
        if self._name:
            self._parts[self._name] = self._parts.get(self._name, 0.0) + now_s - self._since_s
            if self._timeline is not None:
                self._timeline.part(self._name, self._since_s, now_s)
        self._since_s = now_s
