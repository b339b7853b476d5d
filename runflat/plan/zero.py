"""Who keeps which part of the optimizer's state with `zero1`: one owner for each piece, and one mirror.

Each unit of each parameter has one owner among its holders, which sums its gradient, keeps its moments and updates it,
and where possible a mirror in another replica (and another domain), which gets the summed gradient and does the same.
All its other holders get the new weight. With n holders that is as many bytes as an all-reduce: (n-1)/n of the elements
to the owners, 1/n to the mirrors, (n-2)/n from the owners to the rest.

Everything here follows from plan and sync layout alone, so that it is the same on every device.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from runflat.errors import PlanError
from runflat.plan.plan import Place, Plan
from runflat.plan.sync_groups import Bucket, Entry, Members, SyncLayout
from runflat.plan.units import REPLICATED, ModelSpec, ParamSpec

OptimizerMode = Literal["replicated", "zero1"]
"""Whether every holder of a unit keeps and updates its optimizer state, or only its owner and its mirror."""
FEW_UNITS = 4
"""Units of a parameter per holder below which these are dealt in turn."""
ParamHeld = Mapping[str, Mapping[str, tuple[int, ...]]]
"""Per parameter the units of each of its kinds, ascending; one that is not cut is unit 0 of the kind `REPLICATED`."""


@dataclass(frozen=True)
class OwnedPiece:
    """Units of one segment of one parameter, of `numel` elements, with one owner and one mirror (None: there is none).

    A parameter that is not cut is one piece: segment 0, no units. `givers` have a part of its gradient each, which are
    added in this order; all `holders` need its weight.
    """

    param: str
    segment: int
    units: tuple[int, ...]
    numel: int
    owner: Place
    mirror: Place | None
    givers: Members
    holders: Members

    @property
    def keepers(self) -> Members:
        """Owner and mirror."""
        return (self.owner,) if self.mirror is None else (self.owner, self.mirror)


@dataclass(frozen=True)
class Sent:
    """Elements that one device sends in a step.

    `reduced` are gradients to owners and `mirrored` sums to mirrors, both of what is cut, `whole` those of parameters
    that are not; `gathered` are weights to the other holders, of both.
    """

    reduced: int
    mirrored: int
    whole: int
    gathered: int

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return self.reduced + self.mirrored + self.whole + self.gathered


@dataclass(frozen=True)
class Exchanges:
    """Which of the three exchanges of a bucket there are: any gradient, sum or weight that has to travel."""

    reduces: bool
    mirrors: bool
    spreads: bool

    @property
    def count(self) -> int:
        """Collectives of one step."""
        return self.reduces + self.mirrors + self.spreads


def exchanges(pieces: Iterable[OwnedPiece]) -> Exchanges:
    """What `pieces` that travel together need."""
    listed = list(pieces)
    return Exchanges(
        reduces=any(set(piece.givers) - {piece.owner} for piece in listed),
        mirrors=any(piece.mirror is not None for piece in listed),
        spreads=any(set(piece.holders) - set(piece.keepers) for piece in listed),
    )


@dataclass(frozen=True)
class Ownership:
    """All pieces of one plan.

    `buckets` has those of each bucket of the sync layout, in the layout's order, `exchange` those of all groups that
    share one exchange, `replicated` the parameters that every device holds whole.
    """

    spec: ModelSpec
    buckets: tuple[tuple[OwnedPiece, ...], ...]
    exchange: tuple[OwnedPiece, ...]
    replicated: tuple[OwnedPiece, ...]

    @cached_property
    def pieces(self) -> tuple[OwnedPiece, ...]:
        """All pieces."""
        return (*(piece for bucket in self.buckets for piece in bucket), *self.exchange, *self.replicated)

    def owned(self, place: Place) -> ParamHeld:
        """The units of each parameter that `place` owns."""
        return self._units(self._owned.get(place, ()))

    def mirrored(self, place: Place) -> ParamHeld:
        """The units of each parameter of which `place` is the mirror."""
        return self._units(self._mirrored.get(place, ()))

    def kept(self, place: Place) -> ParamHeld:
        """The units of each parameter whose moments `place` keeps: owned and mirrored ones."""
        return self._units((*self._owned.get(place, ()), *self._mirrored.get(place, ())))

    def kept_numel(self, place: Place) -> int:
        """Elements of what `place` keeps; each has two moments."""
        return sum(piece.numel for piece in (*self._owned.get(place, ()), *self._mirrored.get(place, ())))

    def sent(self, place: Place) -> Sent:
        """What `place` sends in one step."""
        owned = self._owned.get(place, ())
        cut = [piece for piece in owned if piece.units]
        given = [piece for piece in self.replicated if place in piece.givers and place != piece.owner]
        mirrored = [piece for piece in self.replicated if place == piece.owner and piece.mirror is not None]
        return Sent(
            reduced=sum(numel for givers, numel in self._given.items() if place in givers)
            - sum(piece.numel for piece in cut),
            mirrored=sum(piece.numel for piece in cut if piece.mirror is not None),
            whole=sum(piece.numel for piece in (*given, *mirrored)),
            gathered=sum(piece.numel * len(set(piece.holders) - set(piece.keepers)) for piece in owned),
        )

    def num_collectives(self, place: Place) -> int:
        """Collectives that `place` launches in one step for all of this."""
        return sum(count for members, count in self._launched.items() if place in members) + self._launched_by_all

    @cached_property
    def _launched(self) -> Counter[Members]:
        found: Counter[Members] = Counter()
        for pieces in self.buckets:
            found[pieces[0].holders] += exchanges(pieces).count
        return found

    @cached_property
    def _launched_by_all(self) -> int:
        return exchanges(self.exchange).count + exchanges(self.replicated).count

    @cached_property
    def without_mirror(self) -> Mapping[Members, int]:
        """Elements of the pieces that have no mirror, by their holders: with the owner their moments are lost."""
        found: Counter[Members] = Counter()
        for piece in self.pieces:
            if piece.mirror is None:
                found[piece.holders] += piece.numel
        return found

    def beside(self, domain_of: Mapping[Place, str]) -> Mapping[Members, int]:
        """Elements of the pieces whose mirror is in their owner's domain, by their holders: one fault may hit both."""
        found: Counter[Members] = Counter()
        for piece in self.pieces:
            if piece.mirror is not None and domain_of[piece.owner] == domain_of[piece.mirror]:
                found[piece.holders] += piece.numel
        return found

    @cached_property
    def _owned(self) -> Mapping[Place, list[OwnedPiece]]:
        return _by_place((piece.owner, piece) for piece in self.pieces)

    @cached_property
    def _mirrored(self) -> Mapping[Place, list[OwnedPiece]]:
        return _by_place((piece.mirror, piece) for piece in self.pieces if piece.mirror is not None)

    @cached_property
    def _given(self) -> Counter[Members]:
        found: Counter[Members] = Counter()
        for piece in self.pieces:
            if piece.units:
                found[piece.givers] += piece.numel
        return found

    def _units(self, pieces: Iterable[OwnedPiece]) -> ParamHeld:
        found: dict[str, dict[str, set[int]]] = {
            param.name: {kind: set() for kind in param.kinds} for param in self.spec.params
        }
        segments = {param.name: param.segments for param in self.spec.params}
        for piece in pieces:
            if segments[piece.param]:
                found[piece.param][segments[piece.param][piece.segment].kind].update(piece.units)
            else:
                found[piece.param][REPLICATED].add(0)
        return {name: {kind: tuple(sorted(units)) for kind, units in held.items()} for name, held in found.items()}


