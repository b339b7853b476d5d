"""Who keeps which piece of the optimizer's state: one owner and one mirror each, about as much on each device."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from dead_slots import dead_places
from hypothesis import given
from hypothesis import strategies as st

from runflat.errors import PlanError
from runflat.plan.cost import all_reduce_bytes, exchange_bytes
from runflat.plan.plan import Place, Plan
from runflat.plan.sync_groups import SyncLayout, sync_layout
from runflat.plan.units import REPLICATED, ModelSpec
from runflat.plan.zero import Ownership, ParamHeld, ownership

MakeSpec = Callable[..., ModelSpec]
MakePlan = Callable[..., Plan]
Atom = tuple[str, str, int]

BUCKET_BYTES = 12_000


def owned_by(spec: ModelSpec, plan: Plan) -> tuple[SyncLayout, Ownership]:
    layout = sync_layout(spec, plan, BUCKET_BYTES, 4)
    return layout, ownership(spec, plan, layout)


def atoms(held: ParamHeld) -> list[Atom]:
    return [(name, kind, unit) for name, by_kind in held.items() for kind, units in by_kind.items() for unit in units]


def all_atoms(spec: ModelSpec) -> set[Atom]:
    found = {
        (p.name, s.kind, unit) for p in spec.params for s in p.segments for unit in range(spec.kind(s.kind).num_units)
    }
    return found | {(param.name, REPLICATED, 0) for param in spec.params if param.dim is None}


@given(dead=dead_places(), fused=st.booleans())
def test_each_unit_has_one_owner_and_a_mirror_in_another_replica(
    make_spec: MakeSpec, make_plan: MakePlan, dead: frozenset[Place], fused: bool
) -> None:
    """Catches a unit that nobody updates or two do, that its keeper does not hold, or that one fault takes twice."""
    spec = make_spec(fused=fused)
    plan = make_plan(spec, 4, 3, dead)
    layout, found = owned_by(spec, plan)
    assert Counter(atom for place in plan.places for atom in atoms(found.owned(place))) == Counter(all_atoms(spec))
    mirrored = Counter(atom for place in plan.places for atom in atoms(found.mirrored(place)))
    assert mirrored == (Counter(all_atoms(spec)) if len(plan.replicas) > 1 else Counter())
    for place in plan.places:
        held = {**plan.replica(place[0]).held(spec.kinds, place[1]), REPLICATED: (0,)}
        kept = atoms(found.kept(place))
        assert sorted(kept) == sorted(atoms(found.owned(place)) + atoms(found.mirrored(place)))
        assert all(unit in held[kind] for _, kind, unit in kept)
    for bucket, pieces in zip(layout.buckets, found.buckets, strict=True):
        assert all(piece.holders == piece.givers == bucket.members for piece in pieces)
        assert sum(piece.numel for piece in pieces) == bucket.numel
    for piece in found.pieces:
        assert piece.mirror is None or piece.mirror[0] != piece.owner[0]
    assert sum(piece.numel for piece in found.pieces) == spec.num_params


@given(dead=dead_places(), fused=st.booleans())
def test_bytes_are_those_of_an_all_reduce(
    make_spec: MakeSpec, make_plan: MakePlan, dead: frozenset[Place], fused: bool
) -> None:
    """Catches sums that are sent to a mirror and weights that are sent there again, or to nobody."""
    spec = make_spec(fused=fused)
    plan = make_plan(spec, 4, 3, dead)
    layout, found = owned_by(spec, plan)
    total = sum(found.sent(place).total for place in plan.places)
    whole = sum(
        all_reduce_bytes(p.numel, len(p.holders)) * len(p.holders) for p in found.pieces if p.givers == p.holders
    )
    muted = [piece for piece in found.pieces if piece.givers != piece.holders]
    for piece in muted:
        whole += piece.numel * (len(piece.givers) - (piece.owner in piece.givers) + len(piece.holders) - 1)
    assert total == round(whole)
    if not layout.exchange:
        reduced = sum(exchange_bytes(layout, place, 1)[0] for place in plan.places)
        assert total == round(reduced) + sum(
            p.numel * (len(p.givers) - (p.owner in p.givers) + len(p.holders) - 1) for p in found.replicated
        )


@pytest.mark.parametrize(("replicas", "dead"), [(2, []), (3, []), (4, [(1, 2)]), (4, [(0, 0), (1, 1), (1, 2)])])
def test_all_devices_keep_about_as_much(
    make_spec: MakeSpec, make_plan: MakePlan, replicas: int, dead: list[Place]
) -> None:
    """Catches a deal that gives each parameter to the same device: memory is that of the one with most."""
    spec = make_spec(heads=32, kv_heads=8, ffn=512, vocab=997, layers=3)
    plan = make_plan(spec, 4, replicas, dead)
    _, found = owned_by(spec, plan)
    kept = {place: found.kept_numel(place) for place in plan.places}
    mean = 2 * spec.num_params / len(plan.places)
    assert sum(kept.values()) == 2 * spec.num_params
    if not dead:
        largest = max(piece.numel for piece in found.pieces)
        assert max(kept.values()) - min(kept.values()) <= largest
    assert max(kept.values()) < 1.15 * mean


@pytest.mark.parametrize(("replicas", "dead"), [(4, [(1, 2)]), (8, [(0, 0), (1, 1), (1, 2)])])
def test_a_change_of_plan_leaves_most_where_it_is(
    make_spec: MakeSpec, make_plan: MakePlan, replicas: int, dead: list[Place]
) -> None:
    """Catches mirrors that are dealt anew to whoever has least: most moments would move with each loss.

    What has to move is what the dead kept; some more moves to level what all keep. Counted in moments kept anew.
    """
    spec = make_spec(heads=32, kv_heads=8, ffn=4096, vocab=4000, layers=3)
    old, new = make_plan(spec, 4, replicas), make_plan(spec, 4, replicas, dead)
    before, after = (owned_by(spec, plan)[1] for plan in (old, new))
    kept = {place: set(atoms(before.kept(place))) for place in new.places}
    anew = {place: set(atoms(after.kept(place))) - kept[place] for place in new.places}
    size = {param.name: param for param in spec.params}
    numel = {
        (name, kind, unit): param.numel
        if kind == REPLICATED
        else sum(s.kind == kind for s in param.segments) * spec.kind(kind).size_of((unit,)) * param.row_numel
        for name, param in size.items()
        for kind in param.kinds
        for unit in range(1 if kind == REPLICATED else spec.kind(kind).num_units)
    }
    moved = sum(numel[atom] for found in anew.values() for atom in found)
    gone = sum(before.kept_numel(place) for place in dead)
    assert gone / 2 < moved < 4 * gone


def test_what_is_owned_lies_in_a_row(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches units dealt in turn: each would be an update, a message slice and a range of a file of its own."""
    spec = make_spec(heads=32, kv_heads=8, ffn=512, vocab=997, layers=3)
    plan = make_plan(spec, 4, 4)
    _, found = owned_by(spec, plan)
    for piece in found.pieces:
        assert piece.units == () or piece.units == tuple(range(piece.units[0], piece.units[-1] + 1))
    addresses = [(piece.param, piece.segment, piece.owner) for piece in found.pieces]
    assert len(set(addresses)) == len(addresses)


