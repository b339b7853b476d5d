"""Who has which part of the state when optimizer state is sharded, and what a change of plan has to move.

The controller decides by it whether the run can go on from live state, and each device works out by the same functions
what it sends and gets: only who holds what goes over the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from runflat.plan.piece_moves import (
    TENSORS_OF,
    Part,
    PieceMoves,
    piece_moves,
    union,
    whole_weights,
    without,
)
from runflat.plan.plan import Place, Plan
from runflat.plan.units import REPLICATED, ModelSpec
from runflat.plan.zero import ParamHeld


@dataclass(frozen=True)
class Origin:
    """What `device` held under the plan of `generation`, live or as a copy in memory.

    `gathered`: the all-gather after its last step had ended, so that all its weights are of that step. Else only those
    of its kept pieces are.
    """

    device: str
    generation: int
    gathered: bool = True


class Keeping(Protocol):
    """Whose pieces are where, under one plan."""

    def kept(self, place: Place) -> ParamHeld:
        """The pieces of which the device at `place` keeps moments."""


@dataclass(frozen=True)
class ShardedState:
    """What each device has and needs, for one model; `ownership` gives that of a plan, the same on every device."""

    spec: ModelSpec
    element_bytes: int
    ownership: Callable[[Plan], Keeping]

    def kept(self, plan: Plan, device: str) -> ParamHeld:
        """The pieces of which `device` keeps moments under `plan`; none where it has no place in it."""
        place = plan.place(device)
        return self.ownership(plan).kept(place) if place is not None else {}

    def part(self, plan: Plan, device: str, gathered: bool = True) -> Part:
        """What is valid on `device` under `plan`."""
        return self._part(plan, self.ownership(plan), device, gathered)

    def _part(self, plan: Plan, keeping: Keeping, device: str, gathered: bool) -> Part:
        place = plan.place(device)
        if place is None:
            return Part({}, {})
        kept = keeping.kept(place)
        return Part(whole_weights(self.spec, plan, device) if gathered else kept, kept)

    def have(self, origins: Mapping[str, Collection[Origin]], plans: Mapping[int, Plan]) -> dict[str, Part]:
        """What each device has, all its origins together; those of plans that are not known count for nothing."""
        numbers = {origin.generation for found in origins.values() for origin in found}
        keeping = {number: self.ownership(plans[number]) for number in numbers if number in plans}
        return {
            device: _joined(
                self._part(plans[o.generation], keeping[o.generation], o.device, o.gathered)
                for o in found
                if o.generation in keeping
            )
            for device, found in origins.items()
        }

    def moves(
        self,
        origins: Mapping[str, Collection[Origin]],
        plans: Mapping[int, Plan],
        plan: Plan,
        wrong: Mapping[str, Collection[str]] = MappingProxyType({}),
    ) -> PieceMoves:
        """What each device of `plan` lacks, from devices of `plan` that have it.

        Args:
            origins: what each device has; one that is missing has nothing.
            plans: the plans that the origins name.
            plan: the plan to be taken up.
            wrong: per device units (`kind unit`) whose weights are not to be used.
        """
        have = {name: without(part, wrong.get(name, ())) for name, part in self.have(origins, plans).items()}
        keeping = self.ownership(plan)
        want = {name: self._part(plan, keeping, name, gathered=True) for name in plan.devices}
        return piece_moves(self.spec, have, want, plan, self.element_bytes)

    def missing(self, parts: Iterable[Part]) -> tuple[str, ...]:
        """What none of `parts` has, in words; empty if they make up everything."""
        found = _joined(parts)
        return tuple(
            describe(what, param.name, kind, unit)
            for what in TENSORS_OF
            for param in self.spec.params
            for kind in param.kinds
            for unit in _rest(self._units(kind), found.of(what).get(param.name, {}).get(kind, ()))
        )

    def _units(self, kind: str) -> range:
        return range(1 if kind == REPLICATED else self.spec.kind(kind).num_units)


def _joined(parts: Iterable[Part]) -> Part:
    listed = list(parts)
    if len(listed) == 1:
        return listed[0]
    return Part(union(part.weight for part in listed), union(part.moments for part in listed))


def _rest(units: range, had: Sequence[int]) -> list[int]:
    known = set(had)
    return [unit for unit in units if unit not in known]


def describe(what: str, param: str, kind: str, unit: int) -> str:
    """A piece in words."""
    of = param if kind == REPLICATED else f"{kind} {unit} of {param}"
    return f"the weights of {of}" if what == "weight" else f"the optimizer state of {of}"
