"""Where copies in memory go: what takes a device must not take its copy."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from runflat.plan.buddies import buddy
from runflat.plan.plan import Place, Plan
from runflat.plan.units import ModelSpec

MakeSpec = Callable[..., ModelSpec]
MakePlan = Callable[..., Plan]


def on_nodes(plan: Plan, replicas_per_node: int) -> Plan:
    """The plan, with so many neighbouring replicas on each node."""
    nodes = (f"n{replica // replicas_per_node}" for replica, _ in plan.places)
    return replace(plan, domains=tuple(zip(plan.devices, nodes, strict=True)))


@given(st.integers(2, 4), st.integers(1, 4), st.integers(1, 4))
def test_a_healthy_job(make_spec: MakeSpec, make_plan: MakePlan, tp: int, per_node: int, nodes: int) -> None:
    """Catches a copy on the node that it is to outlive, or on the same slot, and devices that keep several."""
    plan = on_nodes(make_plan(make_spec(), tp, per_node * nodes), per_node)
    kept: Counter[Place] = Counter()
    for place in plan.places:
        other = buddy(plan, place)
        assert other is not None
        kept[other] += 1
        assert other[1] != place[1]
        if nodes > 1:
            assert plan.domain(plan.device(other)) != plan.domain(plan.device(place))
        elif per_node > 1:
            assert other[0] != place[0]
    assert set(kept.values()) == {1}


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=10), st.integers(1, 4))
def test_a_hurt_job(make_spec: MakeSpec, make_plan: MakePlan, dead: set[Place], per_node: int) -> None:
    """Catches a device without a copy elsewhere although another domain, or another replica, is there."""
    dead = {place for place in dead if place[1] or place[0] == 4} - {(4, 0)}
    plan = on_nodes(make_plan(make_spec(), 3, 5, dead), per_node)
    for place in plan.places:
        other = buddy(plan, place)
        assert other is not None
        assert other != place
        own = plan.domain(plan.device(place))
        if any(plan.domain(device) != own for device in plan.devices):
            assert plan.domain(plan.device(other)) != own
        else:
            assert other[0] != place[0]


def test_without_domains_and_with_one_device(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches a job on one machine whose copies go elsewhere than to the next replica, and a lone device."""
    plan = make_plan(make_spec(), 2, 3)
    assert [buddy(plan, place) for place in plan.places] == [(1, 1), (1, 0), (2, 1), (2, 0), (0, 1), (0, 0)]
    assert buddy(make_plan(make_spec(), 1, 1), (0, 0)) is None
    assert buddy(make_plan(make_spec(), 1, 2), (0, 0)) == (1, 0)
