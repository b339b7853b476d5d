"""`restart`: all stop, full replicas of live devices start again from the newest checkpoint, and work is done again."""

from collections.abc import Callable
from typing import Any

import pytest

from runflat.cluster.ledger import Category
from runflat.elastic import orders
from runflat.elastic.actions import Action, Asked, Closed, Heard, Planned, Published, Send, Start
from runflat.elastic.device import Standing
from runflat.elastic.fake_launcher import Fault
from runflat.elastic.fake_world import World
from runflat.elastic.messages import Exited, MemoryCopy, Message, Status
from runflat.elastic.meter import Meter
from runflat.elastic.protocol import decide
from runflat.elastic.state import Stage, State
from runflat.plan.strategies import Strategy, parse_chain


def of(world: World, kind: type) -> list[Any]:
    return [action for _, action in world.actions if isinstance(action, kind)]


def replicas(world: World) -> list[int]:
    assert world.state.plan is not None
    return [replica.replica for replica in world.state.plan.replicas]


def incarnations(world: World) -> dict[str, int]:
    return {device.name: device.incarnation for device in world.state.devices.values()}


@pytest.fixture
def job(make_world: Callable[..., World]) -> Callable[..., World]:
    """Returns a maker of jobs of three replicas of two, at step 6, with a checkpoint of step 4 where `saved`."""

    def make(*faults: Fault, chain: str = "restart", saved: bool = True, **fields: Any) -> World:
        fields = {"tp": 2, "replicas": 3, "num_sequences": 6, "limits": {"auto_return": False}, **fields}
        world = make_world(*faults, chain=parse_chain(chain), num_steps=20, **fields)
        world.run_until(lambda: world.state.committed == 6)
        if saved:
            world.happen(Published(4, "four"))
        return world

    return make


def test_all_processes_end_and_full_replicas_start_again_from_disk(job: Callable[..., World]) -> None:
    """Catches a restart in which old processes go on, a hit replica takes part, or no step is done again."""
    world = job()
    world.launcher.workers["1:0"].die(-9)
    assert world.run().text is None
    assert replicas(world) == [0, 2]
    assert incarnations(world) == {"0:0": 1, "0:1": 1, "1:0": 0, "1:1": 0, "2:0": 1, "2:1": 1}
    assert world.state.devices["1:1"].standing is Standing.PARKED
    resume = of(world, Planned)[-1].resume
    assert (resume.action, resume.committed, resume.checkpoint) == ("checkpoint", 4, "four")
    incident = of(world, Closed)[0].incident
    assert incident.strategy == "restart"
    assert incident.phases_s["restart"] > 0.3
    assert incident.replayed_steps >= 2
    twice = [step for step, plans in world.launcher.uses.items() if len(plans) > 1]
    assert twice == [4, 5], "the steps since the checkpoint, no others"
    assert sorted(world.launcher.uses) == list(range(20))


def test_no_process_starts_before_the_old_one_has_ended(job: Callable[..., World]) -> None:
    """Catches two processes that share the memory of one device."""
    world = job()
    world.launcher.workers["1:0"].die(-9)
    world.run_until(lambda: any(isinstance(a, Send) and isinstance(a.order, orders.Exit) for _, a in world.actions))
    assert not any(start.incarnation for start in of(world, Start))
    assert world.state.stage is Stage.START


def test_what_has_returned_joins_at_the_next_restart(job: Callable[..., World]) -> None:
    """Catches a replica that walks in on a job that started without it, or that never comes back."""
    world = job()
    world.launcher.workers["1:0"].die(-9)
    world.run_until(lambda: bool(of(world, Closed)))
    world.happen(Asked("return", "1:0"))
    world.run_until(lambda: world.state.devices["1:0"].standing is Standing.STANDBY)
    world.run_until(lambda: world.state.committed >= 12)
    assert replicas(world) == [0, 2]
    world.launcher.workers["0:1"].die(-9)
    assert world.run().text is None
    assert replicas(world) == [1, 2]
    assert incarnations(world)["1:1"] == 1, "it was parked, and is started with the others"


