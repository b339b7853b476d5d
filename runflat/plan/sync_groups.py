"""Who exchanges gradients with whom: sync groups, buckets, and the one order in which they are launched.

`direct`: for each unit the sync group is the set of its holders over all replicas. Units with the same set share flat
buckets. With nobody dead every device meets exactly its same-slot peers, as in an ordinary TP x DP job.

`reshard`: the most reduced replica says how units lie while they are summed. In each replica one device, the partner,
stands for each of its devices. Inside a replica the other holders of a unit send its gradient to that partner, partners
all-reduce one to one, and the sums go back. See `plan/partners.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from runflat.plan.partners import Meeting
from runflat.plan.plan import Place, Plan
from runflat.plan.units import ModelSpec

MAX_COMMUNICATORS = 16
"""Communicators per device (TP, world and sync groups) above which small groups share one all-to-all instead."""

Members = tuple[Place, ...]
Sync = Literal["direct", "reshard"]
"""How replicas of different degree meet."""


@dataclass(frozen=True)
class Entry:
    """The units of one segment of one parameter that travel in a bucket; `numel` elements, each held by all `holders`.

    In `direct` these are the bucket's members.
    """

    param: str
    segment: int
    units: tuple[int, ...]
    numel: int
    holders: Members


@dataclass(frozen=True)
class Move:
    """An entry of the bucket of `target` whose gradient `source` adds to before the sum, and whose sum it gets after.

    Both are in one replica. `offset` is the entry's first element in the bucket's flat buffer.
    """

    source: Place
    target: Place
    entry: Entry
    offset: int


@dataclass(frozen=True)
class Bucket:
    """One flat all-reduce: what it carries and who takes part. `position` is its turn in the backward pass."""

    position: int
    members: Members
    entries: tuple[Entry, ...]

    @cached_property
    def numel(self) -> int:
        """Elements of the flat buffer."""
        return sum(entry.numel for entry in self.entries)


@dataclass(frozen=True)
class GroupTotal:
    """One sync group's buckets together: how many all-reduces, of how many elements in all."""

    members: Members
    num_buckets: int
    numel: int


@dataclass(frozen=True)
class SyncLayout:
    """All gradient exchange of one plan.

    `buckets` are in launch order (position, then members), the same on every device; `exchange` are the buckets of
    groups too many to have communicators, sent together by one all-to-all over the world after the last bucket;
    `replicated` are the parameters of the one bucket over all devices. `resharded` are the (position, replica) at which
    gradients move inside a replica, by one all-to-all before the bucket and one after it; none in `direct`.
    """

    buckets: tuple[Bucket, ...]
    exchange: tuple[Bucket, ...]
    replicated: tuple[str, ...]
    replicated_numel: int
    resharded: frozenset[tuple[int, int]] = frozenset()

    def moves(self, replica: int) -> dict[int, tuple[Move, ...]]:
        """What moves inside `replica`, by position and there in the one order that all its devices go by."""
        found: dict[int, list[Move]] = defaultdict(list)
        for bucket in self.buckets if any(number == replica for _, number in self.resharded) else ():
            target = next(place for place in bucket.members if place[0] == replica)
            offset = 0
            for entry in bucket.entries:
                sources = [place for place in entry.holders if place[0] == replica and place != target]
                found[bucket.position] += [Move(source, target, entry, offset) for source in sources]
                offset += entry.numel
        return {position: tuple(moves) for position, moves in found.items() if moves}

    @cached_property
    def totals(self) -> tuple[GroupTotal, ...]:
        """What each sync group with a communicator exchanges per step, by members; sets of one member need none."""
        found: dict[Members, list[int]] = defaultdict(list)
        for bucket in self.buckets:
            if len(bucket.members) > 1:
                found[bucket.members].append(bucket.numel)
        return tuple(GroupTotal(members, len(sizes), sum(sizes)) for members, sizes in sorted(found.items()))

    @property
    def groups(self) -> tuple[Members, ...]:
        """Member sets that need a communicator, ascending."""
        return tuple(total.members for total in self.totals)

    def totals_of(self, place: Place) -> tuple[GroupTotal, ...]:
        """The totals of the groups in which `place` takes part."""
        return self._totals_by_place.get(place, ())

    @cached_property
    def _totals_by_place(self) -> Mapping[Place, tuple[GroupTotal, ...]]:
        found: dict[Place, list[GroupTotal]] = defaultdict(list)
        for total in self.totals:
            for place in total.members:
                found[place].append(total)
        return {place: tuple(totals) for place, totals in found.items()}

    def of(self, place: Place) -> tuple[Bucket, ...]:
        """Buckets in which `place` takes part, in launch order."""
        return self._by_place.get(place, ())

    def communicators(self, place: Place) -> int:
        """Communicators that the device at `place` has: sync groups, the world, its replica's for TP and resharding."""
        return len(self.totals_of(place)) + 2 + any(replica == place[0] for _, replica in self.resharded)

    def exchange_numel(self, place: Place) -> int:
        """Elements that `place` sends in the exchange: its flat buffers, once to every other member of each."""
        return self._exchange_numel[place]

    @cached_property
    def _exchange_numel(self) -> Counter[Place]:
        by_members: Counter[Members] = Counter()
        for bucket in self.exchange:
            by_members[bucket.members] += bucket.numel
        sent: Counter[Place] = Counter()
        for members, numel in by_members.items():
            for place in members:
                sent[place] += numel * (len(members) - 1)
        return sent

    def moved_numel(self, place: Place) -> int:
        """Elements that `place` sends inside its replica in `reshard`, before the sum and after it."""
        return self._moved_numel[place]

    def num_moves(self, place: Place) -> int:
        """How many messages that is: one for each position and device that gets something."""
        return self._num_moves[place]

    @cached_property
    def _moved_numel(self) -> Counter[Place]:
        moved: Counter[Place] = Counter()
        for (held, members), numel in self._numel_by_pair.items():
            for pair in _moves(held, members):
                for place in pair:  # there and back
                    moved[place] += numel
        return moved

    @cached_property
    def _num_moves(self) -> Counter[Place]:
        pairs: dict[int, set[tuple[Place, Place]]] = defaultdict(set)
        between = {key: _moves(*key) for key in self._numel_by_pair}
        for bucket in self.buckets if self.resharded else ():
            for held in {entry.holders for entry in bucket.entries}:
                pairs[bucket.position].update(between[held, bucket.members])
        return Counter(place for found in pairs.values() for pair in found for place in pair)

    @cached_property
    def _numel_by_pair(self) -> Counter[tuple[Members, Members]]:
        """Elements by who holds them and who sums them, where these differ."""
        found: Counter[tuple[Members, Members]] = Counter()
        for bucket in self.buckets if self.resharded else ():
            for entry in bucket.entries:
                found[entry.holders, bucket.members] += entry.numel
        return found

    @cached_property
    def _by_place(self) -> Mapping[Place, tuple[Bucket, ...]]:
        found: dict[Place, list[Bucket]] = defaultdict(list)
        for bucket in self.buckets:
            for place in bucket.members:
                found[place].append(bucket)
        return {place: tuple(buckets) for place, buckets in found.items()}