def _by_place(pairs: Iterable[tuple[Place, OwnedPiece]]) -> Mapping[Place, list[OwnedPiece]]:
    found: dict[Place, list[OwnedPiece]] = defaultdict(list)
    for place, piece in pairs:
        found[place].append(piece)
    return found


@dataclass(frozen=True)
class _Item:
    """Units of one kind in one parameter that have the same holders: they are dealt to these in runs."""

    param: ParamSpec
    kind: str
    units: tuple[int, ...]
    unit_numel: int
    segments: tuple[int, ...]
    givers: Members
    holders: Members


@dataclass(frozen=True)
class _Run:
    """What one device owns of an item."""

    item: _Item
    units: tuple[int, ...]
    numel: int
    owner: Place


def ownership(spec: ModelSpec, plan: Plan, layout: SyncLayout) -> Ownership:
    """Owner and mirror of everything, so that all devices keep about as much.

    The largest units are dealt first. Where there are few, holders take them in turn, so that a change of plan leaves
    groups alone whose holders it does not change; blocks of FFN columns and vocabulary rows, of which there are many,
    go to whoever has least, and level the rest. What a device owns of one parameter lies in a row.

    Args:
        spec: the model.
        plan: who holds what; where it knows domains, a mirror is in another one than its owner, if it can be.
        layout: the plan's sync groups and buckets, of `direct`.

    Raises:
        PlanError: the layout is one of `reshard`, where a unit is not summed by its holders.
    """
    if layout.resharded:
        raise PlanError("zero1 needs sync direct: with reshard a unit's holders do not sum its gradient themselves.")
    params = spec.by_name
    listed = [
        *(_items(spec, params, bucket) for bucket in layout.buckets),
        [item for bucket in layout.exchange for item in _items(spec, params, bucket)],
        _whole_items(plan, [params[name] for name in layout.replicated]),
    ]
    order = sorted(
        ((at, index, item) for at, items in enumerate(listed) for index, item in enumerate(items)),
        key=lambda found: (-found[2].unit_numel, found[0], found[1]),
    )
    load: dict[Place, int] = dict.fromkeys(plan.places, 0)
    turns: Counter[tuple[Members, int]] = Counter()
    runs = {(at, index): _deal(spec, item, load, turns) for at, index, item in order}
    domain_of = {place: plan.domain(plan.device(place)) or "" for place in plan.places}
    mirrors = _mirrors([run for found in runs.values() for run in found], load, domain_of)
    dealt = [
        tuple(
            piece
            for index in range(len(items))
            for run in runs[at, index]
            for piece in _pieces(spec, run, mirrors[id(run)])
        )
        for at, items in enumerate(listed)
    ]
    return Ownership(spec, tuple(dealt[:-2]), dealt[-2], dealt[-1])


