"""What must move where weights and optimizer state do not lie alike: with `zero1` by parameter, kind and run of units.

A device computes with the weights of all its units, but keeps the moments of its owned and mirrored pieces only. So
either may be whole where the other is lost, and each moves on its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from runflat.plan.plan import Plan
from runflat.plan.transfers import nearest
from runflat.plan.units import MOMENTS, REPLICATED, ModelSpec, ParamSpec
from runflat.plan.zero import ParamHeld

What = Literal["weight", "moments"]

TENSORS_OF: Mapping[What, tuple[str, ...]] = {"weight": ("weight",), "moments": MOMENTS}
"""The tensors that move with each."""


@dataclass(frozen=True)
class Part:
    """The part of the state that is valid on one device, or is to be there."""

    weight: ParamHeld
    moments: ParamHeld

    def of(self, what: What) -> ParamHeld:
        """Its weights or its moments."""
        return self.weight if what == "weight" else self.moments


@dataclass(frozen=True)
class PieceMove:
    """Units start..stop-1 of `kind` in `param`, their weights or their moments, go from `source` to `target`."""

    what: What
    param: str
    kind: str
    start: int
    stop: int
    source: str
    target: str
    num_bytes: int


@dataclass(frozen=True)
class PieceMoves:
    """All that must move, and what nobody has: (what, parameter, kind, unit)."""

    moves: tuple[PieceMove, ...]
    lost: tuple[tuple[What, str, str, int], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all moves."""
        return sum(move.num_bytes for move in self.moves)


def whole_weights(spec: ModelSpec, plan: Plan, device: str) -> ParamHeld:
    """All weights that `device` computes with under `plan`; empty where it has no place in it."""
    if plan.place(device) is None:
        return {}
    return by_param(spec, plan.held(spec.kinds, device))


def by_param(spec: ModelSpec, held: Mapping[str, tuple[int, ...]]) -> ParamHeld:
    """The units `held`, by kind, of each parameter; of one that is not cut, the whole."""
    known = {**held, REPLICATED: (0,)}
    return {param.name: {kind: known[kind] for kind in param.kinds} for param in spec.params}


def union(parts: Iterable[ParamHeld]) -> ParamHeld:
    """The units that are in any of `parts`."""
    found: dict[str, dict[str, set[int]]] = {}
    for part in parts:
        for name, held in part.items():
            for kind, units in held.items():
                found.setdefault(name, {}).setdefault(kind, set()).update(units)
    return {name: {kind: tuple(sorted(units)) for kind, units in held.items()} for name, held in found.items()}


def without(part: Part, wrong: Iterable[str]) -> Part:
    """`part` less the weights of units (`kind unit`) whose bits are not to be used."""
    bad = set(wrong)
    if not bad:
        return part
    weight = {
        name: {kind: tuple(unit for unit in units if f"{kind} {unit}" not in bad) for kind, units in held.items()}
        for name, held in part.weight.items()
    }
    return Part(weight, part.moments)


def piece_bytes(spec: ModelSpec, param: ParamSpec, kind: str, units: Sequence[int], bytes_per_element: int) -> int:
    """Bytes of `units` of `kind` in `param`, over all its segments of that kind."""
    if kind == REPLICATED:
        return param.numel * bytes_per_element
    segments = sum(segment.kind == kind for segment in param.segments)
    return segments * spec.kind(kind).size_of(units) * param.row_numel * bytes_per_element


def piece_moves(
    spec: ModelSpec,
    have: Mapping[str, Part],
    want: Mapping[str, Part],
    plan: Plan,
    element_bytes: int,
) -> PieceMoves:
    """What each device of `plan` lacks, from the nearest device of `plan` that has it.

    The result is the same wherever it is computed: devices go by their order in the plan, parameters by the model's.

    Args:
        spec: the model.
        have: what is valid on each device; one that is missing has nothing.
        want: what each device of the new plan is to have.
        plan: the new plan.
        element_bytes: bytes of one element of a weight or of one moment.
    """
    sent = dict.fromkeys(plan.devices, 0)
    moves: list[PieceMove] = []
    lost: dict[tuple[What, str, str, int], None] = {}
    for what, tensors in TENSORS_OF.items():
        for param in spec.params:
            for kind in param.kinds:
                sources = _Sources(
                    {device: _units(have.get(device), what, param.name, kind) for device in plan.devices}
                )
                for target in plan.devices:
                    missing = _units(want[target], what, param.name, kind) - sources.units[target]
                    for start, stop, found in sources.runs(missing):
                        if not found:
                            lost |= dict.fromkeys((what, param.name, kind, unit) for unit in range(start, stop))
                            continue
                        source = nearest(found, plan, target, sent)
                        size = piece_bytes(spec, param, kind, range(start, stop), len(tensors) * element_bytes)
                        sent[source] += size
                        moves.append(PieceMove(what, param.name, kind, start, stop, source, target, size))
    return PieceMoves(tuple(moves), tuple(lost))


def _units(part: Part | None, what: What, param: str, kind: str) -> frozenset[int]:
    return frozenset(part.of(what).get(param, {}).get(kind, ())) if part is not None else frozenset()


class _Sources:
    """Who has which units of one kind in one parameter."""

    def __init__(self, units: Mapping[str, frozenset[int]]):
        self.units = units
        self._holders: dict[int, tuple[str, ...]] = {}

    def runs(self, missing: frozenset[int]) -> Iterable[tuple[int, int, tuple[str, ...]]]:
        """(start, stop, holders) of the runs of `missing` with the same holders, ascending."""
        run: tuple[int, int, tuple[str, ...]] | None = None
        for unit in sorted(missing):
            if unit not in self._holders:
                self._holders[unit] = tuple(device for device, units in self.units.items() if unit in units)
            found = self._holders[unit]
            if run is not None and run[1] == unit and run[2] == found:
                run = (run[0], unit + 1, found)
                continue
            if run is not None:
                yield run
            run = (unit, unit + 1, found)
        if run is not None:
            yield run
