"""From devices to a plan, its JSON, and layouts that cannot be."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from runflat.errors import PlanError
from runflat.plan.assignment import base_assignment
from runflat.plan.plan import Plan, plan_from_json, plan_from_wire
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.sync_groups import sync_layout
from runflat.plan.transfers import transfers
from runflat.plan.units import ModelSpec

MakeSpec = Callable[..., ModelSpec]
MakePlan = Callable[..., Plan]


def test_json_round_trip(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches a plan that comes back with lists for tuples, without its dead slots, or after its caches were filled."""
    plan = make_plan(make_spec(), 4, 3, [(0, 1), (2, 0), (2, 3)])
    assert plan.place("1:2") == (1, 2)
    assert plan_from_json(plan.to_json()) == plan
    moved = replace(plan, replicas=(*plan.replicas[:2], replace(plan.replicas[2], devices=(None, "s0", "0:1", None))))
    apart = replace(moved, domains=tuple((device, f"n{device[0]}") for device in moved.devices))
    some = replace(plan, domains=(("0:2", "n1"), ("0:3", "n2")))
    for known in (plan, moved, apart, some):
        assert plan_from_wire(known.to_wire()) == known
        assert plan_from_json(known.to_json()) == known
        assert hash(plan_from_wire(known.to_wire())) == hash(known)
    assert json.loads(plan.to_json())["replicas"][0]["devices"] == ["0:0", None, "0:2", "0:3"]
    assert hash(plan_from_json(plan.to_json())) == hash(plan)


def test_look_ups(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches a device that is found in a place where it is not, or a world out of order."""
    plan = make_plan(make_spec(), 4, 2, [(0, 1)])
    assert plan.places == ((0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3))
    assert [plan.place(plan.device(place)) for place in plan.places] == list(plan.places)
    assert plan.place("0:1") is None
    assert plan.replica(0).dead_slots == (1,)
    assert (plan.replica(0).tp, plan.replica(1).tp) == (3, 4)
    with pytest.raises(PlanError, match=r"replica 2 is not in the plan.*it has 0, 1"):
        plan.replica(2)


def test_healthy_plan_is_the_ordinary_layout(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches a failure-free job that pays for the possibility of failures."""
    spec = make_spec()
    plan = make_plan(spec, 4, 3)
    for replica in plan.replicas:
        assert dict(replica.assignments) == {
            kind.name: base_assignment(kind.num_units, 4) for kind in spec.assigned_kinds
        }
        assert replica.num_sequences == 10


def test_hit_replica_gets_fewer_sequences(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches a batch that is split evenly although one replica is slower, or that shrinks."""
    plan = make_plan(make_spec(), 4, 3, [(1, 0), (1, 2)])
    shares = [replica.num_sequences for replica in plan.replicas]
    assert sum(shares) == 30
    assert shares[1] < shares[0] == shares[2]


def test_slow_replica_leaves(make_spec: MakeSpec) -> None:
    """Catches a replica that stays in the plan with no sequence, and so with no loss to send gradients for."""
    spec = make_spec()
    plan = build_plan(spec, live_devices(4, 3, [(1, 0), (1, 1), (1, 3)]), 4, 4, 8)
    assert [replica.replica for replica in plan.replicas] == [0, 2]
    assert plan.num_sequences == 4
    assert sync_layout(spec, plan, 1000, 4).of((1, 2)) == ()


def test_previous_plan_is_kept(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches a second loss that also moves what the first one has moved."""
    spec = make_spec(heads=16, kv_heads=16, tp=8)
    first = make_plan(spec, 8, 2, [(0, 5)])
    second = make_plan(spec, 8, 2, [(0, 3), (0, 5)], first)
    fresh = make_plan(spec, 8, 2, [(0, 3), (0, 5)])
    sizes = [sum(move.num_bytes for move in transfers(spec, first, plan, 12)) for plan in (second, fresh)]
    assert 0 < sizes[0] < sizes[1]


def test_generation_and_devices(make_spec: MakeSpec) -> None:
    """Catches a spare that loses its name when it takes a slot."""
    plan = build_plan(make_spec(), {**live_devices(4, 1, [(0, 2)]), (0, 2): "s0"}, 4, 1, 8, generation=7)
    assert (plan.generation, plan.replica(0).devices) == (7, ("0:0", "0:1", "s0", "0:3"))


@pytest.mark.parametrize(
    ("tp", "replicas", "dead", "parts"),
    [
        pytest.param(4, 2, [(2, 0)], ["2:0 does not exist", "replicas 0..1", "slots 0..3"], id="replica"),
        pytest.param(4, 2, [(0, 4)], ["0:4 does not exist", "replicas 0..1", "slots 0..3"], id="slot"),
        pytest.param(4, 2, [(0, -1)], ["0:-1 does not exist"], id="negative slot"),
        pytest.param(4, 2, [(-1, 0)], ["-1:0 does not exist"], id="negative replica"),
        pytest.param(2, 2, [(1, 0), (1, 1)], ["all 2 slots of replica 1", "1 replicas instead"], id="replica all dead"),
        pytest.param(2, 1, [(0, 0), (0, 1)], ["all 2 slots of replica 0", "keep one"], id="everything dead"),
        pytest.param(9, 2, [], ["TP 9", "8 units of kind 'head' of ByHand", "at most 8"], id="more slots than heads"),
    ],
)
def test_impossible_layout(
    make_spec: MakeSpec, tp: int, replicas: int, dead: list[tuple[int, int]], parts: list[str]
) -> None:
    """Catches a layout that cannot be and is planned, or refused without value, limit and remedy."""
    with pytest.raises(PlanError) as info:
        build_plan(make_spec(), live_devices(tp, replicas, dead), tp, 10, 8)
    message = str(info.value)
    assert all(part in message for part in parts)
    assert message.endswith(".")
    assert "\n" not in message


def test_smallest_kind_is_named(make_spec: MakeSpec) -> None:
    """Catches a remedy that leads straight into the next error: TP of at most 8 where 5 is the limit."""
    with pytest.raises(PlanError, match="at most 5"):
        build_plan(make_spec(ffn=5, tp=8), live_devices(9, 1, ()), 9, 10, 8)


def test_no_device(make_spec: MakeSpec) -> None:
    """Catches a plan for nobody."""
    with pytest.raises(PlanError, match="no live device"):
        build_plan(make_spec(), {}, 4, 10, 8)
