"""What must move when one plan replaces another: a list of transfers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from runflat.errors import PlanError
from runflat.plan.plan import Plan
from runflat.plan.sync_groups import holders
from runflat.plan.units import ModelSpec, unit_bytes


@dataclass(frozen=True)
class Transfer:
    """Units start..stop-1 of `kind` go from device `source` to device `target`: `num_bytes` over all parameters."""

    kind: str
    start: int
    stop: int
    source: str
    target: str
    num_bytes: int


def transfers(spec: ModelSpec, old: Plan, new: Plan, bytes_per_element: int) -> tuple[Transfer, ...]:
    """The units that each device of `new` lacks, each from a holder under `old` that is still a device of `new`.

    Sources are chosen as in `nearest`. `bytes_per_element` counts everything that moves per element (parameter and
    optimizer state).

    Raises:
        PlanError: a unit has no holder left; the caller must fall back to a checkpoint.
    """
    had = _device_units(spec, old)
    lost = lost_units(spec, old, new)
    for kind, units in lost.items():
        raise PlanError(f"no live device holds {kind} unit {units[0]}: its state must come from a checkpoint.")
    alive = set(new.devices)
    held = holders(spec, old)
    sources: dict[tuple[str, int], list[str]] = {}
    sent: dict[str, int] = dict.fromkeys(alive, 0)
    moves: list[Transfer] = []
    for place in new.places:
        device = new.device(place)
        for kind, units in new.replica(place[0]).held(spec.kinds, place[1]).items():
            for unit in units:
                if unit in had.get(device, {}).get(kind, ()):
                    continue
                if (kind, unit) not in sources:
                    found = (old.device(holder) for holder in held[kind][unit])
                    sources[kind, unit] = [holder for holder in found if holder in alive]
                source = nearest(sources[kind, unit], new, device, sent)
                num_bytes = unit_bytes(spec, kind, unit, bytes_per_element)
                sent[source] += num_bytes
                moves.append(Transfer(kind, unit, unit + 1, source, device, num_bytes))
    return _joined(moves)


def _device_units(spec: ModelSpec, plan: Plan) -> dict[str, dict[str, frozenset[int]]]:
    return {
        plan.device(place): {
            kind: frozenset(units) for kind, units in plan.replica(place[0]).held(spec.kinds, place[1]).items()
        }
        for place in plan.places
    }


def lost_units(spec: ModelSpec, old: Plan, new: Plan) -> dict[str, tuple[int, ...]]:
    """Per kind: the units that no device of `new` held under `old`, ascending; kinds without such units are left out.

    They must come from a checkpoint.
    """
    kept = [place for place in old.places if new.place(old.device(place)) is not None]
    had: dict[str, set[int]] = {kind.name: set() for kind in spec.kinds}
    for place in kept:
        for kind, units in old.replica(place[0]).held(spec.kinds, place[1]).items():
            had[kind].update(units)
    lost = {
        kind.name: tuple(unit for unit in range(kind.num_units) if unit not in had[kind.name]) for kind in spec.kinds
    }
    return {kind: units for kind, units in lost.items() if units}


def nearest(candidates: Iterable[str], plan: Plan, target: str, sent: Mapping[str, int]) -> str:
    """The candidate from which `target` gets a unit.

    One of its replica first, whose links are the fastest; then one of its domain, as far as domains are known; among
    these the one that has `sent` least.
    """
    home, domain = plan.place(target), plan.domain(target)
    assert home is not None

    def distance(device: str) -> int:
        place = plan.place(device)
        if place is not None and place[0] == home[0]:
            return 0
        return 1 if domain is not None and plan.domain(device) == domain else 2

    return min(candidates, key=lambda device: (distance(device), sent[device], device))


def _joined(moves: list[Transfer]) -> tuple[Transfer, ...]:
    """The same moves with neighbouring units of one kind, source and target as one."""
    joined: list[Transfer] = []
    for move in sorted(moves, key=lambda m: (m.target, m.source, m.kind, m.start)):
        last = joined[-1] if joined else None
        if last and (last.kind, last.source, last.target, last.stop) == (
            move.kind,
            move.source,
            move.target,
            move.start,
        ):
            joined[-1] = Transfer(
                last.kind, last.start, move.stop, last.source, last.target, last.num_bytes + move.num_bytes
            )
        else:
            joined.append(move)
    return tuple(joined)
