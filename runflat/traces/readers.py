"""Readers of recorded failures: InfiniteHBD-Trace, spot add and remove lists, our own CSV and JSON lines.

Each names file, row and field of a bad row. :func:`read_trace` finds the format by itself.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

from runflat.cluster.events import parse_events
from runflat.errors import TraceError
from runflat.traces.trace import DAY_S, FailureTrace, build_trace, trace_from_events

TraceFormat = Literal["auto", "infinitehbd", "spot", "csv", "events"]

CSV_FIELDS = ("time_s", "duration_s", "device", "cause")
"""Columns of our own CSV; ``duration_s`` may be empty (never repaired), ``cause`` may be left out."""


def read_trace(
    path: Path, trace_format: TraceFormat = "auto", *, num_devices: int | None = None, span_s: float | None = None
) -> FailureTrace:
    """The trace in a file.

    Args:
        path: File to read.
        trace_format: Format; ``auto`` looks at name and first characters.
        num_devices: Devices or nodes that were watched, where the file names only those that failed.
        span_s: Length of the observation, where it went on after the last event.

    Raises:
        TraceError: naming file, row, field and what is allowed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read {path}: {error}") from None
    readers: Mapping[str, Callable[[str, str], FailureTrace]] = {
        "infinitehbd": _infinitehbd,
        "spot": _spot,
        "csv": _csv,
        "events": lambda text, source: trace_from_events(parse_events(text, source=source), source=source),
    }
    trace = readers[trace_format if trace_format != "auto" else _guess(text)](text, str(path))
    known = max(trace.num_devices, num_devices or 0)
    if num_devices is not None and num_devices < trace.num_devices:
        raise TraceError(f"{path}: names {trace.num_devices} devices, more than the {num_devices} said to be watched")
    changed = {field: getattr(trace, field) for field in FailureTrace.__dataclass_fields__}
    return FailureTrace(**{**changed, "num_devices": known, "span_s": trace.span_s if span_s is None else span_s})


def _guess(text: str) -> str:
    """Format by the first characters."""
    head = text.lstrip()[:400]
    if head.startswith(("[", "{")):
        return "infinitehbd" if '"event_type"' in head or '"node_id"' in head else "events"
    first = head.split("\n", 1)[0].split(",")
    return "spot" if len(first) == 3 and first[1].strip() in ("add", "remove") else "csv"


def _number(value: object, *, source: str, row: int, field: str) -> float:
    """A finite number of at least 0."""
    try:
        number = float(value)  # type: ignore[arg-type]  # what is no number raises, and is reported below
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise TraceError(f"{source}, row {row}: field {field!r} is {value!r}; it must be a finite number of at least 0")
    return number


def _infinitehbd(text: str, source: str) -> FailureTrace:
    """Pairs of fault_start and fault_end by node and fault type; days; rows are whole nodes."""
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(f"{source}, line {error.lineno}: not JSON ({error.msg})") from None
    numbers: dict[str, int] = {}
    open_: dict[tuple[str, str], list[tuple[float, str]]] = {}
    found: list[tuple[float, float, int, str]] = []
    days: list[float] = []
    for number, row in enumerate(rows, start=1):
        node, day, kind, fault = _infinitehbd_row(row, source, number)
        days.append(day)
        key = (node, json.dumps(fault, sort_keys=True))
        cause = str(fault.get("Class") or fault.get("Level") or "unknown")
        if kind == "fault_start":
            numbers.setdefault(node, len(numbers))
            open_.setdefault(key, []).append((day, cause))
            continue
        if not open_.get(key):
            raise TraceError(f"{source}, row {number}: 'fault_end' of node {node!r} without a 'fault_start' before it")
        start, cause = open_[key].pop(0)
        found.append((start * DAY_S, (day - start) * DAY_S, numbers[node], cause))
    found.extend(
        (day * DAY_S, math.inf, numbers[key[0]], cause) for key, days_ in open_.items() for day, cause in days_
    )
    first_s = min(days, default=0.0) * DAY_S
    shifted = [(time_s - first_s, duration_s, node, cause) for time_s, duration_s, node, cause in found]
    span_s = max(days, default=0.0) * DAY_S - first_s
    return build_trace(shifted, num_devices=len(numbers), span_s=span_s, names=tuple(numbers))


