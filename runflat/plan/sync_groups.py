"""Who exchanges gradients with whom: sync groups, buckets, and the one order in which they are launched.

For each unit the sync group is the set of its holders over all replicas. Units with the same set share flat buckets.
With nobody dead every device meets exactly its same-slot peers, as in an ordinary TP x DP job.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from runflat.plan.plan import Place, Plan
from runflat.plan.units import ModelSpec, ParamSpec, axis_ranges, ranges_size

MAX_COMMUNICATORS = 16
"""Communicators per device (TP, world and sync groups) above which small groups share one all-to-all instead."""

Members = tuple[Place, ...]


@dataclass(frozen=True)
class Entry:
    """The units of one segment of one parameter that travel in a bucket; `numel` elements in all."""

    param: str
    segment: int
    units: tuple[int, ...]
    numel: int


@dataclass(frozen=True)
class Bucket:
    """One flat all-reduce: what it carries and who takes part. `position` is its turn in the backward pass."""

    position: int
    members: Members
    entries: tuple[Entry, ...]

    @property
    def numel(self) -> int:
        """Elements of the flat buffer."""
        return sum(entry.numel for entry in self.entries)


@dataclass(frozen=True)
class SyncLayout:
    """All gradient exchange of one plan.

    `buckets` are in launch order (position, then members), the same on every device; `exchange` are the buckets of
    groups too many to have communicators, sent together by one all-to-all over the world after the last bucket;
    `replicated` are the parameters of the one bucket over all devices.
    """

    buckets: tuple[Bucket, ...]
    exchange: tuple[Bucket, ...]
    replicated: tuple[str, ...]
    replicated_numel: int

    @property
    def groups(self) -> tuple[Members, ...]:
        """Member sets that need a communicator, ascending; sets of one member need none."""
        return tuple(sorted({bucket.members for bucket in self.buckets if len(bucket.members) > 1}))

    def of(self, place: Place) -> tuple[Bucket, ...]:
        """Buckets in which `place` takes part, in launch order."""
        return tuple(bucket for bucket in self.buckets if place in bucket.members)

    def communicators(self, place: Place) -> int:
        """Communicators that the device at `place` has: its sync groups, the world and its replica's TP group."""
        return sum(place in members for members in self.groups) + 2


def holders(spec: ModelSpec, plan: Plan) -> dict[str, dict[int, Members]]:
    """Per kind and unit: the places that hold it, over all replicas, ascending."""
    found: dict[str, dict[int, list[Place]]] = {kind.name: defaultdict(list) for kind in spec.kinds}
    for replica in plan.replicas:
        for slot in replica.live_slots:
            for kind, units in replica.held(spec.kinds, slot).items():
                for unit in units:
                    found[kind][unit].append((replica.replica, slot))
    return {kind: {unit: tuple(places) for unit, places in units.items()} for kind, units in found.items()}


def bucket_positions(spec: ModelSpec, bucket_bytes: int, bytes_per_element: int) -> dict[str, int]:
    """Per parameter: its bucket's turn in backward. Depends on the model alone, so that it is equal under every plan.

    Parameters are taken from the last of the forward pass to the first; a bucket closes when the *full* parameters in
    it, divided by nothing, reach `bucket_bytes`.
    """
    positions: dict[str, int] = {}
    position, filled = 0, 0
    for param in sorted(spec.params, key=lambda p: p.order, reverse=True):
        if param.rule != "sharded":
            continue
        if filled and filled + param.numel * bytes_per_element > bucket_bytes:
            position, filled = position + 1, 0
        positions[param.name] = position
        filled += param.numel * bytes_per_element
    return positions


def sync_layout(spec: ModelSpec, plan: Plan, bucket_bytes: int, bytes_per_element: int) -> SyncLayout:
    """Buckets of all sync groups of `plan`; `bucket_bytes` counts full parameters (see `bucket_positions`)."""
    by_members: dict[str, dict[Members, list[int]]] = {}
    for kind, units in holders(spec, plan).items():
        by_members[kind] = defaultdict(list)
        for unit, members in sorted(units.items()):
            by_members[kind][members].append(unit)
    positions = bucket_positions(spec, bucket_bytes, bytes_per_element)
    entries: dict[tuple[int, Members], list[Entry]] = defaultdict(list)
    for param in sorted(spec.params, key=lambda p: p.order, reverse=True):
        if param.rule != "sharded":
            continue
        for index, segment in enumerate(param.segments):
            for members, units_held in by_members[segment.kind].items():
                entry = _entry(spec, param, index, tuple(units_held))
                entries[positions[param.name], members].append(entry)
    buckets = tuple(Bucket(position, members, tuple(listed)) for (position, members), listed in sorted(entries.items()))
    own = _groups_with_communicator(buckets)
    replicated = [param for param in spec.params if param.rule != "sharded"]
    return SyncLayout(
        buckets=tuple(bucket for bucket in buckets if bucket.members in own),
        exchange=tuple(bucket for bucket in buckets if bucket.members not in own),
        replicated=tuple(param.name for param in sorted(replicated, key=lambda p: p.order)),
        replicated_numel=sum(param.numel for param in replicated),
    )


def _entry(spec: ModelSpec, param: ParamSpec, segment: int, units: tuple[int, ...]) -> Entry:
    size = ranges_size(axis_ranges(spec.kind(param.segments[segment].kind), units))
    return Entry(param.name, segment, units, size * param.row_numel)


def _groups_with_communicator(buckets: tuple[Bucket, ...]) -> set[Members]:
    """Member sets that get a communicator: those with most elements first, while all members have one to spare."""
    sizes: dict[Members, int] = defaultdict(int)
    for bucket in buckets:
        sizes[bucket.members] += bucket.numel
    left: dict[Place, int] = defaultdict(lambda: MAX_COMMUNICATORS - 2)
    chosen: set[Members] = set()
    for members in sorted(sizes, key=lambda m: (-sizes[m], m)):
        if len(members) == 1:
            chosen.add(members)
        elif all(left[place] > 0 for place in members):
            chosen.add(members)
            for place in members:
                left[place] -= 1
    return chosen
