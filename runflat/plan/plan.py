"""The plan: frozen data that says which device holds what and does how much. Printable, JSON, comparable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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

    @cached_property
    def _by_number(self) -> Mapping[int, ReplicaPlan]:
        return {replica.replica: replica for replica in self.replicas}

    @cached_property
    def _place_of(self) -> Mapping[str, Place]:
        return {self.device(place): place for place in self.places}

    def to_json(self) -> str:
        """JSON text; `plan_from_json` gives an equal plan back."""
        return json.dumps(asdict(self))


def plan_from_json(text: str) -> Plan:
    """The plan that `Plan.to_json` wrote."""
    data: dict[str, Any] = json.loads(text)
    return Plan(data["generation"], data["tp_full"], tuple(_replica(entry) for entry in data["replicas"]))


def _replica(entry: Mapping[str, Any]) -> ReplicaPlan:
    assignments = tuple(
        (name, tuple(tuple(units) for units in assignment)) for name, assignment in entry["assignments"]
    )
    return ReplicaPlan(entry["replica"], tuple(entry["devices"]), assignments, entry["num_sequences"])
