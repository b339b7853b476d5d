"""Batch rules at a loss: constant redistributes, capped pauses below the target, flexible does fewer sequences."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from runflat.cluster.ledger import Category
from runflat.elastic import orders
from runflat.elastic.actions import Asked, Closed, Finish, Grew, Reply, Say, Send, StopAsked
from runflat.elastic.device import Standing
from runflat.elastic.fake_launcher import Fault
from runflat.elastic.fake_world import World
from runflat.elastic.meter import Meter
from runflat.elastic.state import Stage
from runflat.elastic.watch import waits
from runflat.plan.batch import BatchRule
from runflat.plan.strategies import parse_chain

LOSS = Fault("kill", "1:2", "forward", 10)


def of(world: World, kind: type) -> list[Any]:
    return [action for _, action in world.actions if isinstance(action, kind)]


def shares(world: World) -> list[int]:
    assert world.state.plan is not None
    return [replica.num_sequences for replica in world.state.plan.replicas]


def is_paused(world: World) -> bool:
    return world.state.stage is Stage.PAUSE


@pytest.fixture
def ruled(make_world: Callable[..., World]) -> Callable[..., World]:
    """Returns a maker of worlds with a batch rule, two replicas of four and eight sequences."""

    def make(rule: BatchRule, *faults: Fault, cap: int | None = None, chain: str = "ntp,drop", **fields: Any) -> World:
        fields = {"limits": {"auto_return": False}, "num_steps": 30, **fields}
        world = make_world(*faults, chain=parse_chain(chain), **fields)
        planner = world.state.planner
        job = replace(planner.job, rule=rule, cap=cap)
        world.state = replace(world.state, planner=replace(planner, job=job))
        return world

    return make


@pytest.mark.parametrize(
    ("rule", "cap", "wanted"),
    [(BatchRule.CONSTANT, None, [5, 3]), (BatchRule.CAPPED, 6, [5, 3]), (BatchRule.FLEXIBLE, None, [4, 2])],
)
def test_shares_after_a_loss(ruled: Callable[..., World], rule: BatchRule, cap: int | None, wanted: list[int]) -> None:
    """Catches a rule that the simulator knows and the live job does not follow."""
    world = ruled(rule, LOSS, cap=cap)
    assert world.run().text is None
    assert shares(world) == wanted


def test_below_the_target_everybody_waits_and_goes_on_when_a_device_is_back(ruled: Callable[..., World]) -> None:
    """Catches steps below the target, a pause that does not end, and a step that is lost in it."""
    world = ruled(BatchRule.CAPPED, LOSS)
    world.run_until(lambda: is_paused(world))
    committed, began = world.state.committed, world.now
    world.run_until(lambda: world.now > began + 20)
    assert is_paused(world)
    assert world.state.committed == committed
    assert str(waits(world.state, world.now)).startswith("paused at step 10 until a device is back")
    assert any("6 of 8 sequences" in say.text for say in of(world, Say))
    world.happen(Asked("return", "1:2"))
    assert world.run().text is None
    assert shares(world) == [4, 4]
    assert of(world, Grew) == [], "nobody trains, so that it need not be fed beside training"
    (closed,) = of(world, Closed)
    assert (closed.incident.strategy, closed.incident.phases_s["pause"] >= 20) == ("ntp", True)
    assert sorted(world.launcher.uses) == list(range(30))
    assert all(len(plans) == 1 for plans in world.launcher.uses.values())


def test_a_spare_spares_the_pause(ruled: Callable[..., World]) -> None:
    """Catches a pause although a warm device stands by."""
    world = ruled(BatchRule.CAPPED, LOSS, chain="spare,ntp", spares=("s0",))
    assert world.run().text is None
    assert not any("pauses" in say.text for say in of(world, Say))
    assert shares(world) == [4, 4]


def test_a_spare_that_is_late_ends_the_pause(ruled: Callable[..., World]) -> None:
    """Catches a job that waits for the lost device although a spare has become ready."""
    world = ruled(BatchRule.CAPPED, Fault("kill", "1:2", "forward", 1), chain="spare,ntp", spares=("s0",))
    assert world.run().text is None
    assert any("pauses" in say.text for say in of(world, Say))
    assert world.state.plan is not None
    assert world.state.plan.device((1, 2)) == "s0"


def test_losses_in_a_pause_are_no_failures_in_a_row(ruled: Callable[..., World]) -> None:
    """Catches a job that gives up in a long pause because devices fail one after the other."""
    world = ruled(BatchRule.CAPPED, LOSS)
    world.run_until(lambda: is_paused(world))
    gone = ("0:0", "1:3", "0:1")  # nobody whose units no other device holds
    for name in gone:
        world.launcher.workers[name].die(-9)
        world.run_until(lambda name=name: world.state.devices[name].standing is Standing.LOST)
        world.run_until(lambda: is_paused(world))
    for name in (*gone, "1:2"):
        world.happen(Asked("return", name))
    assert world.run().text is None
    assert shares(world) == [4, 4]


def test_a_stop_in_a_pause_saves_without_a_step(ruled: Callable[..., World]) -> None:
    """Catches a Ctrl-C that waits for a device that does not come, or that does a step below the target."""
    world = ruled(BatchRule.CAPPED, LOSS)
    world.run_until(lambda: is_paused(world))
    committed = world.state.committed
    world.happen(StopAsked())
    assert world.run().text is None
    assert (world.state.stopped, world.state.committed) == (True, committed)
    order = [a.order for a in of(world, Send) if isinstance(a.order, orders.PlanOrder)][-1]
    assert order.resume.stop
    assert of(world, Finish)[0].text is None


def test_nobody_leaves_where_training_would_pause(ruled: Callable[..., World]) -> None:
    """Catches an orderly leave that stops the job without a word."""
    world = ruled(BatchRule.CAPPED)
    world.run_until(lambda: world.state.committed == 5)
    world.happen(Asked("drain", "1:2"))
    assert "training would pause" in of(world, Reply)[-1].text
    assert world.run().text is None
    assert shares(world) == [4, 4]


def test_a_pause_is_booked_as_one(ruled: Callable[..., World]) -> None:
    """Catches paused device-seconds that count as work or as re-forming."""
    world, meter = ruled(BatchRule.CAPPED, LOSS), Meter(8)
    world.run_until(lambda: is_paused(world))
    meter._ran = True
    meter.advance(world.state, 1.0)
    booked = {category: seconds for category, seconds in meter.ledger.device_s.items() if seconds}
    assert booked == {Category.PAUSE: 7.0, Category.FAILED: 1.0}
