"""What must move between two plans: no unit too few, no byte too many, and from someone who has it."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runflat.errors import PlanError
from runflat.plan.plan import Place, Plan
from runflat.plan.planner import build_plan
from runflat.plan.transfers import Transfer, lost_units, transfers
from runflat.plan.units import ModelSpec, unit_bytes

MakeSpec = Callable[..., ModelSpec]
MakePlan = Callable[..., Plan]
Units = dict[str, set[tuple[str, int]]]

BYTES = 12


def held_by_device(spec: ModelSpec, plan: Plan) -> Units:
    """(kind, unit) pairs that each device stores."""
    return {
        plan.device(place): {
            (kind, unit) for kind, units in plan.replica(place[0]).held(spec.kinds, place[1]).items() for unit in units
        }
        for place in plan.places
    }


def received(moves: tuple[Transfer, ...]) -> Units:
    """(kind, unit) pairs that each device gets."""
    found: Units = defaultdict(set)
    for move in moves:
        found[move.target] |= {(move.kind, unit) for unit in range(move.start, move.stop)}
    return dict(found)


def dead_places(tp: int = 4, replicas: int = 3) -> st.SearchStrategy[frozenset[Place]]:
    """Dead places of which no two have the same slot, so that each unit keeps a holder."""
    pairs = st.tuples(st.integers(0, replicas - 1), st.integers(0, tp - 1))
    return st.lists(pairs, max_size=tp - 1, unique_by=lambda place: place[1]).map(frozenset)


@given(st.lists(dead_places(), min_size=1, max_size=3))
def test_moves_are_what_changed_holder(
    make_spec: MakeSpec, make_plan: MakePlan, deaths: list[frozenset[Place]]
) -> None:
    """Catches a unit that does not arrive, travels for nothing, comes from who lacks it or is gone, or is misjudged."""
    spec = make_spec()
    old = make_plan(spec, 4, 3)
    for dead in deaths:
        new = make_plan(spec, 4, 3, dead, old)
        had, needs = held_by_device(spec, old), held_by_device(spec, new)
        if lost_units(spec, old, new):
            return
        moves = transfers(spec, old, new, BYTES)
        missing = {device: units - had.get(device, set()) for device, units in needs.items()}
        assert received(moves) == {device: units for device, units in missing.items() if units}
        for move in moves:
            units = {(move.kind, unit) for unit in range(move.start, move.stop)}
            assert units <= had[move.source]
            assert move.source in needs
            assert move.num_bytes == sum(unit_bytes(spec, kind, unit, BYTES) for kind, unit in units)
        everything = sum(unit_bytes(spec, *unit, BYTES) for units in missing.values() for unit in units)
        assert sum(move.num_bytes for move in moves) == everything
        old = new


@given(dead_places())
def test_way_there_and_back(make_spec: MakeSpec, make_plan: MakePlan, dead: frozenset[Place]) -> None:
    """Catches a return that moves more than the returning devices' own units, or to anyone else."""
    spec = make_spec()
    healthy = make_plan(spec, 4, 3)
    hurt = make_plan(spec, 4, 3, dead, healthy)
    back = make_plan(spec, 4, 3, (), hurt)
    own = held_by_device(spec, healthy)
    assert back.replicas == healthy.replicas
    assert received(transfers(spec, hurt, back, BYTES)) == {f"{r}:{s}": own[f"{r}:{s}"] for r, s in dead}


def test_first_loss_moves_the_lost_shard(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches more units in motion than were on the dead device (KV heads: than its heirs lack)."""
    spec = make_spec(kv_heads=8)
    healthy = make_plan(spec, 4, 2)
    moves = transfers(spec, healthy, make_plan(spec, 4, 2, [(1, 2)], healthy), BYTES)
    lost = held_by_device(spec, healthy)["1:2"]
    assert Counter(unit for units in received(moves).values() for unit in units) == Counter(lost)
    assert {move.source for move in moves} == {"0:2"}


def test_nothing_moves_without_a_change(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches transfers between equal plans."""
    spec = make_spec()
    plan = make_plan(spec, 4, 2, [(0, 1)])
    assert transfers(spec, plan, plan, BYTES) == ()


def test_same_replica_first(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches a copy of a KV head that is fetched over the slow links although a neighbour has it."""
    spec = make_spec(heads=8, kv_heads=1)
    healthy = make_plan(spec, 4, 2)
    spare = build_plan(spec, {place: healthy.device(place) for place in healthy.places} | {(1, 2): "s0"}, 4, 20, 8)
    sources = {move.source for move in transfers(spec, healthy, spare, BYTES) if move.kind == "kv"}
    assert sources == {"1:0"}
    assert {move.target for move in transfers(spec, healthy, spare, BYTES)} == {"s0"}


def test_sources_share_the_work(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches one holder that sends all while its peers have the same units."""
    spec = make_spec(kv_heads=8)
    healthy = make_plan(spec, 4, 4)
    moves = transfers(spec, healthy, make_plan(spec, 4, 4, [(1, 2)], healthy), BYTES)
    sent: Counter[str] = Counter()
    for move in moves:
        sent[move.source] += move.num_bytes
    assert set(sent) == {"0:2", "2:2", "3:2"}
    largest = max(unit_bytes(spec, kind.name, 0, BYTES) for kind in spec.kinds)
    assert max(sent.values()) - min(sent.values()) <= largest


def test_lost_units(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches a unit that no one has and that is invented instead of read from a checkpoint."""
    spec = make_spec()
    healthy = make_plan(spec, 4, 2)
    hurt = make_plan(spec, 4, 2, [(0, 1), (1, 1)], healthy)
    lost = lost_units(spec, healthy, hurt)
    assert lost["head"] == (2, 3)
    assert "kv" not in lost
    with pytest.raises(PlanError, match="no live device holds head unit 2.*checkpoint"):
        transfers(spec, healthy, hurt, BYTES)
    assert lost_units(spec, healthy, make_plan(spec, 4, 2, [(0, 1), (1, 2)], healthy)) == {}


@given(dead_places(), st.integers(1, 3))
def test_a_neighbour_is_asked_first(
    make_spec: MakeSpec, make_plan: MakePlan, dead: frozenset[Place], per_node: int
) -> None:
    """Catches a unit that comes from another domain although a device of its own one has it."""
    spec = make_spec()
    old = make_plan(spec, 4, 6)
    new = make_plan(spec, 4, 6, dead, old)
    new = replace(new, domains=tuple((device, f"n{int(device[0]) // per_node}") for device in new.devices))
    had = held_by_device(spec, old)
    for move in transfers(spec, old, new, BYTES):
        units = {(move.kind, unit) for unit in range(move.start, move.stop)}
        domain = new.domain(move.target)
        if any(units & had[device] and new.domain(device) == domain for device in new.devices if device != move.target):
            assert new.domain(move.source) == domain
