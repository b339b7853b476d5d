"""Devices for which nobody can start a process: they are waited for without end, and come back with somebody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runflat.elastic.actions import Closed, Heard, Send, Start
from runflat.elastic.device import Standing
from runflat.elastic.fake_world import World
from runflat.elastic.messages import Back, Exited
from runflat.elastic.orders import Feed, PlanOrder
from runflat.elastic.state import Stage
from runflat.plan.strategies import parse_chain

LONG_S = 40.0


def vanish(world: World, *devices: str) -> None:
    """Has the machine of devices go away."""
    for device in devices:
        incarnation = world.state.devices[device].incarnation
        world.launcher.workers[device].alive = False
        world.happen(Heard(device, Exited(incarnation=incarnation, code=None, absent=True)))


def starts(world: World, device: str) -> list[int]:
    """Incarnations that were started."""
    return [a.incarnation for _, a in world.actions if isinstance(a, Start) and a.device == device]


def come_back(world: World, *devices: str, domain: str | None = None) -> None:
    for device in devices:
        incarnation = world.state.devices[device].incarnation
        world.happen(Heard(device, Back(incarnation=incarnation, domain=domain)))


def active(world: World, *devices: str) -> bool:
    return all(world.state.devices[device].standing is Standing.ACTIVE for device in devices)


def test_it_is_not_started_before_somebody_is_there(make_world: Callable[..., World]) -> None:
    """Catches starts in vain that use up a device's patience while its machine is away, so that it stays out."""
    world = make_world(num_steps=2000)
    world.run_until(lambda: world.state.committed >= 3)
    vanish(world, "1:2")
    gone_at = world.now
    world.run_until(lambda: world.now > gone_at + LONG_S)
    assert starts(world, "1:2") == [0]
    assert world.state.devices["1:2"].standing is Standing.LOST
    come_back(world, "1:2")
    world.run_until(lambda: active(world, "1:2") and len(world.state.members()) == 8)
    assert starts(world, "1:2") == [0, 1]


def test_one_that_crashes_again_and_again_still_backs_off(make_world: Callable[..., World]) -> None:
    """Catches a machine that comes and goes all the time, and costs a plan each time."""
    world = make_world(num_steps=4000)
    for round_number in range(world.state.limits.max_losses):
        world.run_until(lambda: active(world, "1:2"))
        vanish(world, "1:2")
        gone_at = world.now
        come_back(world, "1:2")
        if round_number < world.state.limits.max_losses - 1:
            world.run_until(lambda number=round_number: len(starts(world, "1:2")) == number + 2)
            assert world.now - gone_at >= world.state.limits.back_off_s * 2**round_number
    assert world.state.devices["1:2"].standing is Standing.OUT


def test_a_person_who_said_stay_away_is_obeyed(make_world: Callable[..., World]) -> None:
    """Catches a device that was drained by a person, and joins again because its machine was started anew."""
    world = make_world(num_steps=2000, limits={"auto_return": False})
    world.run_until(lambda: world.state.committed >= 3)
    vanish(world, "1:2")
    come_back(world, "1:2")
    come_at = world.now
    world.run_until(lambda: world.now > come_at + LONG_S)
    assert starts(world, "1:2") == [0]


def test_a_run_that_begins_without_some(make_world: Callable[..., World]) -> None:
    """Catches a start that waits for ever for a machine that is not there."""
    world = make_world(num_steps=400)
    world.run_until(lambda: bool(world.launcher.workers))
    vanish(world, "0:1", "1:0")
    world.run_until(lambda: world.state.committed >= 2)
    assert world.state.plan is not None
    assert [replica.tp for replica in world.state.plan.replicas] == [3, 3]
    come_back(world, "0:1", "1:0")
    world.run_until(lambda: active(world, "0:1", "1:0"))


