"""Who sums which gradients with whom, in which order, and what happens when there are too many groups."""

from collections import Counter
from collections.abc import Callable

from dead_slots import dead_places
from hypothesis import given
from hypothesis import strategies as st

from runflat.plan.plan import Place, Plan
from runflat.plan.sync_groups import MAX_COMMUNICATORS, SyncLayout, bucket_positions, holders, sync_layout
from runflat.plan.units import ModelSpec

MakeSpec = Callable[..., ModelSpec]
MakePlan = Callable[..., Plan]

BUCKET_BYTES = 12_000


@given(dead_places(), st.booleans())
def test_every_unit_is_summed_once(
    make_spec: MakeSpec, make_plan: MakePlan, dead: frozenset[Place], fused: bool
) -> None:
    """Catches a gradient that is summed twice, by no one, or without one of its holders (a copied KV head)."""
    spec = make_spec(fused=fused)
    plan = make_plan(spec, 4, 3, dead)
    layout = sync_layout(spec, plan, BUCKET_BYTES, 4)
    found = holders(spec, plan)
    params = {param.name: param for param in spec.params}
    seen: Counter[tuple[str, int, int]] = Counter()
    for bucket in (*layout.buckets, *layout.exchange):
        for entry in bucket.entries:
            param = params[entry.param]
            kind = spec.kind(param.segments[entry.segment].kind)
            assert all(found[kind.name][unit] == bucket.members for unit in entry.units)
            assert entry.numel == kind.size_of(entry.units) * param.row_numel
            seen.update((entry.param, entry.segment, unit) for unit in entry.units)
    assert set(seen.values()) == {1}
    assert set(seen) == {
        (param.name, index, unit)
        for param in spec.params
        for index, segment in enumerate(param.segments)
        for unit in range(spec.kind(segment.kind).num_units)
    }
    assert set(layout.replicated) == {param.name for param in spec.params if param.dim is None}
    assert layout.replicated_numel == spec.replicated_numel


@given(dead_places())
def test_one_order(make_spec: MakeSpec, make_plan: MakePlan, dead: frozenset[Place]) -> None:
    """Catches two devices that launch their common buckets in different order, and so wait for each other."""
    spec = make_spec()
    plan = make_plan(spec, 4, 3, dead)
    layout = sync_layout(spec, plan, BUCKET_BYTES, 4)
    assert [(bucket.position, bucket.members) for bucket in layout.buckets] == sorted(
        {(bucket.position, bucket.members) for bucket in layout.buckets}
    )
    for place in plan.places:
        assert list(layout.of(place)) == [bucket for bucket in layout.buckets if place in bucket.members]
        groups = [members for members in layout.groups if place in members]
        assert layout.communicators(place) == len(groups) + 2
        for total in layout.totals_of(place):
            own = [bucket for bucket in layout.of(place) if bucket.members == total.members]
            assert (total.num_buckets, total.numel) == (len(own), sum(bucket.numel for bucket in own))
        assert [total.members for total in layout.totals_of(place)] == groups


def test_holders_by_hand(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches a KV head whose second holder in a replica is forgotten."""
    spec = make_spec(heads=8, kv_heads=2)
    found = holders(spec, make_plan(spec, 4, 2, [(1, 0)]))
    assert found["head"][0] == ((0, 0), (1, 1))
    assert found["head"][1] == ((0, 0), (1, 2))
    assert found["kv"][0] == ((0, 0), (0, 1), (1, 1), (1, 2))
    assert found["kv"][1] == ((0, 2), (0, 3), (1, 2), (1, 3))


def test_healthy_groups_are_the_ordinary_ones(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches an extra group or an extra bucket where nobody is dead, against a plain TP x DP job."""
    spec = make_spec(kv_heads=4)
    layout = sync_layout(spec, make_plan(spec, 4, 3), BUCKET_BYTES, 4)
    assert layout.groups == tuple(tuple((replica, slot) for replica in range(3)) for slot in range(4))
    assert not layout.exchange
    num_positions = len(set(bucket_positions(spec, BUCKET_BYTES, 4).values()))
    assert num_positions > 1
    assert len(layout.buckets) == 4 * num_positions


def test_one_replica_needs_no_group(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches a communicator of one member."""
    spec = make_spec(kv_heads=4)
    layout = sync_layout(spec, make_plan(spec, 4, 1), BUCKET_BYTES, 4)
    assert layout.groups == ()
    assert {len(bucket.members) for bucket in layout.buckets} == {1}
    assert layout.communicators((0, 0)) == 2


def test_positions_depend_on_the_model_alone(make_spec: MakeSpec) -> None:
    """Catches positions out of backward order, a bucket above its size, and one that closes too early."""
    spec = make_spec()
    positions = bucket_positions(spec, BUCKET_BYTES, 4)
    sharded = [param for param in reversed(spec.params) if param.dim is not None]
    assert [positions[param.name] for param in sharded] == sorted(positions.values())
    sizes = [
        [4 * param.numel for param in sharded if positions[param.name] == position]
        for position in range(max(positions.values()) + 1)
    ]
    assert all(sum(size) <= BUCKET_BYTES or len(size) == 1 for size in sizes)
    assert set(bucket_positions(spec, 1, 4).values()) == set(range(len(sharded)))
    assert all(sum(size) + after[0] > BUCKET_BYTES for size, after in zip(sizes, sizes[1:], strict=False))


def test_overflow_goes_to_the_exchange(crowded: tuple[ModelSpec, Plan, SyncLayout]) -> None:
    """Catches a device with more communicators than it may have, and a group that is in both places or in none."""
    spec, plan, layout = crowded
    assert layout.exchange
    assert max(layout.communicators(place) for place in plan.places) <= MAX_COMMUNICATORS
    assert not {bucket.members for bucket in layout.exchange} & {bucket.members for bucket in layout.buckets}
    every = {members for units in holders(spec, plan).values() for members in units.values()}
    assert {bucket.members for bucket in (*layout.buckets, *layout.exchange)} == every


def test_small_groups_overflow_first(crowded: tuple[ModelSpec, Plan, SyncLayout]) -> None:
    """Catches a large group that pays the exchange's price while small ones hold communicators."""
    _, plan, layout = crowded
    least = {place: min(total.numel for total in layout.totals_of(place)) for place in plan.places}
    sizes: Counter[tuple[Place, ...]] = Counter()
    for bucket in layout.exchange:
        sizes[bucket.members] += bucket.numel
    assert all(any(numel <= least[place] for place in members) for members, numel in sizes.items())


def test_exchange_counts_every_other_member(crowded: tuple[ModelSpec, Plan, SyncLayout]) -> None:
    """Catches an exchange whose bytes leave out a receiver."""
    _, plan, layout = crowded
    for place in plan.places:
        mine = [bucket for bucket in layout.exchange if place in bucket.members]
        assert layout.exchange_numel(place) == sum(bucket.numel * (len(bucket.members) - 1) for bucket in mine)
