"""Devices for which nobody can start a process: they are waited for without end, and come back with somebody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runflat.elastic.actions import Heard, Start
from runflat.elastic.device import Standing
from runflat.elastic.fake_world import World
from runflat.elastic.messages import Back, Exited
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