def _moves(held: Members, members: Members) -> list[tuple[Place, Place]]:
    """(from, to) of the units that `held` hold and `members`, one of each replica, sum."""
    target = dict(members)
    return [(place, (place[0], target[place[0]])) for place in held if place[1] != target[place[0]]]


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


def sync_layout(
    spec: ModelSpec, plan: Plan, bucket_bytes: int, bytes_per_element: int, sync: Sync = "direct"
) -> SyncLayout:
    """Buckets of all sync groups of `plan`; `bucket_bytes` counts full parameters (see `bucket_positions`)."""
    shares = shares_by_holders(spec, plan)
    meeting = Meeting(plan) if sync == "reshard" else None
    summed_by = {held: meeting.of(held) if meeting else held for listed in shares.values() for held in listed}
    sets = sorted(set(summed_by.values()))
    rank = {members: index for index, members in enumerate(sets)}  # an index is cheaper to hash than its members
    ranked = {
        kind: [(rank[summed_by[held]], held, *share) for held, share in listed.items()]
        for kind, listed in shares.items()
    }
    positions = bucket_positions(spec, bucket_bytes, bytes_per_element)
    entries: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    for param in sorted(spec.params, key=lambda p: p.order, reverse=True):
        if param.rule != "sharded":
            continue
        for index, segment in enumerate(param.segments):
            for group, held, units, size in ranked[segment.kind]:
                entry = Entry(param.name, index, units, size * param.row_numel, held)
                entries[positions[param.name], group].append(entry)
    buckets = tuple(Bucket(position, sets[group], tuple(found)) for (position, group), found in sorted(entries.items()))
    own = set(sets) if meeting else _groups_with_communicator(buckets)
    replicated = [param for param in spec.params if param.rule != "sharded"]
    return SyncLayout(
        buckets=tuple(bucket for bucket in buckets if bucket.members in own),
        exchange=tuple(bucket for bucket in buckets if bucket.members not in own),
        replicated=tuple(param.name for param in sorted(replicated, key=lambda p: p.order)),
        replicated_numel=sum(param.numel for param in replicated),
        resharded=_resharded(buckets) if meeting else frozenset(),
    )


def _resharded(buckets: tuple[Bucket, ...]) -> frozenset[tuple[int, int]]:
    """(position, replica) at which some holder of a unit is not the device that sums it for its replica."""
    moving = {
        pair: {replica for (replica, _), _ in _moves(*pair)}
        for pair in {(entry.holders, bucket.members) for bucket in buckets for entry in bucket.entries}
    }
    return frozenset(
        (bucket.position, replica)
        for bucket in buckets
        for entry in bucket.entries
        for replica in moving[entry.holders, bucket.members]
    )


def shares_by_holders(spec: ModelSpec, plan: Plan) -> dict[str, dict[Members, tuple[tuple[int, ...], int]]]:
    """Per kind and set of holders: the units that exactly these hold (ascending), and their elements of the axis."""
    shares: dict[str, dict[Members, tuple[tuple[int, ...], int]]] = {}
    for kind, units in holders(spec, plan).items():
        by_members: dict[Members, list[int]] = defaultdict(list)
        for unit, members in sorted(units.items()):
            by_members[members].append(unit)
        shares[kind] = {
            members: (tuple(listed), spec.kind(kind).size_of(listed)) for members, listed in by_members.items()
        }
    return shares


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
