"""What a run has written, as frozen facts; how each row of its files becomes one. Imports no torch.

Times are seconds since the start of the run's first session; a run that was resumed in its folder has several sessions,
each of which counts its own time from 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
"""A JSON object of a file."""


class BadRowError(ValueError):
    """A row that is not what a run writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Draw and limits of all devices together during a step, in watts; None where not written."""

    draw_w: float | None
    limit_w: float | None
    budget_w: float | None
    devices: tuple[tuple[str, float, float | None], ...] = ()
    """(device, limit, draw) of each one that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A line of steps.jsonl; what nobody reported is None."""

    step: int
    time_s: float
    loss: float | None
    tokens_per_s: float | None
    step_s: float | None
    generation: int
    num_samples: int
    power: Power | None
    tokens_per_s_per_device: float | None = None
    mfu: float | None = None
    """Part of the devices' declared peak that the model's products used."""
    peak_bytes: float | None = None
    """Most memory that any device has used."""
    parts_s: tuple[tuple[str, float], ...] = ()
    """Seconds of each part of the step, of the replica that took longest for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRow:
    """An incident of events.jsonl: phases in order, each in seconds."""

    number: int
    devices: tuple[str, ...]
    step: int | None
    cause: str
    action: str
    strategy: str
    started_s: float
    phases_s: tuple[tuple[str, float], ...]
    stopped_s: float
    first_commit_s: float | None
    """From the end of the last phase to the first commit."""
    bytes_moved: int
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRow:
    """A change at a step boundary: who joined or left; `stages_s` passed while training went on."""

    time_s: float
    step: int
    generation: int
    joined: tuple[str, ...]
    left: tuple[str, ...]
    stages_s: tuple[tuple[str, float], ...]
    stopped_s: float
    bytes_moved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """An event of a device (fail, return, drain, ...), or a plan that was made (`plan`) or came into force (`took`)."""

    time_s: float
    kind: str
    device: str | None
    generation: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """Where the time of all devices went up to `time_s` of session `session`."""

    time_s: float
    session: int
    device_s: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One replica of a plan: the device at each slot (None where dead), its share of the batch, units held per slot."""

    replica: int
    devices: tuple[str | None, ...]
    num_sequences: int
    units: tuple[tuple[str, tuple[int, ...]], ...]
    """(kind, number of units of each slot)."""

    @property
    def degree(self) -> int:
        """Live devices."""
        return sum(device is not None for device in self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """What a figure needs of a plan."""

    generation: int
    tp_full: int
    replicas: tuple[ReplicaView, ...]


def number(row: Row, key: str, default: float | None = None) -> float | None:
    """The finite number at `key`, or the default.

    Raises:
        BadRowError: there is something else.
    """
    value = row.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRowError(f"{key} is {repr(value)[:60]}, not a number")
    try:
        found = float(value)
    except OverflowError:
        raise BadRowError(f"{key} is beyond all numbers that are used here") from None
    return found if math.isfinite(found) else None


def needed(row: Row, key: str) -> float:
    """The finite number at `key`, which must be there."""
    value = number(row, key)
    if value is None:
        raise BadRowError(f"{key} is missing or not finite")
    return value


def parts(row: Row, key: str) -> tuple[tuple[str, float], ...]:
    """(name, number) of the object at `key`, in its order."""
    value = row.get(key) or {}
    if not isinstance(value, Mapping):
        raise BadRowError(f"{key} is no object")
    return tuple((str(name), needed(value, name)) for name in value)


def names(row: Row, key: str) -> tuple[str, ...]:
    """The list of strings at `key`."""
    value = row.get(key) or []
    if not isinstance(value, list):
        raise BadRowError(f"{key} is no list")
    return tuple(str(item) for item in value)


def whole(row: Row, key: str) -> int:
    """The whole number at `key`, which must be there."""
    return int(needed(row, key))


def step_row(row: Row) -> Step:
    """The step of a line of steps.jsonl."""
    replicas = row.get("replicas") or []
    if not isinstance(replicas, list) or not all(isinstance(entry, Mapping) for entry in replicas):
        raise BadRowError("replicas is no list of objects")
    return Step(
        step=whole(row, "step"),
        time_s=needed(row, "time_s"),
        loss=number(row, "loss"),
        tokens_per_s=number(row, "tokens_per_s"),
        step_s=number(row, "step_s"),
        generation=whole(row, "generation"),
        num_samples=int(sum(number(entry, "num_samples", 0.0) or 0.0 for entry in replicas)),
        power=_power(row),
        tokens_per_s_per_device=number(row, "tokens_per_s_per_device"),
        mfu=number(row, "mfu"),
        peak_bytes=number(row, "peak_bytes"),
        parts_s=_longest_parts(replicas),
    )


def _longest_parts(replicas: Sequence[Row]) -> tuple[tuple[str, float], ...]:
    """Of each part of a step the most seconds that a replica took."""
    longest: dict[str, float] = {}
    for entry in replicas:
        for name, seconds in parts(entry, "parts_s"):
            longest[name] = max(seconds, longest.get(name, 0.0))
    return tuple(longest.items())


def _power(row: Row) -> Power | None:
    values = row.get("power")
    if not isinstance(values, Mapping):
        return None
    return Power(
        draw_w=number(values, "draw_w"),
        limit_w=number(values, "limit_w"),
        budget_w=number(values, "budget_w"),
        devices=_device_power(values.get("devices") or {}),
    )


def _device_power(value: object) -> tuple[tuple[str, float, float | None], ...]:
    """The object of device -> [limit, draw]."""
    if not isinstance(value, Mapping):
        raise BadRowError("power of devices is no object")
    found = []
    for device, pair in value.items():
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRowError(f"power of {device} is no pair of limit and draw")
        limits = dict(zip(("limit", "draw"), pair, strict=True))
        found.append((str(device), needed(limits, "limit"), number(limits, "draw")))
    return tuple(found)


def incident_row(row: Row) -> IncidentRow:
    """The incident of a row of events.jsonl."""
    step = number(row, "step")
    return IncidentRow(
        number=whole(row, "number"),
        devices=names(row, "devices"),
        step=None if step is None else int(step),
        cause=str(row.get("cause", "")),
        action=str(row.get("action", "")),
        strategy=str(row.get("strategy", "")),
        started_s=needed(row, "started_s"),
        phases_s=parts(row, "phases_s"),
        stopped_s=needed(row, "stopped_s"),
        first_commit_s=number(row, "first_commit_s"),
        bytes_moved=int(number(row, "bytes_moved", 0.0) or 0),
        words=names(row, "words"),
    )


def change_row(row: Row) -> ChangeRow:
    """The change of a row of events.jsonl."""
    return ChangeRow(
        time_s=needed(row, "time_s"),
        step=whole(row, "step"),
        generation=whole(row, "generation"),
        joined=names(row, "joined"),
        left=names(row, "left"),
        stages_s=parts(row, "stages_s"),
        stopped_s=needed(row, "stopped_s"),
        bytes_moved=int(number(row, "bytes_moved", 0.0) or 0),
    )


def plan_view(data: Row) -> PlanView:
    """What a plan's file says.

    Raises:
        BadRowError: it is no plan.
    """
    try:
        replicas = tuple(
            ReplicaView(
                replica=int(entry["replica"]),
                devices=tuple(None if device is None else str(device) for device in entry["devices"]),
                num_sequences=int(entry["num_sequences"]),
                units=tuple((str(kind), tuple(len(held) for held in slots)) for kind, slots in entry["assignments"]),
            )
            for entry in data["replicas"]
        )
        return PlanView(generation=int(data["generation"]), tp_full=int(data["tp_full"]), replicas=replicas)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise BadRowError(f"not a plan ({error})") from None
