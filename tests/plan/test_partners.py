"""`reshard`: who stands for whom, and what moves inside a replica."""

from collections import Counter
from collections.abc import Callable

import pytest
from dead_slots import dead_places
from hypothesis import given
from hypothesis import strategies as st

from runflat.plan.cost import exchange_messages
from runflat.plan.partners import Meeting
from runflat.plan.plan import Place, Plan
from runflat.plan.sync_groups import holders, sync_layout
from runflat.plan.units import ModelSpec

MakeSpec = Callable[..., ModelSpec]
MakePlan = Callable[..., Plan]

BUCKET_BYTES = 12_000


@given(dead_places(), st.booleans())
def test_every_unit_is_summed_once(
    make_spec: MakeSpec, make_plan: MakePlan, dead: frozenset[Place], fused: bool
) -> None:
    """Catches a gradient that a holder does not bring, brings twice, or does not get back."""
    spec = make_spec(fused=fused)
    plan = make_plan(spec, 4, 3, dead)
    layout = sync_layout(spec, plan, BUCKET_BYTES, 4, "reshard")
    assert not layout.exchange
    found = holders(spec, plan)
    params = {param.name: param for param in spec.params}
    moved = {
        (move.entry, move.source)
        for replica in plan.replicas
        for moves in layout.moves(replica.replica).values()
        for move in moves
    }
    seen: Counter[tuple[str, int, int]] = Counter()
    for bucket in layout.buckets:
        assert [place[0] for place in bucket.members] == [replica.replica for replica in plan.replicas]
        for entry in bucket.entries:
            kind = params[entry.param].segments[entry.segment].kind
            assert all(found[kind][unit] == entry.holders for unit in entry.units)
            assert set(entry.holders) - set(bucket.members) == {source for e, source in moved if e == entry}
            seen.update((entry.param, entry.segment, unit) for unit in entry.units)
    assert set(seen.values()) == {1}
    assert {(replica, position) for position, replica in layout.resharded} == {
        (replica.replica, position) for replica in plan.replicas for position in layout.moves(replica.replica)
    }


@given(dead_places())
def test_partners_are_one_to_one(make_spec: MakeSpec, make_plan: MakePlan, dead: frozenset[Place]) -> None:
    """Catches a device that stands in two columns, a dead one, and partners at other slots without need."""
    plan = make_plan(make_spec(), 4, 3, dead)
    columns = Meeting(plan).columns
    least = min(replica.tp for replica in plan.replicas)
    partners = [place for members in columns.values() for place in members]
    assert len(columns) == least
    assert len(partners) == len(set(partners)) == least * len(plan.replicas)
    assert set(partners) <= set(plan.places)
    for slot, members in columns.items():
        for replica, found in members:
            assert found == slot or slot in plan.replica(replica).dead_slots


def test_one_dead_by_hand(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches a move too many: of 4 slots one is dead in replica 1, so only its partnerless peer sends, all it has.

    12 units of each kind, 4 per slot: the three survivors get 4/3 of a slot's units, a third of the peer's each.
    """
    spec = make_spec(heads=12, kv_heads=12, ffn=48, vocab=48, layers=1)
    plan = make_plan(spec, 4, 2, [(1, 2)])
    layout = sync_layout(spec, plan, 10**9, 4, "reshard")
    assert layout.groups == tuple(((0, slot), (1, slot)) for slot in (0, 1, 3))
    assert not layout.moves(1)
    whole = sum(param.numel for param in spec.params if param.dim is not None)
    assert layout.moved_numel((0, 2)) == whole // 4
    for slot in (0, 1, 3):
        assert layout.moved_numel((0, slot)) == whole // 12
        assert layout.totals_of((0, slot))[0].numel == whole // 3
        # One message of the ring each way, one of the way back.
        assert exchange_messages(layout, (0, slot)) == 2 + 1
        assert exchange_messages(layout, (1, slot)) == 2
    assert exchange_messages(layout, (0, 2)) == 3
    assert [layout.communicators(place) for place in ((0, 2), (0, 3), (1, 3))] == [3, 4, 3]


def test_nothing_moves_without_need(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches resharding in a healthy job, or between replicas that are hurt in the same way."""
    spec = make_spec(kv_heads=8)
    healthy = make_plan(spec, 4, 3)
    assert sync_layout(spec, healthy, BUCKET_BYTES, 4, "reshard") == sync_layout(spec, healthy, BUCKET_BYTES, 4)
    alike = make_plan(spec, 4, 2, [(0, 1), (1, 1)])
    assert not sync_layout(spec, alike, BUCKET_BYTES, 4, "reshard").resharded


@pytest.mark.parametrize("dead", [[(1, 0)], [(0, 3), (1, 1)], [(0, 0), (1, 1), (1, 2)]])
def test_what_is_sent_is_counted(make_spec: MakeSpec, make_plan: MakePlan, dead: list[Place]) -> None:
    """Catches a count of the moves that differs from the moves."""
    spec = make_spec()
    plan = make_plan(spec, 4, 2, dead)
    layout = sync_layout(spec, plan, BUCKET_BYTES, 4, "reshard")
    numel: Counter[Place] = Counter()
    messages: Counter[Place] = Counter()
    for replica in plan.replicas:
        for moves in layout.moves(replica.replica).values():
            for move in moves:
                numel.update({move.source: move.entry.numel, move.target: move.entry.numel})
            messages.update(place for pair in {(move.source, move.target) for move in moves} for place in pair)
    assert numel
    for place in plan.places:
        assert (layout.moved_numel(place), layout.num_moves(place)) == (numel[place], messages[place])
