"""The plan: frozen data that says which device holds what and does how much. Printable, JSON, comparable."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from runflat.errors import PlanError
from runflat.plan.assignment import Assignment, held_units
from runflat.plan.units import Kind

Place = tuple[int, int]
"""(replica, slot)."""


@dataclass(frozen=True)
class ReplicaPlan:
    """One replica: the device at each slot (None where dead), what each slot holds, and its share of the batch.

    `assignments` has one entry per kind that has an assignment of its own.
    """

    replica: int
    devices: tuple[str | None, ...]
    assignments: tuple[tuple[str, Assignment], ...]
    num_sequences: int

    @cached_property
    def live_slots(self) -> tuple[int, ...]:
        """Slots that have a device."""
        return tuple(slot for slot, device in enumerate(self.devices) if device is not None)

    @property
    def dead_slots(self) -> tuple[int, ...]:
        """Slots without a device."""
        return tuple(slot for slot, device in enumerate(self.devices) if device is None)

    @property
    def tp(self) -> int:
        """Current degree."""
        return len(self.live_slots)

    def held(self, kinds: tuple[Kind, ...], slot: int) -> dict[str, tuple[int, ...]]:
        """Units per kind that the device at `slot` stores."""
        return held_units(kinds, dict(self.assignments), slot)


@dataclass(frozen=True)
class Plan:
    """What all devices do in one generation."""

    generation: int
    tp_full: int
    replicas: tuple[ReplicaPlan, ...]
    domains: tuple[tuple[str, str], ...] = ()
    """(device, domain) of the devices whose domain is known; the same on every device, as all else here."""

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Live places, by replica then slot; a device's rank in the world is its position here."""
        return tuple((replica.replica, slot) for replica in self.replicas for slot in replica.live_slots)

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Device ids, in the order of the places."""
        return tuple(self.device(place) for place in self.places)

    @property
    def num_sequences(self) -> int:
        """Sequences of the global batch."""
        return sum(replica.num_sequences for replica in self.replicas)

    def replica(self, number: int) -> ReplicaPlan:
        """The plan of replica `number`; PlanError when it is not part of the plan."""
        if number in self._by_number:
            return self._by_number[number]
        known = ", ".join(str(replica.replica) for replica in self.replicas)
        raise PlanError(f"replica {number} is not in the plan of generation {self.generation}: it has {known}.")

    def device(self, place: Place) -> str:
        """Device id at a live place."""
        device = self.replica(place[0]).devices[place[1]]
        assert device is not None
        return device

    def place(self, device: str) -> Place | None:
        """Where `device` sits, or None when it is not part of the plan."""
        return self._place_of.get(device)

    def held(self, kinds: tuple[Kind, ...], device: str) -> dict[str, tuple[int, ...]]:
        """Units per kind that `device` stores; none where it has no place in the plan."""
        place = self.place(device)
        if place is None:
            return {kind.name: () for kind in kinds}
        return self.replica(place[0]).held(kinds, place[1])

    def domain(self, device: str) -> str | None:
        """The domain of `device`, or None where nobody knows it."""
        return self._domain_of.get(device)

    @cached_property
    def _domain_of(self) -> Mapping[str, str]:
        return dict(self.domains)

    @cached_property
    def _by_number(self) -> Mapping[int, ReplicaPlan]:
        return {replica.replica: replica for replica in self.replicas}

    @cached_property
    def _place_of(self) -> Mapping[str, Place]:
        return {self.device(place): place for place in self.places}

    def to_json(self) -> str:
        """JSON text; `plan_from_json` gives an equal plan back."""
        replicas = [_fields(replica) for replica in self.replicas]
        return json.dumps({**_fields(self), "replicas": replicas, "domains": dict(self.domains)})

    def to_wire(self) -> str:
        """Short text for those who carry the plan out; `plan_from_wire` gives an equal plan back.

        Each device is told of all others, so its size counts with the square of a job. Replicas that hold alike share
        one list of ranges, and a device that sits where it was started is a 1: a few bytes for each device.
        """
        dealt: dict[Any, int] = {}
        names = {name: number for number, name in enumerate(dict.fromkeys(name for _, name in self.domains))}
        replicas = []
        for replica in self.replicas:
            number = dealt.setdefault(replica.assignments, len(dealt))
            devices = [_seat(replica.replica, slot, device) for slot, device in enumerate(replica.devices)]
            inside = [names.get(self.domain(device) or "", -1) for device in replica.devices if device is not None]
            where = inside[0] if len(set(inside)) == 1 else inside
            replicas.append((replica.replica, devices, number, replica.num_sequences, where))
        ranges = [
            [(name, [_ranges(units) for units in assignment]) for name, assignment in assignments]
            for assignments in dealt
        ]
        return json.dumps([self.generation, self.tp_full, ranges, replicas, list(names)], separators=(",", ":"))


def plan_from_json(text: str) -> Plan:
    """The plan that `Plan.to_json` wrote."""
    data: dict[str, Any] = json.loads(text)
    replicas = tuple(_replica(entry) for entry in data["replicas"])
    return Plan(data["generation"], data["tp_full"], replicas, tuple(data.get("domains", {}).items()))


def _fields(found: Plan | ReplicaPlan) -> dict[str, Any]:
    """The fields as they are: `asdict` would copy every unit first."""
    return {field.name: getattr(found, field.name) for field in fields(found)}


def _seat(replica: int, slot: int, device: str | None) -> str | int:
    """0 for nobody, 1 for the device that was started for the place."""
    return 0 if device is None else 1 if device == f"{replica}:{slot}" else device


def _ranges(units: Sequence[int]) -> list[int]:
    """First and last unit of each run of neighbours."""
    found: list[int] = []
    for unit in units:
        if found and found[-1] == unit - 1:
            found[-1] = unit
        else:
            found += (unit, unit)
    return found


def plan_from_wire(text: str) -> Plan:
    """The plan that `Plan.to_wire` wrote."""
    generation, tp_full, ranges, rows, known = json.loads(text)
    dealt = [
        tuple((name, tuple(tuple(_units(listed)) for listed in assignment)) for name, assignment in assignments)
        for assignments in ranges
    ]
    replicas = []
    domains: list[tuple[str, str]] = []
    for number, devices, which, num_sequences, where in rows:
        names = tuple(f"{number}:{slot}" if name == 1 else name or None for slot, name in enumerate(devices))
        replicas.append(ReplicaPlan(number, names, dealt[which], num_sequences))
        live = [name for name in names if name is not None]
        numbers = where if isinstance(where, list) else [where] * len(live)
        domains += ((name, known[at]) for name, at in zip(live, numbers, strict=True) if at >= 0)
    return Plan(generation, tp_full, tuple(replicas), tuple(domains))


def _units(ranges: Sequence[int]) -> Iterator[int]:
    for first, last in zip(ranges[::2], ranges[1::2], strict=True):
        yield from range(first, last + 1)


def _replica(entry: Mapping[str, Any]) -> ReplicaPlan:
    assignments = tuple(
        (name, tuple(tuple(units) for units in assignment)) for name, assignment in entry["assignments"]
    )
    return ReplicaPlan(entry["replica"], tuple(entry["devices"]), assignments, entry["num_sequences"])