def _items(spec: ModelSpec, params: Mapping[str, ParamSpec], bucket: Bucket) -> list[_Item]:
    """By parameter and kind: all segments of one kind go together, so that a piece has an address without them."""
    entries: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in bucket.entries:
        entries[entry.param, params[entry.param].segments[entry.segment].kind].append(entry)
    return [
        _Item(
            param=params[name],
            kind=kind,
            units=found[0].units,
            unit_numel=spec.kind(kind).unit_size * params[name].row_numel * len(found),
            segments=tuple(entry.segment for entry in found),
            givers=bucket.members,
            holders=bucket.members,
        )
        for (name, kind), found in entries.items()
    ]


def _whole_items(plan: Plan, params: Sequence[ParamSpec]) -> list[_Item]:
    """The parameters that every device holds; where all of a replica have the same gradient, one of them gives it."""
    first = tuple((replica.replica, replica.live_slots[0]) for replica in plan.replicas)
    return [
        _Item(param, REPLICATED, (0,), param.numel, (0,), first if param.rule == "equal" else plan.places, plan.places)
        for param in params
    ]


def _deal(spec: ModelSpec, item: _Item, load: dict[Place, int], turns: Counter[tuple[Members, int]]) -> list[_Run]:
    """Runs of the item's units, by member; `load` grows by what each owns, `turns` by the few units dealt in turn."""
    counts = [0] * len(item.holders)
    if len(item.units) < FEW_UNITS * len(counts):
        first = turns[item.holders, item.unit_numel]
        turns[item.holders, item.unit_numel] += len(item.units)
        for turn in range(first, first + len(item.units)):
            counts[turn % len(counts)] += 1
    else:
        heap = [(load[place], index) for index, place in enumerate(item.holders)]
        heapq.heapify(heap)
        for _ in item.units:
            least, index = heap[0]
            counts[index] += 1
            heapq.heapreplace(heap, (least + item.unit_numel, index))
    runs: list[_Run] = []
    start = 0
    for place, count in zip(item.holders, counts, strict=True):
        if count:
            units = item.units[start : start + count]
            numel = _numel(spec, item.param, item.kind, units) * len(item.segments)
            runs.append(_Run(item, units, numel, place))
            load[place] += numel
            start += count
    return runs


def _numel(spec: ModelSpec, param: ParamSpec, kind: str, units: tuple[int, ...]) -> int:
    """Elements of `units` in one segment of `param`."""
    return param.numel if kind == REPLICATED else spec.kind(kind).size_of(units) * param.row_numel


def _mirrors(runs: list[_Run], load: dict[Place, int], domain_of: Mapping[Place, str]) -> dict[int, Place | None]:
    """The mirror of each run (by identity): the holder a fixed number of places after its owner.

    So each device mirrors about as much as it owns, and a group that a change of plan leaves alone keeps its mirrors.
    Where that holder is too near, or keeps its share already, the one that keeps least so far is taken. The largest run
    comes first.
    """
    share = 2 * sum(load.values()) / len(load)
    found: dict[int, Place | None] = {}
    steps: dict[Members, int] = {}
    for run in sorted(runs, key=lambda run: -run.numel):
        holders = run.item.holders
        others = [place for place in holders if place[0] != run.owner[0]]
        apart = [place for place in others if domain_of[place] != domain_of[run.owner]] or others
        if holders not in steps:
            steps[holders] = _step(holders, domain_of)
        mirror: Place | None = holders[(holders.index(run.owner) + steps[holders]) % len(holders)]
        if mirror not in apart or load[mirror] + run.numel > share:
            mirror = min(apart, key=lambda at: (load[at], at), default=None)
        found[id(run)] = mirror
        if mirror is not None:
            load[mirror] += run.numel
    return found


def _step(holders: Members, domain_of: Mapping[Place, str]) -> int:
    """How far a mirror is from its owner among `holders`, so that most of them are apart."""

    def apart(step: int) -> int:
        pairs = zip(holders, (*holders[step:], *holders[:step]), strict=True)
        return sum((a[0] != b[0]) * (1 + (domain_of[a] != domain_of[b])) for a, b in pairs)

    most = len(holders) * (1 + (len({domain_of[place] for place in holders}) > 1))
    best = (0, 0)
    for step in range(1, len(holders)):
        if (found := apart(step)) > best[0]:
            best = (found, step)
        if found == most:
            break
    return best[1]


def _pieces(spec: ModelSpec, run: _Run, mirror: Place | None) -> list[OwnedPiece]:
    item = run.item
    whole = OwnedPiece(
        param=item.param.name,
        segment=0,
        units=() if item.kind == REPLICATED else run.units,
        numel=_numel(spec, item.param, item.kind, run.units),
        owner=run.owner,
        mirror=mirror,
        givers=item.givers,
        holders=item.holders,
    )
    return [replace(whole, segment=segment) for segment in item.segments]
