"""Joining and leaving at a step boundary, back-off, and what a person may ask for."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from runflat.cluster.events import EventKind
from runflat.elastic import messages, orders
from runflat.elastic.actions import Asked, Closed, Grew, Heard, Note, Reply, Say, Send, Start, StopAsked
from runflat.elastic.device import Standing
from runflat.elastic.fake_launcher import Fault
from runflat.elastic.fake_world import World
from runflat.elastic.state import GrowthStage
from runflat.plan.strategies import Strategy

LOSS = Fault("kill", "1:2", "forward", 3)


def of(world: World, kind: type) -> list[Any]:
    return [action for _, action in world.actions if isinstance(action, kind)]


def sent(world: World, kind: type) -> list[tuple[str, Any]]:
    """(device, order) of all orders of one kind."""
    return [(action.device, action.order) for action in of(world, Send) if isinstance(action.order, kind)]


def ask(world: World, action: Any, device: str) -> Reply:
    """Asks for something now; returns the answer."""
    world.happen(Asked(action, device, "request"))
    reply = of(world, Reply)[-1]
    assert isinstance(reply, Reply)
    return reply


def degrees(world: World) -> list[int]:
    assert world.state.plan is not None
    return [replica.tp for replica in world.state.plan.replicas]


def test_a_device_that_comes_back_is_fed_and_takes_back_its_units(make_world: Callable[..., World]) -> None:
    """Catches a return that stops training, feeds from far away, or leaves the assignment as it was."""
    world = make_world(LOSS)
    assert world.run().text is None
    kinds = (orders.Receive, orders.Feed, orders.Prepare, orders.Switch)
    order = [type(action.order) for action in of(world, Send) if isinstance(action.order, kinds)]
    assert [kind for kind, after in pairwise([*order, None]) if kind is not after] == list(kinds)
    assert {device for device, _ in sent(world, orders.Feed)} == {"1:0", "1:1", "1:3"}
    assert len(sent(world, orders.Abort)) == 7, "one abort for the loss, none for the return"
    (grew,) = of(world, Grew)
    assert (grew.growth.joining, degrees(world)) == (("1:2",), [4, 4])
    assert dict(grew.growth.marks).keys() == {"listen", "feed", "prepare", "switch"}


def test_what_was_said_of_a_change_that_was_given_up_counts_no_more(make_world: Callable[..., World]) -> None:
    """Catches sources that feed to where nobody listens any more, so that a newcomer waits for ten time-outs."""
    world = make_world(LOSS, Fault("kill", "0:1", "forward", 3), num_steps=80)
    world.run_until(lambda: world.state.growth is not None and len(world.state.growth.joining) == 2)
    given_up = world.state.growth
    assert given_up is not None
    number = world.state.devices["0:1"].incarnation
    world.launcher.workers["0:1"].alive = False
    world.happen(Heard("0:1", messages.Exited(incarnation=number, code=-9)))
    growth = world.state.growth
    assert growth is not None
    assert growth.joining == ("1:2",)
    said = {"incarnation": world.state.devices["1:2"].incarnation, "generation": given_up.generation}
    world.happen(Heard("1:2", messages.Listening(**said, address=("127.0.0.1", 1))))
    assert world.state.growth == growth
    world.run_until(lambda: world.state.growth is not None and world.state.growth.stage is GrowthStage.FEED)
    growth = world.state.growth
    world.happen(Heard("1:2", messages.Fed(**said, committed=3)))
    world.happen(Heard("1:0", messages.Behind(incarnation=0, generation=given_up.generation, target="1:2")))
    assert world.state.growth == growth
    assert world.run().text is None
    assert degrees(world) == [4, 4]


def test_a_feed_that_fails_is_given_up_and_begun_again(make_world: Callable[..., World]) -> None:
    """Catches a newcomer that waits for a feed that has ended, until ten time-outs are over."""
    world = make_world(LOSS)
    world.run_until(lambda: world.state.growth is not None and world.state.growth.stage is GrowthStage.FEED)
    growth = world.state.growth
    assert growth is not None
    world.happen(Heard("1:0", messages.FormFail(incarnation=0, generation=growth.generation, text="connection reset")))
    assert ("1:2", orders.Unprepare(generation=growth.generation)) in sent(world, orders.Unprepare)
    assert ("1:0", orders.Unfeed(target="1:2")) in sent(world, orders.Unfeed)
    assert world.run().text is None
    assert (degrees(world), len(sent(world, orders.Receive))) == ([4, 4], 2)


@pytest.mark.parametrize("phase", ["selftest", "copy", "join"])
def test_a_newcomer_that_dies_costs_no_step(make_world: Callable[..., World], phase: str) -> None:
    """Catches survivors that leave their generation because a device that was not yet in it is gone."""
    world = make_world(LOSS, Fault("kill", "1:2", phase, 3, nth=2 if phase == "selftest" else 1))
    assert world.run().text is None
    assert len(world.launcher.struck) == 2
    assert len(sent(world, orders.Abort)) == 7
    assert [start.incarnation for start in of(world, Start) if start.device == "1:2"] == [0, 1, 2]


def test_a_loss_during_a_return_is_handled_first_and_the_newcomer_is_fed_again(
    make_world: Callable[..., World],
) -> None:
    """Catches a newcomer that is forgotten, or that joins with the units of a plan that never came about."""
    world = make_world(LOSS)
    world.run_until(lambda: world.state.growth is not None and world.state.growth.stage.value == "feed")
    world.launcher.workers["0:1"].die(-9)
    world.run_until(lambda: bool(of(world, Grew)))
    generations = [order.generation for device, order in sent(world, orders.Receive) if device == "1:2"]
    assert len(generations) == 2
    assert generations[0] < generations[1]
    world.run()
    assert degrees(world) == [4, 4]


def test_repeated_failures_double_the_waiting_time_until_the_device_stays_out(make_world: Callable[..., World]) -> None:
    """Catches a dead GPU whose worker is started again and again for ever."""
    world = make_world(LOSS, *(Fault("kill", "1:2", "selftest", nth=n) for n in range(2, 9)), num_steps=100)
    assert world.run().text is None
    starts = [at for at, action in world.actions if isinstance(action, Start) and action.device == "1:2"]
    lived_s = 0.3
    waited = [round(after - before - lived_s, 1) for before, after in pairwise(starts[1:])]
    assert waited == pytest.approx([0.2, 0.4, 0.8], abs=0.3)
    assert world.state.devices["1:2"].standing is Standing.OUT
    assert degrees(world) == [4, 3]


def test_a_person_brings_back_what_stays_out(make_world: Callable[..., World]) -> None:
    """Catches a back-off that no word of a person ends."""
    world = make_world(LOSS, limits={"max_losses": 1}, num_steps=60)
    world.run_until(lambda: world.state.devices["1:2"].standing is Standing.OUT)
    assert ask(world, "return", "1:2").ok
    world.run()
    assert degrees(world) == [4, 4]
    assert (world.state.devices["1:2"].failures, world.state.devices["1:2"].num_losses) == (0, 1)


def test_what_a_person_kills_stays_away(make_world: Callable[..., World]) -> None:
    """Catches a device that is back a second after somebody killed it to work on it."""
    world = make_world(num_steps=60)
    world.run_until(lambda: world.state.committed == 5)
    assert ask(world, "kill", "1:2").ok
    assert world.run().text is None
    assert degrees(world) == [4, 3]


def test_an_orderly_leave_takes_no_abort_and_loses_no_step(make_world: Callable[..., World]) -> None:
    """Catches a drain that is a kill by another name."""
    world = make_world()
    world.run_until(lambda: world.state.committed == 5)
    assert ask(world, "drain", "1:2").ok
    assert world.run().text is None
    assert sent(world, orders.Abort) == []
    assert [device for device, _ in sent(world, orders.Exit)][0] == "1:2"
    assert world.state.devices["1:2"].standing is Standing.PARKED
    switch = sent(world, orders.Switch)[0][1]
    assert {move.source for move in switch.transfers} == {"0:2"}, "what it held comes from who stays"
    assert all(len(plans) == 1 for plans in world.launcher.uses.values())


def test_a_leave_whose_groups_do_not_form_goes_by_way_of_an_abort(make_world: Callable[..., World]) -> None:
    """Catches a drain that is given up because the quiet way failed."""
    world = make_world(Fault("formfail", "0:0", "join"))
    world.run_until(lambda: world.state.committed == 5)
    ask(world, "drain", "1:2")
    assert world.run().text is None
    assert sent(world, orders.Abort)
    assert degrees(world) == [4, 3]
    assert world.state.devices["1:2"].standing is Standing.PARKED


def test_a_replica_that_left_comes_back_whole(make_world: Callable[..., World]) -> None:
    """Catches healthy devices that stay parked although the one that they lacked is back."""
    lowmem = Fault("lowmem", "1:0", "barrier", 3)
    world = make_world(LOSS, lowmem, limits={"auto_return": False}, num_steps=80)
    world.run_until(lambda: degrees(world) == [4] if world.state.plan else False)
    parked = [name for name, device in world.state.devices.items() if device.standing is Standing.PARKED]
    assert parked == ["1:0", "1:1", "1:3"]
    world.run_until(lambda: world.state.stage.value == "run")
    assert ask(world, "return", "1:2").ok
    assert world.run().text is None
    assert degrees(world) == [4, 4]
    assert len(of(world, Grew)) == 1, "all four join in one change"


def test_a_warm_spare_takes_the_dead_slot(make_world: Callable[..., World]) -> None:
    """Catches a chain that begins with a spare and shrinks all the same."""
    chain = (Strategy.SPARE, Strategy.NTP)
    loss = Fault("kill", "1:2", "forward", 15)
    world = make_world(loss, chain=chain, spares=("s0",), limits={"auto_return": False})
    assert world.run().text is None
    assert degrees(world) == [4, 4]
    assert world.state.plan is not None
    assert world.state.plan.device((1, 2)) == "s0"


def test_a_stop_reaches_all_and_survives_a_fault(make_world: Callable[..., World]) -> None:
    """Catches a Ctrl-C that is forgotten because a device died at the same moment."""
    world = make_world()
    world.run_until(lambda: world.state.committed == 5)
    world.launcher.workers["1:2"].die(-9)
    world.happen(StopAsked())
    assert world.run().text is None
    assert world.state.stopped
    assert world.state.committed < world.launcher.num_steps


def test_who_a_script_strikes_comes_back_when_the_script_says_so_each_time(make_world: Callable[..., World]) -> None:
    """Catches a device that, once returned, comes back by itself after the next kill."""
    world = make_world(scripted=("1:2",), num_steps=400)
    for _ in range(2):
        world.run_until(lambda: world.state.devices["1:2"].standing is Standing.ACTIVE)
        world.launcher.workers["1:2"].die(-9)
        world.run_until(lambda: world.state.devices["1:2"].standing is Standing.LOST)
        assert world.state.devices["1:2"].restart_at is None
        assert ask(world, "return", "1:2").ok


def test_a_stop_during_a_switch_reaches_newcomers_too(make_world: Callable[..., World]) -> None:
    """Catches members that stop at the boundary at which a newcomer joins, which then trains on alone."""
    world = make_world(LOSS)
    world.run_until(lambda: world.state.growth is not None and world.state.growth.stage is GrowthStage.SWITCH)
    world.happen(StopAsked())
    assert sent(world, orders.Stop) == []
    assert world.run().text is None
    assert {device for device, _ in sent(world, orders.Stop)} == set(world.state.members())
    assert "1:2" in world.state.members()


def test_an_incident_is_closed_by_the_first_commit_with_all_its_phases(make_world: Callable[..., World]) -> None:
    """Catches a timeline with a hole: the phases must add up to the time from fault to training."""
    world = make_world()
    world.run_until(lambda: world.state.committed == 5)
    began = world.now
    world.launcher.workers["1:2"].die(-9)
    world.run_until(lambda: any(isinstance(action, Closed) for _, action in world.actions))
    closed = next(action for _, action in world.actions if isinstance(action, Closed))
    assert list(closed.incident.phases_s) == ["detect", "abort", "barrier", "form", "transfer", "digest"]
    assert closed.first_commit_s is not None
    total = closed.incident.stopped_s + closed.first_commit_s
    assert total == pytest.approx(world.now - began, abs=0.003)
    assert closed.devices == ("1:2",)


@pytest.mark.parametrize(
    ("action", "device", "ok", "text"),
    [
        ("drain", "9:9", False, "the devices are 0:0"),
        ("return", "1:2", False, "is active"),
        ("kill", "1:2", True, "until it is asked to return"),
        ("drain", "1:2", True, "next step boundary"),
    ],
)
def test_wishes_are_answered(make_world: Callable[..., World], action: Any, device: str, ok: bool, text: str) -> None:
    """Catches a wish that is granted in silence, or refused without a reason."""
    world = make_world()
    world.run_until(lambda: world.state.committed == 5)
    reply = ask(world, action, device)
    assert reply.ok is ok
    assert text in reply.text


def test_the_only_holder_may_not_leave(make_world: Callable[..., World]) -> None:
    """Catches an orderly leave that loses state."""
    world = make_world(replicas=1)
    world.run_until(lambda: world.state.committed == 3)
    reply = ask(world, "drain", "0:1")
    assert not reply.ok
    assert "no other device holds" in reply.text


def shares(world: World) -> list[int]:
    assert world.state.plan is not None
    return [replica.num_sequences for replica in world.state.plan.replicas]


def test_a_slow_replica_gets_fewer_sequences_and_its_device_is_named(make_world: Callable[..., World]) -> None:
    """Catches a job that waits for one slow device in every step, or that throws it out unasked."""
    world = make_world(num_steps=80)
    world.run_until(lambda: world.state.committed == 5)
    world.launcher.slow["1:2"] = 3.0
    world.run_until(lambda: shares(world) != [4, 4])
    assert shares(world) == [6, 2]
    assert any("replica 1" in line.text and "1:2" in line.text for line in of(world, Say))
    del world.launcher.slow["1:2"]
    assert world.run().text is None
    assert shares(world) == [4, 4]
    assert sent(world, orders.Abort) == []
    found, over = (note.event for note in of(world, Note) if note.event.event is EventKind.SLOW)
    assert (found.device, found.factor, over.device, over.factor) == ("1:2", pytest.approx(3.0), "1:2", 1.0)
    assert found.step is not None
    assert "fewer sequences" in str(found.detail)


def test_a_slow_device_leaves_if_that_was_asked_for(make_world: Callable[..., World]) -> None:
    """Catches a device that is drained and whose replica gets fewer sequences all the same, or its peer drained."""
    world = make_world(num_steps=80, limits={"drain_slow": True})
    world.launcher.slow["1:2"] = 3.0
    world.run_until(lambda: bool(world.state.standing(Standing.PARKED)))
    assert world.state.standing(Standing.PARKED) == ("1:2",)
    assert [replica.tp for replica in world.state.plan.replicas] == [4, 3]
    assert shares(world) == [5, 3]
    assert any("waits least for the others): the device leaves" in line.text for line in of(world, Say))
    assert sent(world, orders.Abort) == []


def reached(world: World, step: int) -> bool:
    return world.state.committed >= step


def test_noise_changes_no_shares(make_world: Callable[..., World]) -> None:
    """Catches shares that follow every hiccup: each change costs a formation."""
    world = make_world(num_steps=80)
    for step in range(80):
        world.run_until(partial(reached, world, step))
        world.launcher.slow["1:0"] = 1.0 if step % 10 == 0 else 1.7
    assert world.run().text is None
    assert of(world, Grew) == []
