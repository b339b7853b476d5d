"""Failures as arrays: when, which device, for how long, why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from runflat.cluster.events import LOSES_DEVICE, Event, EventKind
from runflat.cluster.topology import Topology
from runflat.errors import TraceError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureTrace:
    """Outages of devices in order of time; one row per device, so that a failure of a node is several rows.

    Rows of one cause that hit several devices share ``incident``. An outage that does not end has infinite duration.
    """

    time_s: Floats
    duration_s: Floats
    device: Ints
    cause: Ints
    """Index into ``causes``."""
    incident: Ints
    causes: tuple[str, ...]
    num_devices: int
    """Devices that could have failed."""
    span_s: float
    """Length of the observation, in seconds."""
    names: tuple[str, ...] = field(default=())
    """Names of devices or nodes by number, where the source gives names."""

    def __len__(self) -> int:
        return len(self.time_s)

    @property
    def num_incidents(self) -> int:
        """Failures, each counted once however many devices it hit."""
        return len(np.unique(self.incident))

    @property
    def end_s(self) -> Floats:
        """End of each outage, in seconds."""
        return self.time_s + self.duration_s

    def without(self, row: int) -> FailureTrace:
        """The trace without one row."""
        return self.take(np.delete(np.arange(len(self)), row))

    def take(self, keep: Ints) -> FailureTrace:
        """The rows with the given indices, which must ascend; an index may repeat."""
        return replace(
            self,
            time_s=self.time_s[keep],
            duration_s=self.duration_s[keep],
            device=self.device[keep],
            cause=self.cause[keep],
            incident=self.incident[keep],
        )

    def first_of_incident(self) -> npt.NDArray[np.bool_]:
        """Whether a row is the first of its incident."""
        first = np.zeros(len(self), dtype=bool)
        first[np.unique(self.incident, return_index=True)[1]] = True
        return first

    def expand_nodes(self, node_size: int) -> FailureTrace:
        """The trace of devices where each row of this one is a whole node of ``node_size`` devices."""
        rows = self.take(np.repeat(np.arange(len(self)), node_size))
        device = rows.device * node_size + np.tile(np.arange(node_size), len(self))
        return replace(rows, device=device, num_devices=self.num_devices * node_size, names=())


def build_trace(
    rows: Iterable[tuple[float, float, int, str]],
    *,
    num_devices: int,
    span_s: float,
    names: Sequence[str] = (),
    incidents: Sequence[int] | None = None,
) -> FailureTrace:
    """A trace from rows of (time in seconds, duration in seconds, device number, cause), sorted here by time."""
    listed = list(rows)
    order = sorted(range(len(listed)), key=lambda index: (listed[index][0], index))
    causes = tuple(sorted({row[3] for row in listed}))
    code = {cause: index for index, cause in enumerate(causes)}
    incident = np.arange(len(listed)) if incidents is None else np.asarray([incidents[index] for index in order])
    return FailureTrace(
        time_s=np.array([listed[index][0] for index in order], dtype=np.float64),
        duration_s=np.array([listed[index][1] for index in order], dtype=np.float64),
        device=np.array([listed[index][2] for index in order], dtype=np.int64),
        cause=np.array([code[listed[index][3]] for index in order], dtype=np.int64),
        incident=incident.astype(np.int64),
        causes=causes,
        num_devices=num_devices,
        span_s=span_s,
        names=tuple(names),
    )


def trace_from_events(events: Sequence[Event], *, span_s: float | None = None, source: str = "events") -> FailureTrace:
    """The outages that a list of timed events describes: from a loss to the next return of the same place.

    Devices and nodes are numbered in the order of their first appearance. A loss without a return lasts for its
    ``duration_s``, or for ever. Injected events without a time are passed over where the run recorded what it saw.

    Raises:
        TraceError: for an event without ``time_s``, or a return of something that had not failed.
    """
    numbers: dict[str, int] = {}
    down: dict[str, tuple[float, str]] = {}
    rows: list[tuple[float, float, int, str]] = []
    last_s = 0.0
    # A run records what was injected, by step, beside what was seen of it, by time: the second is the trace.
    recorded = any(event.event is EventKind.FAIL for event in events)
    for number, event in enumerate(events, start=1):
        if recorded and event.time_s is None and event.step is not None:
            continue
        if event.time_s is None:
            raise TraceError(f"{source}, event {number}: 'time_s' is missing; a trace needs the time of each event")
        place, last_s = event.place, max(last_s, event.time_s)
        numbers.setdefault(place, len(numbers))
        if event.event in LOSES_DEVICE:
            if event.duration_s is not None:
                rows.append((event.time_s, event.duration_s, numbers[place], event.cause or event.event.value))
            elif place not in down:
                down[place] = (event.time_s, event.cause or event.event.value)
        elif event.event is EventKind.RETURN:
            if place not in down:
                raise TraceError(f"{source}, event {number}: {place!r} returns, but had not failed before")
            start_s, cause = down.pop(place)
            rows.append((start_s, event.time_s - start_s, numbers[place], cause))
    rows.extend((start_s, float("inf"), numbers[place], cause) for place, (start_s, cause) in down.items())
    return build_trace(
        rows, num_devices=len(numbers), span_s=span_s if span_s is not None else last_s, names=tuple(numbers)
    )


def trace_to_events(trace: FailureTrace, topology: Topology | None = None) -> tuple[Event, ...]:
    """The trace as timed ``fail`` and ``return`` events, in order of time; device names come from the topology."""
    events: list[tuple[float, int, Event]] = []
    for row in range(len(trace)):
        number = int(trace.device[row])
        name = topology.device_id(number) if topology else (trace.names[number] if trace.names else str(number))
        start_s, end_s = float(trace.time_s[row]), float(trace.end_s[row])
        cause = trace.causes[int(trace.cause[row])]
        events.append((start_s, row, Event(event=EventKind.FAIL, device=name, time_s=start_s, cause=cause)))
        if np.isfinite(end_s) and end_s <= trace.span_s:
            events.append((end_s, row, Event(event=EventKind.RETURN, device=name, time_s=end_s)))
    return tuple(event for _, _, event in sorted(events, key=lambda entry: entry[:2]))
