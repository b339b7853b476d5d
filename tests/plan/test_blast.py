"""What the loss of a domain takes."""

from collections.abc import Callable
from dataclasses import replace

from runflat.plan.blast import ReplicaHit, blast_radii
from runflat.plan.plan import Plan
from runflat.plan.sync_groups import sync_layout
from runflat.plan.units import ModelSpec
from runflat.plan.zero import ownership

MakeSpec = Callable[..., ModelSpec]
MakePlan = Callable[..., Plan]


def in_domains(plan: Plan, size: int) -> Plan:
    """The plan, with so many neighbouring devices in each domain."""
    names = (f"n{number // size}" for number in range(len(plan.devices)))
    return replace(plan, domains=tuple(zip(plan.devices, names, strict=True)))


def test_a_domain_of_one_replica(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches state that is called lost although another replica has it, and a domain that hits others' replicas."""
    spec = make_spec()
    plan = in_domains(make_plan(spec, 4, 3), 4)
    first, second, third = blast_radii(spec, plan)
    assert (first.domain, first.devices) == ("n0", ("0:0", "0:1", "0:2", "0:3"))
    assert [blast.hits for blast in (first, second, third)] == [(ReplicaHit(r, 4, 0),) for r in range(3)]
    assert first.num_left == 8
    assert first.goes_on
    assert first.lost == {}


def test_units_without_another_holder(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches a loss that is said to cost nothing where both holders of a unit go, or nobody is left."""
    spec = make_spec(heads=8, kv_heads=8)
    (whole,) = blast_radii(spec, in_domains(make_plan(spec, 4, 2), 8))
    assert whole.num_left == 0
    assert not whole.goes_on
    assert len(whole.lost["head"]) == 8
    plan = make_plan(spec, 2, 2)
    crossed = replace(plan, domains=(("0:0", "a"), ("1:0", "a"), ("0:1", "b")))
    a, b = blast_radii(spec, crossed)
    assert a.hits == (ReplicaHit(0, 2, 1), ReplicaHit(1, 2, 1))
    assert a.lost["head"] == (0, 1, 2, 3)
    assert not a.goes_on
    assert b.goes_on, "1:1 has the same, and its domain is not known"
    assert blast_radii(spec, plan) == ()


def test_optimizer_state_that_goes_with_its_mirror(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches owners and mirrors on one node that `plan` does not tell of."""
    spec = make_spec()
    for size, is_safe in ((4, True), (8, False)):
        plan = in_domains(make_plan(spec, 4, 4), size)
        layout = sync_layout(spec, plan, 2000, 8)
        unknown = ownership(spec, replace(plan, domains=()), layout)
        known = ownership(spec, plan, layout)
        assert all(blast.goes_on for blast in blast_radii(spec, plan, known))
        assert all(not blast.lost for blast in blast_radii(spec, plan, unknown))
        assert all(not blast.lost_moments for blast in blast_radii(spec, plan, unknown)) == is_safe
