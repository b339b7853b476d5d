"""`spare`: a warm spare takes the dead slot; what comes back becomes a spare; idle spares disturb nothing."""

from collections.abc import Callable
from typing import Any

import pytest

from runflat.cluster.ledger import Category
from runflat.elastic import orders
from runflat.elastic.actions import Asked, Closed, Finish, Grew, Send
from runflat.elastic.device import Standing
from runflat.elastic.fake_launcher import Fault
from runflat.elastic.fake_world import World
from runflat.elastic.meter import Meter
from runflat.plan.strategies import parse_chain

LATE = 10
"""A step by which spares stand by."""


def loss(device: str, phase: str = "forward", **fields: Any) -> Fault:
    return Fault("kill", device, phase, LATE, **fields)


def of(world: World, kind: type) -> list[Any]:
    return [action for _, action in world.actions if isinstance(action, kind)]


def incidents(world: World) -> list[Any]:
    return [closed.incident for closed in of(world, Closed)]


def seats(world: World) -> dict[str, str]:
    """Device by place."""
    plan = world.state.plan
    assert plan is not None
    return {f"{place[0]}:{place[1]}": plan.device(place) for place in plan.places}


def moved(world: World) -> dict[str, str]:
    """Places at which another device stands than at the start."""
    return {place: device for place, device in seats(world).items() if place != device}


def aborts(world: World) -> list[str]:
    return [action.device for action in of(world, Send) if isinstance(action.order, orders.Abort)]


@pytest.fixture
def spared(make_world: Callable[..., World]) -> Callable[..., World]:
    """Returns a maker of worlds in which two spares stand by and nobody comes back by himself."""

    def make(*faults: Fault, chain: str = "spare,ntp,drop", spares: int = 2, **fields: Any) -> World:
        names = tuple(f"s{number}" for number in range(spares))
        fields = {"limits": {"auto_return": False}, "num_steps": 60, **fields}
        return make_world(*faults, chain=parse_chain(chain), spares=names, **fields)

    return make


def test_a_spare_takes_the_slot_in_the_recovery_itself(spared: Callable[..., World]) -> None:
    """Catches a spare that is only taken in later, so that the job runs at a lower degree in between."""
    world = spared(loss("1:2"))
    assert world.run().text is None
    assert moved(world) == {"1:2": "s0"}
    assert [incident.strategy for incident in incidents(world)] == ["spare"]
    assert of(world, Grew) == []
    assert [step for step, plans in world.launcher.uses.items() if len(plans) > 1] == []
    resume = next(a.order.resume for a in of(world, Send) if isinstance(a.order, orders.PlanOrder) and a.device == "s0")
    assert {move.target for move in resume.transfers} == {"s0"}, "only the spare lacks something"


def test_two_losses_take_two_spares_and_the_third_falls_through_with_words(spared: Callable[..., World]) -> None:
    """Catches one spare in two places, and a chain that falls through in silence when all spares are used."""
    world = spared(loss("1:2"), loss("0:1"), Fault("kill", "1:0", "forward", LATE + 10))
    assert world.run().text is None
    assert sorted(moved(world).items()) == [("0:1", "s0"), ("1:2", "s1")]
    assert "1:0" not in seats(world)
    last = incidents(world)[-1]
    assert last.strategy == "ntp"
    assert last.words == ("replica 1: spare: 1 dead, but 0 free spares",)


def test_a_device_that_comes_back_is_a_spare_and_is_used_as_one(spared: Callable[..., World]) -> None:
    """Catches a returned device that throws the spare out again, or that is never used any more."""
    world = spared(loss("1:2"), spares=1)
    world.run_until(lambda: bool(incidents(world)))
    world.happen(Asked("return", "1:2"))
    world.run_until(lambda: world.state.devices["1:2"].standing is Standing.STANDBY)
    world.launcher.workers["0:3"].die(-9)
    assert world.run().text is None
    assert moved(world) == {"1:2": "s0", "0:3": "1:2"}
    assert [incident.strategy for incident in incidents(world)] == ["spare", "spare"]