def _infinitehbd_row(row: object, source: str, number: int) -> tuple[str, float, str, Mapping[str, object]]:
    """(node, day, kind, fault type) of one row."""
    if not isinstance(row, dict):
        raise TraceError(f"{source}, row {number}: a row must be a JSON object, not {type(row).__name__}")
    for field in ("node_id", "event_time", "event_type", "fault_type"):
        if field not in row:
            raise TraceError(f"{source}, row {number}: field {field!r} is missing")
    day = _number(row["event_time"], source=source, row=number, field="event_time")
    if row["event_type"] not in ("fault_start", "fault_end"):
        raise TraceError(
            f"{source}, row {number}: field 'event_type' is {row['event_type']!r}; allowed: fault_start, fault_end"
        )
    if not isinstance(row["fault_type"], dict):
        raise TraceError(f"{source}, row {number}: field 'fault_type' is {row['fault_type']!r}; it must be an object")
    return str(row["node_id"]), day, row["event_type"], row["fault_type"]


def _spot(text: str, source: str) -> FailureTrace:
    """Spot capacity: ``milliseconds,add|remove,node``; a node is out from ``remove`` to its next ``add``.

    Before its first ``add`` a node does not exist and so is not counted as out.
    """
    numbers: dict[str, int] = {}
    removed: dict[str, float] = {}
    up: set[str] = set()
    rows: list[tuple[float, float, int, str]] = []
    last_s = 0.0
    for number, row in enumerate(csv.reader(text.splitlines()), start=1):
        if not row:
            continue
        if len(row) != 3:
            raise TraceError(f"{source}, row {number}: {len(row)} columns; wanted: milliseconds,add|remove,node")
        last_s = _number(row[0], source=source, row=number, field="milliseconds") / 1000
        kind, node = row[1].strip(), row[2].strip()
        if kind not in ("add", "remove"):
            raise TraceError(f"{source}, row {number}: second column is {kind!r}; allowed: add, remove")
        numbers.setdefault(node, len(numbers))
        if (kind == "add") == (node in up):
            raise TraceError(
                f"{source}, row {number}: {kind} of {node!r}, which is {'already' if node in up else 'not'} up"
            )
        if kind == "remove":
            up.remove(node)
            removed[node] = last_s
            continue
        up.add(node)
        if node in removed:
            start_s = removed.pop(node)
            rows.append((start_s, last_s - start_s, numbers[node], "preempted"))
    rows.extend((start_s, math.inf, numbers[node], "preempted") for node, start_s in removed.items())
    return build_trace(rows, num_devices=len(numbers), span_s=last_s, names=tuple(numbers))


def _csv(text: str, source: str) -> FailureTrace:
    """Our own CSV with the header of :data:`CSV_FIELDS`."""
    reader = csv.DictReader(text.splitlines())
    header: Iterable[str] = reader.fieldnames or ()
    missing = [name for name in CSV_FIELDS[:3] if name not in header]
    unknown = [name for name in header if name not in CSV_FIELDS]
    if missing or unknown:
        raise TraceError(
            f"{source}: header lacks {missing or 'nothing'} and has unknown {unknown or 'nothing'}; "
            f"wanted: {','.join(CSV_FIELDS)}"
        )
    numbers: dict[str, int] = {}
    rows: list[tuple[float, float, int, str]] = []
    for number, row in enumerate(reader, start=2):
        time_s = _number(row["time_s"], source=source, row=number, field="time_s")
        text_s = row["duration_s"]
        duration_s = _number(text_s, source=source, row=number, field="duration_s") if text_s else math.inf
        if not row["device"]:
            raise TraceError(f"{source}, row {number}: field 'device' is empty")
        device = numbers.setdefault(row["device"], len(numbers))
        rows.append((time_s, duration_s, device, row.get("cause") or "unknown"))
    ends = [row[0] + row[1] for row in rows if math.isfinite(row[1])]
    return build_trace(
        rows,
        num_devices=len(numbers),
        span_s=max([*ends, *(row[0] for row in rows)], default=0.0),
        names=tuple(numbers),
    )


def write_csv(path: Path, trace: FailureTrace) -> None:
    """Write a trace as our own CSV."""
    lines = [",".join(CSV_FIELDS)]
    for row in range(len(trace)):
        number = int(trace.device[row])
        duration_s = float(trace.duration_s[row])
        lines.append(
            f"{float(trace.time_s[row])!r},{duration_s!r},"
            if math.isfinite(duration_s)
            else f"{float(trace.time_s[row])!r},,"
        )
        lines[-1] += f"{trace.names[number] if trace.names else number},{trace.causes[int(trace.cause[row])]}"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
