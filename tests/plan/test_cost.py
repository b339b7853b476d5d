"""Bytes, FLOPs and memory against counts that are made another way."""

from collections.abc import Callable
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runflat.plan.cost import (
    NUM_SCALARS,
    SCALAR_BYTES,
    all_reduce_bytes,
    device_memory,
    device_traffic,
    held_numel,
    loads,
    sequence_flops,
)
from runflat.plan.plan import Plan
from runflat.plan.sync_groups import SyncLayout, sync_layout
from runflat.plan.units import ModelSpec, shard_shape

MakeSpec = Callable[..., ModelSpec]
MakePlan = Callable[..., Plan]

SEQ_LEN = 8


@given(st.frozensets(st.tuples(st.just(0), st.integers(0, 3)), max_size=3), st.booleans())
def test_counts_equal_the_shards(
    make_spec: MakeSpec, make_plan: MakePlan, dead: frozenset[tuple[int, int]], fused: bool
) -> None:
    """Catches memory or FLOPs that differ from those of the tensors which the device really has."""
    spec = make_spec(fused=fused)
    replica = make_plan(spec, 4, 1, dead).replica(0)
    for slot in replica.live_slots:
        held = replica.held(spec.kinds, slot)
        shapes = {param.name: shard_shape(spec, param, held) for param in spec.params}
        assert held_numel(spec, replica, slot) == sum(map(prod, shapes.values()))
        multiplied = sum(param.matmuls * prod(shapes[param.name]) for param in spec.params)
        scores = len(held["head"]) * SEQ_LEN * SEQ_LEN * spec.head_dim * spec.num_layers
        # forward: two FLOPs per multiply-add, scores and weighted values; backward: twice as many
        assert sequence_flops(spec, replica, slot, SEQ_LEN) == 3 * (2 * SEQ_LEN * multiplied + 2 * 2 * scores)


def test_shards_add_up_to_the_model(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches work or weights that a healthy replica does twice or not at all."""
    spec = make_spec(kv_heads=4)
    replica = make_plan(spec, 4, 1).replica(0)
    whole = make_plan(spec, 1, 1).replica(0)
    assert sum(held_numel(spec, replica, slot) - spec.replicated_numel for slot in range(4)) == (
        spec.num_params - spec.replicated_numel
    )
    assert held_numel(spec, whole, 0) == spec.num_params
    assert sum(loads(spec, replica, SEQ_LEN).values()) == sequence_flops(spec, whole, 0, SEQ_LEN)


def test_memory(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches moments that count once, gradients left out, activations that ignore micro-batch or layers."""
    spec = make_spec()
    replica = make_plan(spec, 4, 1, [(0, 0)]).replica(0)
    one = device_memory(spec, replica, 1, SEQ_LEN, 1, 4)
    assert one.params_bytes == one.grads_bytes == 4 * held_numel(spec, replica, 1)
    assert one.moments_bytes == 2 * one.params_bytes
    assert one.total_bytes == 4 * one.params_bytes + one.activations_bytes
    assert device_memory(spec, replica, 1, SEQ_LEN, 3, 4).activations_bytes == 3 * one.activations_bytes
    assert device_memory(spec, replica, 1, SEQ_LEN, 1, 8).total_bytes == 2 * one.total_bytes
    deeper = device_memory(make_spec(layers=4), replica, 1, SEQ_LEN, 1, 4)
    assert deeper.activations_bytes > 1.5 * one.activations_bytes


def test_memory_of_split_tokens(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches shares of tokens that do not add up, and hidden sizes that stay whole beside the two gathered inputs."""
    spec, own = make_spec(), []
    replica = make_plan(spec, 4, 1, [(0, 0)]).replica(0)
    for slot in replica.live_slots:
        whole, split = (device_memory(spec, replica, slot, SEQ_LEN, 1, 4, sequence_parallel=on) for on in (False, True))
        saved = whole.activations_bytes - split.activations_bytes
        own.append(SEQ_LEN - saved // (6 * spec.num_layers * spec.hidden_size * 4))
        assert (whole.params_bytes, whole.moments_bytes) == (split.params_bytes, split.moments_bytes)
    assert own == [3, 3, 2]


def test_healthy_traffic_is_the_textbook(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches one collective or one byte more than a plain TP x DP job, where nobody is dead."""
    spec = make_spec(kv_heads=4, ffn=64, vocab=64)
    tp, dp, sequences, width = 4, 3, 10, 4
    plan = make_plan(spec, tp, dp)
    layout = sync_layout(spec, plan, 10**9, width)
    numel = (spec.num_params - spec.replicated_numel) // tp
    hidden = sequences * SEQ_LEN * spec.hidden_size * (4 * spec.num_layers + 2)
    loss = sequences * (SEQ_LEN - 1) * 3
    world = 2 * (tp * dp - 1) / (tp * dp)
    for place in plan.places:
        traffic = device_traffic(spec, plan, layout, place, SEQ_LEN, 4, width)
        assert traffic.tp_bytes == pytest.approx((hidden + loss) * width * 2 * (tp - 1) / tp)
        assert traffic.sync_bytes == pytest.approx(numel * width * 2 * (dp - 1) / dp)
        assert traffic.replicated_bytes == pytest.approx(spec.replicated_numel * width * world)
        assert traffic.scalars_bytes == pytest.approx(NUM_SCALARS * SCALAR_BYTES * world)
        # three micro-batches (4, 3, 3); one bucket, the replicated one, the scalars
        assert traffic.num_collectives == 3 * (4 * spec.num_layers + 4) + 3


def test_one_device_sends_nothing(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches a collective that is counted although there is nobody to talk to."""
    spec = make_spec()
    plan = make_plan(spec, 1, 1)
    traffic = device_traffic(spec, plan, sync_layout(spec, plan, 1000, 4), (0, 0), SEQ_LEN, 4, 4)
    assert (traffic.num_collectives, traffic.total_bytes) == (0, 0)


def test_last_device_of_a_replica(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches tensor-parallel traffic of a replica that has one device left, and peers of it that are left out."""
    spec = make_spec(kv_heads=8)
    plan = make_plan(spec, 4, 2, [(1, 0), (1, 1), (1, 3)])
    layout = sync_layout(spec, plan, 1000, 4)
    alone = device_traffic(spec, plan, layout, (1, 2), SEQ_LEN, 4, 4)
    assert alone.tp_bytes == 0
    assert alone.sync_bytes == pytest.approx((spec.num_params - spec.replicated_numel) * 4)
    assert layout.communicators((1, 2)) == 4 + 2


def test_exchange_is_counted(crowded: tuple[ModelSpec, Plan, SyncLayout]) -> None:
    """Catches gradients of small groups that travel for free, or that cost a launch each."""
    spec, plan, layout = crowded
    for place in plan.places:
        own = [bucket for bucket in layout.of(place) if len(bucket.members) > 1]
        reduced = sum(all_reduce_bytes(4 * bucket.numel, len(bucket.members)) for bucket in own)
        sent = 4 * layout.exchange_numel(place)
        traffic = device_traffic(spec, plan, layout, place, SEQ_LEN, 10, 4)
        assert traffic.sync_bytes == pytest.approx(reduced + sent)
        num_micro = -(-plan.replica(place[0]).num_sequences // 10)
        assert traffic.num_collectives == num_micro * (4 * spec.num_layers + 4) + len(own) + 3
