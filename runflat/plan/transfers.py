"""What must move when one plan replaces another: a list of transfers."""

from __future__ import annotations

from dataclasses import dataclass

from runflat.errors import PlanError
from runflat.plan.plan import Place, Plan
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

    Sources are chosen so that each sends as little as possible, a device of the same replica first (its domain's links
    are the fastest). `bytes_per_element` counts everything that moves per element (parameter and optimizer state).

    Raises:
        PlanError: a unit has no holder left; the caller must fall back to a checkpoint.
    """
    had = _device_units(spec, old)
    alive = {new.device(place) for place in new.places}
    sources = {kind: {unit: [old.device(p) for p in places if old.device(p) in alive] for unit, places in units.items()}
               for kind, units in holders(spec, old).items()}  # fmt: skip
    sent: dict[str, int] = dict.fromkeys(sorted(alive), 0)
    moves: list[Transfer] = []
    for place in new.places:
        device = new.device(place)
        for kind, units in new.replica(place[0]).held(spec.kinds, place[1]).items():
            for unit in units:
                if unit in had.get(device, {}).get(kind, ()):
                    continue
                source = _source(sources[kind][unit], old, place, sent, kind, unit)
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


def _source(candidates: list[str], old: Plan, target: Place, sent: dict[str, int], kind: str, unit: int) -> str:
    if not candidates:
        raise PlanError(f"no live device holds {kind} unit {unit}: its state must come from a checkpoint.")

    def rank(device: str) -> tuple[bool, int, str]:
        place = old.place(device)
        return (place is None or place[0] != target[0], sent[device], device)

    return min(candidates, key=rank)


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