def test_a_node_is_lost_to_a_spare_node(make_world: Callable[..., World]) -> None:
    """Catches a replica that spans nodes: a single loss is borne at a lower degree, a whole node by a whole node."""
    spares = tuple(f"s{number}" for number in range(4))
    fields: dict[str, Any] = {"chain": parse_chain("spare,ntp,drop"), "spares": spares}
    world = make_world(num_steps=4000, **fields)
    for node, names in {"a": "0", "b": "1"}.items():
        come_back(world, *(f"{names}:{slot}" for slot in range(4)), domain=node)
    come_back(world, *spares, domain="c")
    world.run_until(lambda: world.state.committed >= 10)
    vanish(world, "1:2")
    world.run_until(lambda: world.state.committed >= 13)
    assert world.state.plan is not None
    assert [replica.tp for replica in world.state.plan.replicas] == [4, 3]
    vanish(world, "1:0", "1:1", "1:3")
    world.run_until(lambda: active(world, *spares))
    assert [replica.tp for replica in world.state.plan.replicas] == [4, 4]
    assert world.state.plan.place("s0") is not None
    come_back(world, *(f"1:{slot}" for slot in range(4)), domain="b")
    world.run_until(lambda: len(world.state.standby()) == 4)
    assert active(world, *spares)


def test_a_node_that_goes_is_one_recovery(make_world: Callable[..., World]) -> None:
    """Catches a recovery for each device of a machine that goes at once, and an incident that does not name it."""
    world = make_world(num_steps=4000, tp=2, replicas=4)
    for replica in range(4):
        come_back(world, f"{replica}:0", f"{replica}:1", domain="ab"[replica // 2])
    world.run_until(lambda: world.state.committed >= 10)
    before = world.state.generation
    for device in ("2:0", "3:1", "2:1", "3:0"):
        vanish(world, device)
        gone_at = world.now
        world.run_until(lambda at=gone_at: world.now > at + world.state.limits.batch_s / 3)
    world.run_until(lambda: world.state.committed >= 15)
    # The first loss may have had a recovery of its own by the time of the second: nobody waits for single devices.
    assert world.state.generation <= before + 2
    closed = [action for _, action in world.actions if isinstance(action, Closed)]
    assert {device for one in closed for device in one.devices} == {"2:0", "2:1", "3:0", "3:1"}
    assert closed[-1].incident.cause.startswith("domain b is gone with 2:0, 2:1, 3:0, 3:1")
    assert [replica.replica for replica in (world.state.plan.replicas if world.state.plan else ())] == [0, 1]


def test_two_devices_of_a_node_that_stays(make_world: Callable[..., World]) -> None:
    """Catches a run that waits for ever for the rest of a machine of which two devices have failed."""
    world = make_world(num_steps=4000)
    for replica in range(2):
        come_back(world, *(f"{replica}:{slot}" for slot in range(4)), domain="ab"[replica])
    world.run_until(lambda: world.state.committed >= 10)
    vanish(world, "1:1", "1:2")
    gone_at = world.now
    world.run_until(lambda: world.state.stage is Stage.RUN and len(world.state.members()) == 6)
    assert world.now - gone_at >= world.state.limits.batch_s
    assert "domain" not in str([action for _, action in world.actions if isinstance(action, Closed)])
    world.run_until(lambda: world.state.committed >= 15)


def test_sources_of_its_own_domain_come_first(make_world: Callable[..., World]) -> None:
    """Catches a loss, or a return, for which units cross the network although a neighbour has them."""
    world = make_world(num_steps=4000, tp=2, replicas=4)
    for replica in range(4):
        come_back(world, f"{replica}:0", f"{replica}:1", domain="ab"[replica // 2])
    world.run_until(lambda: world.state.committed >= 3)
    vanish(world, "3:1")
    world.run_until(lambda: world.state.committed >= 8)
    come_back(world, "3:1", domain="b")
    world.run_until(lambda: active(world, "3:1"))
    orders = [action.order for _, action in world.actions if isinstance(action, Send)]
    moves = [move for order in orders if isinstance(order, PlanOrder) for move in order.resume.transfers]
    moves += [move for order in orders if isinstance(order, Feed) for move in order.transfers]
    assert {move.target for move in moves} == {"3:0", "3:1"}
    assert {move.source[0] for move in moves} <= {"2", "3"}
