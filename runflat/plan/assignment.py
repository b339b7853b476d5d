"""Which slot holds which units: keep what you hold, deal out what was lost (design: partition)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from runflat.errors import PlanError
from runflat.plan.units import Kind

Assignment = tuple[tuple[int, ...], ...]
"""Units per slot, ascending; a dead slot holds none."""


def base_assignment(num_units: int, tp_full: int) -> Assignment:
    """Contiguous, balanced ranges over all slots; sizes differ by at most one, the larger ones first."""
    size, larger = divmod(num_units, tp_full)
    starts = [slot * size + min(slot, larger) for slot in range(tp_full + 1)]
    return tuple(tuple(range(starts[slot], starts[slot + 1])) for slot in range(tp_full))


def assign(num_units: int, tp_full: int, dead_slots: Collection[int], previous: Assignment | None = None) -> Assignment:
    """Units per slot after the slots in `dead_slots` are gone, moving as little as balance allows.

    Rules, in order: a live slot holds its base range; loads of live slots are within one unit of each other; of the
    layouts that allow this, one that moves fewest units away from where `previous` has them. Without `previous`,
    orphans (units whose base slot is dead) are dealt to the slots with the fewest units.

    Raises:
        PlanError: no live slot, a dead slot that does not exist, or fewer units than slots.
    """
    _check(num_units, tp_full, dead_slots)
    base = base_assignment(num_units, tp_full)
    live = [slot for slot in range(tp_full) if slot not in dead_slots]
    orphans = [unit for slot in sorted(set(dead_slots)) for unit in base[slot]]
    held: dict[int, list[int]] = {slot: [] for slot in live}
    if previous is not None:
        where = {unit: slot for slot, units in enumerate(previous) for unit in units}
        for unit in orphans:
            if where.get(unit) in held:
                held[where[unit]].append(unit)
    capacity = _capacities(num_units, {slot: len(base[slot]) for slot in live}, held)
    for slot in live:
        del held[slot][capacity[slot] - len(base[slot]) :]
    kept = {unit for units in held.values() for unit in units}
    loads = {slot: len(base[slot]) + len(held[slot]) for slot in live}
    for unit in orphans:
        if unit not in kept:
            slot = min((slot for slot in live if loads[slot] < capacity[slot]), key=lambda s: (loads[s], s))
            held[slot].append(unit)
            loads[slot] += 1
    return tuple(tuple(sorted((*base[slot], *held[slot]))) if slot in held else () for slot in range(tp_full))


def _check(num_units: int, tp_full: int, dead_slots: Collection[int]) -> None:
    unknown = sorted(slot for slot in dead_slots if not 0 <= slot < tp_full)
    if unknown:
        raise PlanError(f"dead slot {unknown[0]} does not exist: a replica of TP {tp_full} has slots 0..{tp_full - 1}.")
    if len(set(dead_slots)) >= tp_full:
        raise PlanError(f"all {tp_full} slots of the replica are dead: leave the replica out instead.")
    if num_units < tp_full:
        raise PlanError(f"{num_units} units cannot be split over TP {tp_full}: use a TP degree of at most {num_units}.")


def _capacities(num_units: int, base_loads: Mapping[int, int], kept: Mapping[int, list[int]]) -> dict[int, int]:
    """Final load of each live slot: floor or floor+1 of the mean, the extra ones where they save most moves."""
    floor, extra = divmod(num_units, len(base_loads))
    wish = {slot: base_loads[slot] + len(kept[slot]) for slot in base_loads}

    def rank(slot: int) -> tuple[bool, int, int]:
        # First the slots that need the extra unit for their own base or for an orphan that they have. Where a base
        # needs it, the mean is so low that there are extra units for all of these.
        return (wish[slot] <= floor, base_loads[slot], slot)

    larger = set(sorted(base_loads, key=rank)[:extra])
    return {slot: floor + (slot in larger) for slot in base_loads}


def held_units(kinds: tuple[Kind, ...], assignments: Mapping[str, Assignment], slot: int) -> dict[str, tuple[int, ...]]:
    """Units per kind that `slot` stores, kinds with a parent included."""
    held = {kind.name: assignments[kind.name][slot] for kind in kinds if kind.parent is None}
    for kind in kinds:
        if kind.parent is not None:
            held[kind.name] = kind.units_of_parent(held[kind.parent])
    return held
