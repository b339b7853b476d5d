"""From a model, a layout and the dead places to a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from runflat.errors import PlanError
from runflat.plan.assignment import Assignment, assign
from runflat.plan.batch import split_batch
from runflat.plan.cost import loads
from runflat.plan.plan import Place, Plan, ReplicaPlan
from runflat.plan.units import ModelSpec


def build_plan(
    spec: ModelSpec,
    devices: Mapping[Place, str],
    tp_full: int,
    num_sequences: int,
    seq_len: int,
    previous: Plan | None = None,
    generation: int = 0,
) -> Plan:
    """The plan for the live `devices`: assignments that move little from `previous`, and the fastest batch split.

    Replicas without a device leave the plan, and so does one that is so slow that its best share is zero sequences.

    Args:
        spec: the model.
        devices: device id per live place.
        tp_full: full degree.
        num_sequences: sequences of the global batch.
        seq_len: tokens per sequence; it weighs attention against matrix products.
        previous: the plan in force, if any.
        generation: number of the new plan.
    """
    if not devices:
        raise PlanError("no live device is left: nothing can be planned.")
    before = {replica.replica: dict(replica.assignments) for replica in previous.replicas} if previous else {}
    _check_degree(spec, tp_full)
    replicas = [
        _replica_plan(spec, devices, tp_full, number, before.get(number, {}))
        for number in sorted({replica for replica, _ in devices})
    ]
    seconds = [max(loads(spec, replica, seq_len).values()) for replica in replicas]
    shares = split_batch(num_sequences, seconds)
    kept = (
        ReplicaPlan(replica.replica, replica.devices, replica.assignments, share)
        for replica, share in zip(replicas, shares, strict=True)
        if share
    )
    return Plan(generation, tp_full, tuple(kept))


def _replica_plan(
    spec: ModelSpec, devices: Mapping[Place, str], tp_full: int, number: int, before: Mapping[str, Assignment]
) -> ReplicaPlan:
    slots = tuple(devices.get((number, slot)) for slot in range(tp_full))
    dead = [slot for slot, device in enumerate(slots) if device is None]
    assignments = tuple(
        (kind.name, assign(kind.num_units, tp_full, dead, before.get(kind.name))) for kind in spec.assigned_kinds
    )
    return ReplicaPlan(number, slots, assignments, 0)


def _check_degree(spec: ModelSpec, tp_full: int) -> None:
    smallest = min(spec.assigned_kinds, key=lambda kind: kind.num_units)
    if smallest.num_units < tp_full:
        raise PlanError(
            f"TP {tp_full} is more than the {smallest.num_units} units of kind '{smallest.name}' of {spec.name}: "
            f"use a TP degree of at most {smallest.num_units}."
        )


def live_devices(tp_full: int, num_replicas: int, dead: Iterable[Place]) -> dict[Place, str]:
    """Device ids of a fresh layout without the `dead` places.

    Raises:
        PlanError: a dead place that does not exist, or every slot of a replica dead.
    """
    gone = set(dead)
    for replica, slot in sorted(gone):
        if not (0 <= replica < num_replicas and 0 <= slot < tp_full):
            raise PlanError(
                f"dead place {replica}:{slot} does not exist: this layout has replicas 0..{num_replicas - 1} "
                f"with slots 0..{tp_full - 1}."
            )
    places = [(replica, slot) for replica in range(num_replicas) for slot in range(tp_full)]
    live = {place: f"{place[0]}:{place[1]}" for place in places if place not in gone}
    for replica in sorted(set(range(num_replicas)) - {place[0] for place in live}):
        remedy = f"plan with {num_replicas - 1} replicas instead" if num_replicas > 1 else "keep one of them"
        raise PlanError(f"all {tp_full} slots of replica {replica} are dead: {remedy}.")
    return live