@pytest.mark.parametrize("phase", ["selftest", "idle"])
def test_a_spare_that_dies_costs_no_step(spared: Callable[..., World], phase: str) -> None:
    """Catches training that is aborted for a device without work."""
    world = spared(Fault("kill", "s0", "selftest")) if phase == "selftest" else spared()
    world.run_until(lambda: world.state.committed == LATE)
    if phase == "idle":
        world.launcher.workers["s0"].die(-9)
    assert world.run().text is None
    assert world.state.devices["s0"].standing is Standing.LOST
    assert (aborts(world), incidents(world), moved(world)) == ([], [], {})


def test_spares_that_never_start_are_not_fatal(spared: Callable[..., World]) -> None:
    """Catches a job that does not begin, or stops, because a device that it does not need is broken."""
    world = spared(Fault("raise", "s0", "selftest"), Fault("stop", "s1", "selftest"))
    assert world.run().text is None
    assert {world.state.devices[name].standing for name in ("s0", "s1")} <= {Standing.LOST, Standing.STARTING}


@pytest.mark.parametrize("phase", ["barrier", "form", "transfer", "digest", "forward"])
def test_a_spare_that_dies_while_it_takes_over_is_followed_by_the_next(
    spared: Callable[..., World], phase: str
) -> None:
    """Catches a second fault in a takeover that loses a committed step, or the seat of the dead device."""
    world = spared(loss("1:2"), Fault("kill", "s0", phase, LATE))
    assert world.run().text is None
    assert world.launcher.struck[-1].device == "s0"
    assert moved(world) == {"1:2": "s1"}
    assert sorted(world.launcher.uses) == list(range(60))
    assert all(len(plans) == 1 for plans in world.launcher.uses.values())


def test_a_survivor_that_dies_while_a_spare_takes_over_gets_the_other_spare(spared: Callable[..., World]) -> None:
    """Catches a recovery that forgets the first loss when the second comes."""
    world = spared(loss("1:2"), Fault("kill", "0:0", "form", LATE, nth=2))
    assert world.run().text is None
    assert sorted(moved(world).values()) == ["s0", "s1"]


def test_a_spare_that_is_late_joins_while_training_goes_on(spared: Callable[..., World]) -> None:
    """Catches a spare that is not used because it was not ready when the device was lost."""
    world = spared(Fault("kill", "1:2", "forward", 1), spares=1)
    assert world.run().text is None
    assert incidents(world)[0].strategy == "ntp"
    assert [grew.growth.joining for grew in of(world, Grew)] == [("s0",)]
    assert moved(world) == {"1:2": "s0"}


def test_a_late_spare_brings_a_dropped_replica_back(spared: Callable[..., World]) -> None:
    """Catches healthy devices that stay parked although a spare could take the slot that they lack."""
    world = spared(Fault("kill", "1:2", "forward", 1), spares=1, chain="spare,drop", num_steps=100)
    assert world.run().text is None
    assert incidents(world)[0].strategy == "drop"
    assert moved(world) == {"1:2": "s0"}
    assert len(seats(world)) == 8


def test_who_is_asked_to_leave_is_replaced_at_a_boundary(spared: Callable[..., World]) -> None:
    """Catches an orderly leave that lowers a degree, or leaves with a replica, while a spare stands by."""
    world = spared(chain="spare,drop")
    world.run_until(lambda: world.state.committed == LATE)
    world.happen(Asked("drain", "1:2"))
    assert world.run().text is None
    assert aborts(world) == []
    assert moved(world) == {"1:2": "s0"}
    (grew,) = of(world, Grew)
    assert (grew.growth.joining, grew.growth.leaving) == (("s0",), ("1:2",))
    assert world.state.devices["1:2"].standing is Standing.PARKED


def test_a_chain_of_spare_alone_stops_when_they_are_used_up(spared: Callable[..., World]) -> None:
    """Catches a job that goes on in a way that nobody asked for."""
    world = spared(loss("0:0"), chain="spare", spares=0, replicas=1)
    finish = of(world, Finish) or [world.run()]
    assert "spare: 1 dead, but 0 free spares" in str(finish[0].text)


def test_idle_spares_are_booked_as_idle(spared: Callable[..., World]) -> None:
    """Catches device-seconds of a spare that count as work, as failed, or not at all."""
    world = spared()
    meter = Meter(10)
    world.run_until(lambda: world.state.committed == LATE)
    meter._ran = True
    meter.advance(world.state, 2.0)
    assert meter.ledger.device_s[Category.IDLE] == pytest.approx(4.0)
    assert meter.ledger.device_s[Category.PRODUCTIVE] == pytest.approx(16.0)