def test_without_a_checkpoint_the_chain_goes_on_and_says_so(job: Callable[..., World]) -> None:
    """Catches a job that starts afresh in silence, or waits for a checkpoint that does not exist."""
    world = job(chain="restart,ntp", saved=False)
    world.launcher.workers["1:0"].die(-9)
    assert world.run().text is None
    incident = of(world, Closed)[0].incident
    assert (incident.strategy, incident.words) == ("ntp", ("replica 1: restart: there is no checkpoint",))
    assert set(incarnations(world).values()) == {0}


def test_without_a_full_replica_the_job_stops_and_says_so(job: Callable[..., World]) -> None:
    """Catches a restart with half a replica."""
    world = job(replicas=1, num_sequences=2)
    world.launcher.workers["0:1"].die(-9)
    text = str(world.run().text)
    assert "replica 0: restart: no full replica is left to start again" in text
    assert "--resume" in text


@pytest.mark.parametrize(
    ("device", "phase"), [("0:0", "selftest"), ("0:0", "barrier"), ("2:1", "form"), ("0:1", "transfer")]
)
def test_a_second_loss_during_the_restart_leaves_full_replicas_only(
    job: Callable[..., World], device: str, phase: str
) -> None:
    """Catches a restart that waits for ever for a device that has died in it, or that goes on with half a replica."""
    world = job(Fault("kill", device, phase, nth=2))
    world.launcher.workers["1:0"].die(-9)
    assert world.run().text is None
    assert [fault.device for fault in world.launcher.struck] == [device]
    assert replicas(world) == [2 if device.startswith("0") else 0]
    assert sorted(world.launcher.uses) == list(range(20))


def test_a_process_that_does_not_end_is_killed(job: Callable[..., World]) -> None:
    """Catches a restart that waits for ever for a process that hangs in its end."""
    world = job()
    deaf = world.launcher.workers["0:0"]
    world.launcher.workers["1:0"].die(-9)
    world.run_until(lambda: world.state.stage is Stage.START)
    deaf.stopped = True
    assert world.run().text is None
    assert replicas(world) == [0, 2]


def answers(state: State, lost: str, memory: Callable[[str], tuple[MemoryCopy, ...]]) -> list[tuple[str, Message]]:
    """The end of one device and the statuses of all others."""
    said: list[tuple[str, Message]] = [(lost, Exited(incarnation=0, code=-9))]
    for name in (n for n in state.devices if n != lost):
        fields = {"generation": 1, "committed": 6, "complete": False, "holds": 0, "memory": memory(name)}
        said.append((name, Status(incarnation=0, **fields)))
    return said


def test_from_memory_the_processes_stay_and_fewer_steps_are_done_again(job: Callable[..., World]) -> None:
    """Catches a restart that throws away the copies by ending the processes that have them."""
    world = job()
    state, done = world.state, list[Action]()
    copies = {name: (MemoryCopy(device=name, step=5, generation=0),) for name in state.devices}
    for name, message in answers(state, "1:0", copies.__getitem__):
        state, actions = decide(state, Heard(name, message), world.now)
        done += actions
    (planned,) = [action for action in done if isinstance(action, Planned)]
    assert (planned.resume.action, planned.resume.committed) == ("memory", 5)
    assert [replica.replica for replica in planned.plan.replicas] == [0, 2]
    assert [a.device for a in done if isinstance(a, Send) and isinstance(a.order, orders.Exit)] == ["1:1"]
    assert state.disturbance is not None
    assert state.disturbance.strategy == Strategy.RESTART.value


def test_the_start_of_the_processes_is_booked_as_restart(job: Callable[..., World]) -> None:
    """Catches a restart whose cost is hidden among failed, idle or re-forming devices."""
    world, meter = job(), Meter(6)
    world.launcher.workers["1:0"].die(-9)
    world.run_until(lambda: world.state.stage is Stage.START)
    meter._ran = True
    meter.advance(world.state, 1.0)
    booked = {category: seconds for category, seconds in meter.ledger.device_s.items() if seconds}
    assert booked == {Category.RESTART: 4.0, Category.FAILED: 1.0, Category.IDLE: 1.0}
