"""From a decision to a plan and its moves."""

from collections.abc import Callable

import pytest

from runflat.elastic.messages import MemoryCopy
from runflat.elastic.planning import Planner
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.transfers import transfers

ALL = [f"{replica}:{slot}" for replica in range(2) for slot in range(4)]


def test_the_plan_is_the_planners(make_planner: Callable[..., Planner]) -> None:
    """Catches a running job whose shares or units differ from what `runflat plan` shows for the same dead slots."""
    planner = make_planner()
    for dead in ([], [(1, 2)], [(0, 0), (1, 1), (1, 3)]):
        live = [name for name in ALL if tuple(map(int, name.split(":"))) not in dead]
        plan = planner.plan(planner.decide(live, None), 0, None)
        assert plan == build_plan(planner.spec, live_devices(4, 2, dead), 4, 8, planner.seq_len)


def test_moves_are_those_of_a_change_between_plans(make_planner: Callable[..., Planner]) -> None:
    """Catches moves that differ from the ones that `plan` counts: more bytes, or another source."""
    planner = make_planner()
    old = planner.plan(planner.decide(ALL, None), 0, None)
    new = planner.plan(planner.decide([n for n in ALL if n != "1:2"], None), 1, old)
    moves = planner.moves(dict.fromkeys(ALL, old), new)
    assert [tuple(vars(t).values()) for t in transfers(planner.spec, old, new, 12)] == [
        (m.kind, m.start, m.stop, m.source, m.target, m.num_bytes) for m in moves.transfers
    ]
    assert not moves.lost


def test_devices_that_hold_units_of_different_plans_are_taken_at_their_word(
    make_planner: Callable[..., Planner],
) -> None:
    """Catches a second fault in the middle of a switch: some hold the old plan's units, some the new one's."""
    planner = make_planner()
    whole = planner.plan(planner.decide(ALL, None), 0, None)
    shrunk = planner.plan(planner.decide([n for n in ALL if n != "1:2"], None), 1, whole)
    holdings = {name: whole if name.startswith("0") else shrunk for name in ALL}
    moves = planner.moves(holdings, planner.plan(planner.decide(ALL, None), 2, shrunk))
    assert {move.target for move in moves.transfers} == {"1:2"}
    assert {move.source for move in moves.transfers} == {"1:0", "1:1", "1:3"}, "its own replica is near"


def test_what_nobody_holds_is_named(make_planner: Callable[..., Planner]) -> None:
    """Catches a lost unit that is silently left out of the moves."""
    planner = make_planner(replicas=1)
    whole = planner.plan(planner.decide(ALL[:4], None), 0, None)
    new = planner.plan(planner.decide(ALL[:3], None), 1, whole)
    assert planner.moves(dict.fromkeys(ALL[:3], whole), new).lost == (
        "ffn 12",
        "ffn 13",
        "ffn 14",
        "ffn 15",
        "head 6",
        "head 7",
    )


def test_copies_of_one_step_are_put_together(make_planner: Callable[..., Planner]) -> None:
    """Catches a copy in memory that is read as if it were of the plan in force."""
    planner = make_planner(replicas=1)
    whole = planner.plan(planner.decide(ALL[:4], None), 0, None)
    new = planner.plan(planner.decide(ALL[:3], None), 1, whole)
    own = {name: [MemoryCopy(device=name, step=8, generation=0)] for name in ALL[:3]}
    buddy = {**own, "0:0": [*own["0:0"], MemoryCopy(device="0:3", step=8, generation=0)]}
    assert planner.moves_from_copies(own, 8, {0: whole}, new).lost
    moves = planner.moves_from_copies(buddy, 8, {0: whole}, new)
    assert not moves.lost
    assert {move.source for move in moves.transfers} == {"0:0"}
    assert planner.moves_from_copies(buddy, 7, {0: whole}, new).lost
    assert planner.moves_from_copies(buddy, 8, {}, new).lost


@pytest.mark.parametrize("too_low", [0, 3])
def test_a_degree_that_does_not_fit_drops_the_replica(make_planner: Callable[..., Planner], too_low: int) -> None:
    """Catches a memory limit that the decision does not see."""
    decision = make_planner().decide([n for n in ALL if n != "1:2"], None, too_low)
    assert dict(decision.shares).keys() == ({0} if too_low else {0, 1})


@pytest.mark.parametrize("lost", [[], ["1:2"], ["0:3", "1:2"]])
def test_slowness_takes_no_replicas_last_sequence(make_planner: Callable[..., Planner], lost: list[str]) -> None:
    """Catches a replica that leaves since its machine was busy: with the other's next loss its units have no holder."""
    planner = make_planner()
    live = [name for name in ALL if name not in lost]
    shares = dict(planner.decide(live, None, slow={1: 50.0}).shares)
    assert shares[1] == 1
    assert sum(shares.values()) == 8
    few = planner.decide(["0:0", "0:1", "0:2", "0:3", "1:0"], None, slow={0: 50.0, 1: 50.0})
    assert [replica for replica, _ in few.shares] == [0, 1]
    alone = planner.decide(ALL[:4], None, slow={1: 50.0})
    assert [replica for replica, _ in alone.shares] == [0]
