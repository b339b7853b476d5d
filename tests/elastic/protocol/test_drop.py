"""`drop`: the hit replica leaves as a whole, the others take its sequences, it comes back whole."""

from collections.abc import Callable
from typing import Any

from runflat.elastic import orders
from runflat.elastic.actions import Action, Closed, Grew, Heard, Planned, Send, Start
from runflat.elastic.device import Standing
from runflat.elastic.fake_launcher import Fault
from runflat.elastic.fake_world import World
from runflat.elastic.messages import Exited, Message, Status
from runflat.elastic.protocol import decide
from runflat.plan.strategies import Strategy

DROP = (Strategy.DROP,)
LOSS = Fault("kill", "1:2", "forward", 3)
SURPLUS = ["1:0", "1:1", "1:3"]


def of(world: World, kind: type) -> list[Any]:
    return [action for _, action in world.actions if isinstance(action, kind)]


def shares(world: World) -> dict[int, int]:
    assert world.state.plan is not None
    return {replica.replica: replica.num_sequences for replica in world.state.plan.replicas}


def test_the_hit_replica_leaves_at_once_and_comes_back_whole(make_world: Callable[..., World]) -> None:
    """Catches a `drop` that goes on at a lower degree, and healthy devices that never get their work back."""
    world = make_world(LOSS, chain=DROP, replicas=3, num_sequences=12, num_steps=60)
    world.run_until(lambda: bool(of(world, Closed)))
    assert shares(world) == {0: 6, 2: 6}
    assert of(world, Closed)[0].incident.strategy == "drop"
    left = [a.device for a in of(world, Send) if isinstance(a.order, orders.Exit)]
    assert left == SURPLUS
    assert world.run().text is None
    assert shares(world) == {0: 4, 1: 4, 2: 4}
    assert {start.device for start in of(world, Start) if start.incarnation} == {"1:2", *SURPLUS}
    assert len(of(world, Grew)) == 1, "they come back in one change"
    assert sorted(world.launcher.uses) == list(range(60)), "each step is committed"
    assert all(len(plans) == 1 for plans in world.launcher.uses.values()), "and none twice"


def test_a_step_that_only_the_leaving_replica_has_committed_is_not_lost(make_world: Callable[..., World]) -> None:
    """Catches committed work that goes with the replica that leaves: the others must apply the step too."""
    world = make_world(chain=DROP)
    state = world.run_until(lambda: world.state.committed == 5)
    done: list[Action] = []
    said: list[tuple[str, Message]] = [("1:2", Exited(incarnation=0, code=-9))]
    for name in (n for n in state.devices if n != "1:2"):
        fields = {"committed": 6, "scalars": (3.0,)} if name.startswith("1") else {"committed": 5, "complete": True}
        status = {"incarnation": 0, "generation": 1, "holds": 0, "complete": False, **fields}
        said.append((name, Status.model_validate(status)))
    for name, message in said:
        state, actions = decide(state, Heard(name, message), world.now)
        done += actions
    (planned,) = [action for action in done if isinstance(action, Planned)]
    assert (planned.resume.action, planned.resume.committed, planned.resume.scalars) == ("forward", 6, (3.0,))
    assert [replica.replica for replica in planned.plan.replicas] == [0]


def test_the_devices_of_a_replica_that_left_are_parked_until_then(make_world: Callable[..., World]) -> None:
    """Catches processes that hold memory without work, and ones that are started again too early."""
    world = make_world(LOSS, chain=DROP, limits={"auto_return": False})
    assert world.run().text is None
    assert shares(world) == {0: 8}
    assert sorted(world.state.standing(Standing.PARKED)) == SURPLUS
    assert {start.incarnation for start in of(world, Start)} == {0}


def test_both_replicas_hit_at_once_leave_nothing_and_the_reason_is_said(make_world: Callable[..., World]) -> None:
    """Catches a chain that ends without a word why nothing of it helped."""
    world = make_world(chain=DROP)
    world.run_until(lambda: world.state.committed == 3)
    for name in ("0:1", "1:2"):
        world.launcher.workers[name].die(-9)
    text = str(world.run().text)
    assert "replica 0: drop: no other replica would be left" in text
    assert "There is no checkpoint" in text


def test_a_second_loss_while_the_first_is_dealt_with_drops_its_replica_too(make_world: Callable[..., World]) -> None:
    """Catches a fault during the recovery that leaves a half plan, or sequences of a replica with nobody."""
    world = make_world(LOSS, Fault("kill", "0:0", "form", 3, nth=2), chain=DROP, replicas=3, num_sequences=12)
    world.run_until(lambda: bool(of(world, Closed)))
    assert shares(world) == {2: 12}
    (closed,) = of(world, Closed)
    assert closed.devices == ("1:2", "0:0")
