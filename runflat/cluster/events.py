"""One record for everything that happens to a device: traces, the injector, the runtime and the simulator share it.

A file of events is a JSON list or JSON lines. The same words stand in a file, in the injector's builder and on the
command line, so that a recorded run can be replayed and a failure trace can be injected::

    [{"event": "kill", "device": "1:2", "step": 4, "phase": "backward"},
     {"event": "return", "device": "1:2", "step": 8}]

An event says what (``event``), where (``device``, or ``node`` for a whole node or domain) and when (``time_s`` since
the start, or ``step`` with an optional ``phase``; a recorded event may have both). A row that carries the key
``record`` instead of ``event`` is another note of the runtime (a plan, an incident, a summary); readers pass over it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path

from runflat.errors import TraceError


class EventKind(StrEnum):
    """What happened or is to happen; the first group is observed, the second is what an injector does."""

    FAIL = "fail"
    """A device or node is out of service, for whatever reason: what traces record and the runtime concludes."""
    RETURN = "return"
    """It is healthy again and may rejoin."""
    KILL = "kill"
    """The worker process gets SIGKILL."""
    STOP = "stop"
    """The worker process gets SIGSTOP; with ``duration_s`` it is woken again after that time."""
    SLOW = "slow"
    """Computation takes ``factor`` times as long, for ``duration_s`` if given."""
    FLAKE = "flake"
    """The connections between ``device`` and ``peer`` are cut; both stay alive."""
    DRAIN = "drain"
    """An orderly leave: the device finishes the step and goes."""
    RAISE = "raise"
    """The worker raises a Python error."""
    CORRUPT = "corrupt"
    """One bit of ``target`` flips."""


LOSES_DEVICE = frozenset({EventKind.FAIL, EventKind.KILL, EventKind.DRAIN})
"""Kinds after which the device is certainly gone until it returns (a stop may outlast the deadline or not)."""

PHASES = (
    *("forward", "backward", "sync", "commit", "update", "checkpoint"),
    *("detect", "abort", "barrier", "form", "transfer", "digest"),
    *("import", "selftest", "copy", "join"),
)
"""Where in a step (first row), in a recovery (second) or in a return (third) an injected event strikes."""

CORRUPT_TARGETS = ("weight", "moment", "lr")
"""What a ``corrupt`` event may flip a bit of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happens to one device or node; build it by hand or with :func:`event_from_json`.

    Raises:
        TraceError: if the fields contradict each other or a value is out of range.
    """

    event: EventKind
    device: str | None = None
    """Device id such as ``1:3`` or ``s0``; excludes ``node``."""
    node: str | None = None
    """Name of a node or domain, all devices of which are meant; excludes ``device``."""
    peer: str | None = None
    """The other end of a ``flake``."""
    time_s: float | None = None
    """Seconds since the start of the run or trace."""
    step: int | None = None
    """Step during which it happens, counted from 0. A recorded event may have time and step."""
    phase: str | None = None
    """One of :data:`PHASES`; only with ``step``."""
    duration_s: float | None = None
    """How long it lasts: a stop, a slow spell, or a failure whose repair time is known."""
    factor: float | None = None
    """For ``slow``: how many times as long computation takes."""
    target: str | None = None
    """For ``corrupt``: one of :data:`CORRUPT_TARGETS`; a weight where nothing is said."""
    cause: str | None = None
    """Component or reason in words, such as ``GPU HBM3``."""
    seed: int | None = None
    """Seed of the choices that the event leaves open (which bit, which moment inside the phase)."""
    generation: int | None = None
    """Generation of the plan in force, where the runtime recorded the event."""
    detail: str | None = None
    """Further words for people."""

    def __post_init__(self) -> None:
        """Check that the fields fit together."""
        for problem in _problems(self):
            raise TraceError(problem)

    @property
    def place(self) -> str:
        """The device or node that the event is about."""
        place = self.device if self.device is not None else self.node
        assert place is not None
        return place

    @property
    def loses_device(self) -> bool:
        """Whether the device is certainly gone afterwards, until a ``return``."""
        return self.event in LOSES_DEVICE


_FIELD_TYPES: dict[str, type] = {
    **{name: str for name in ("event", "device", "node", "peer", "phase", "target", "cause", "detail")},
    **{name: float for name in ("time_s", "duration_s", "factor")},
    **{name: int for name in ("step", "seed", "generation")},
}


def _problems(event: Event) -> Iterable[str]:
    """Yield in words each way in which the fields of ``event`` contradict each other."""
    if (event.device is None) == (event.node is None):
        yield "field 'device' or 'node': exactly one of the two must say where it happens"
    if event.phase is not None and event.step is None:
        yield f"field 'phase' is {event.phase!r}, but without 'step' it has no meaning: add 'step'"
    if event.phase is not None and event.phase not in PHASES:
        yield f"field 'phase' is {event.phase!r}; allowed: {', '.join(PHASES)}"
    if event.target is not None and event.target not in CORRUPT_TARGETS:
        yield f"field 'target' is {event.target!r}; allowed: {', '.join(CORRUPT_TARGETS)}"
    if event.event is EventKind.FLAKE and event.peer is None:
        yield "a 'flake' needs field 'peer', the device at the other end of the cut link"
    if event.peer is not None and event.peer == event.device:
        yield f"fields 'device' and 'peer' are both {event.peer!r}; a link has two different ends"
    if event.event is EventKind.SLOW and event.factor is None:
        yield "a 'slow' needs field 'factor', for example 2.0 when computation takes twice as long"
    for name in ("time_s", "duration_s", "step"):
        value = getattr(event, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            yield f"field {name!r} is {value}; it must be a finite number of at least 0"
    if event.factor is not None and not (math.isfinite(event.factor) and event.factor > 0):
        yield f"field 'factor' is {event.factor}; it must be a finite number above 0"


def event_from_json(row: Mapping[str, object], *, source: str = "event", number: int | None = None) -> Event:
    """The event that one JSON object describes.

    Args:
        row: The object, as ``json`` decodes it.
        source: File name for messages.
        number: Row number for messages, counted from 1.

    Raises:
        TraceError: naming file, row, field and what is allowed.
    """
    where = source if number is None else f"{source}, row {number}"
    values: dict[str, object] = {}
    for name, value in row.items():
        wanted = _FIELD_TYPES.get(name)
        if wanted is None:
            raise TraceError(f"{where}: unknown field {name!r}; allowed: {', '.join(_FIELD_TYPES)}")
        if value is None:
            continue
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise TraceError(f"{where}: field {name!r} is {value!r}; it must be of type {wanted.__name__}")
        values[name] = value
    kind = values.get("event")
    if kind not in EventKind.__members__.values():
        allowed = ", ".join(kind.value for kind in EventKind)
        raise TraceError(f"{where}: field 'event' is {kind!r}; allowed: {allowed}")
    values["event"] = EventKind(str(kind))
    try:
        return Event(**values)  # type: ignore[arg-type]  # each value's type was checked against _FIELD_TYPES above
    except TraceError as error:
        raise TraceError(f"{where}: {error}") from None


def event_to_json(event: Event) -> dict[str, object]:
    """The event as a JSON object without its empty fields; :func:`event_from_json` reads it back."""
    row: dict[str, object] = {}
    for field in fields(event):
        value = getattr(event, field.name)
        if value is not None:
            row[field.name] = value.value if isinstance(value, EventKind) else value
    return row


def parse_events(text: str, *, source: str = "events") -> tuple[Event, ...]:
    """The events of a JSON list or of JSON lines, in the order of the text.

    Rows with a key ``record`` instead of ``event`` are other notes of the runtime and are passed over.

    Raises:
        TraceError: naming file, row number, field and what is allowed.
    """
    return tuple(
        event_from_json(row, source=source, number=number)
        for number, row in _rows(text, source)
        if "record" not in row or "event" in row
    )


def _rows(text: str, source: str) -> Iterable[tuple[int, Mapping[str, object]]]:
    """Yield (row number from 1, JSON object) from a JSON list or JSON lines."""
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise TraceError(f"{source}, line {error.lineno}: not JSON ({error.msg})") from None
        numbered = list(enumerate(rows, start=1))
    else:
        numbered = []
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip():
                continue
            try:
                numbered.append((number, json.loads(line)))
            except json.JSONDecodeError as error:
                raise TraceError(f"{source}, row {number}: not JSON ({error.msg}): {line[:80]!r}") from None
    for number, row in numbered:
        if not isinstance(row, dict):
            raise TraceError(f"{source}, row {number}: a row must be a JSON object, not {type(row).__name__}")
        yield number, row


def read_events(path: Path) -> tuple[Event, ...]:
    """The events of a file, a JSON list or JSON lines.

    Raises:
        TraceError: if the file cannot be read or a row is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read {path}: {error}. Give a file of events, a JSON list or JSON lines") from None
    return parse_events(text, source=str(path))


def write_events(path: Path, events: Iterable[Event]) -> None:
    """Write events as JSON lines, one object a line, in the given order."""
    lines = (json.dumps(event_to_json(event)) + "\n" for event in events)
    path.write_text("".join(lines), encoding="utf-8")