def test_a_mirror_is_in_another_domain_where_it_can_be(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches a node whose loss takes owner and mirror, though there is another; and one that is not told."""
    spec = make_spec()
    plan = make_plan(spec, 4, 4)
    domains = {device: "ab"[int(device[0]) // 2] for device in plan.devices}
    domain_of = {place: domains[plan.device(place)] for place in plan.places}
    _, blind = owned_by(spec, plan)
    assert blind.beside(domain_of)
    _, found = owned_by(spec, replace(plan, domains=tuple(domains.items())))
    assert not found.beside(domain_of)
    assert not found.without_mirror
    one = dict.fromkeys(plan.places, "a")
    assert sum(found.beside(one).values()) == spec.num_params


def test_units_of_a_single_replica_have_no_mirror(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches a mirror inside the replica, and a lone replica whose loss is not told in advance."""
    spec = make_spec(kv_heads=8)
    plan = make_plan(spec, 4, 1)
    _, found = owned_by(spec, plan)
    assert sum(found.without_mirror.values()) == spec.num_params
    # Only norms travel: to their owner from the one that gives them, and from there to all others.
    assert sum(found.sent(place).mirrored for place in plan.places) == 0
    assert sum(found.sent(place).gathered for place in plan.places) == 3 * spec.replicated_numel


def test_groups_that_share_an_exchange_are_owned_too(crowded: tuple[ModelSpec, Plan, SyncLayout]) -> None:
    """Catches the units of groups without a communicator, which would keep no moments."""
    spec, plan, layout = crowded
    assert layout.exchange
    found = ownership(spec, plan, layout)
    assert sum(piece.numel for piece in found.exchange) == sum(bucket.numel for bucket in layout.exchange)
    assert Counter(atom for place in plan.places for atom in atoms(found.owned(place))) == Counter(all_atoms(spec))
    assert not found.without_mirror


def test_reshard_is_refused(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches a unit owned by a device that never gets its gradient."""
    spec = make_spec()
    plan = make_plan(spec, 4, 2, [(0, 3)])
    with pytest.raises(PlanError, match="zero1 needs sync direct"):
        ownership(spec, plan, sync_layout(spec, plan, BUCKET_BYTES, 4, "reshard"))
