"""The protocol as a table: in this state, at this happening, these actions."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from runflat.elastic import messages, orders
from runflat.elastic.actions import (
    Action,
    Begin,
    Finish,
    Happening,
    Heard,
    Kill,
    Planned,
    Published,
    Send,
    Start,
    Tick,
)
from runflat.elastic.device import Standing
from runflat.elastic.fake_launcher import Fault
from runflat.elastic.fake_world import World
from runflat.elastic.protocol import decide
from runflat.elastic.state import Stage, State

Actions = tuple[Action, ...]
ALL = {"0:0", "0:1", "0:2", "0:3", "1:0", "1:1", "1:2", "1:3"}


def sent(actions: Actions, kind: type) -> dict[str, Any]:
    """Orders of one kind, by device."""
    return {
        action.device: action.order for action in actions if isinstance(action, Send) and isinstance(action.order, kind)
    }


def of(actions: Actions, kind: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def said(device: str, kind: Callable[..., messages.Message], **fields: Any) -> Heard:
    return Heard(device, kind(incarnation=0, **fields))


def suspect(device: str) -> Heard:
    return said(device, messages.Suspect, generation=0, phase="sync", text="closed")


def status(device: str, generation: int, committed: int, complete: bool = False, **fields: Any) -> Heard:
    fields = {"holds": 0, **fields}
    return said(device, messages.Status, generation=generation, committed=committed, complete=complete, **fields)


def killed(device: str, code: int = -9) -> Heard:
    return said(device, messages.Exited, code=code)


@dataclass
class Job:
    """A protocol to which things happen; keeps the last actions."""

    state: State
    now: float
    actions: Actions = ()

    def hear(self, *happenings: Happening, after_s: float = 0.0) -> Actions:
        """Let things happen, one after the other; returns all that is to be done."""
        self.now += after_s
        done: list[Action] = []
        for happening in happenings:
            self.state, actions = decide(self.state, happening, self.now)
            done += actions
        self.actions = tuple(done)
        return self.actions

    def beat(self, seconds: float, silent: frozenset[str] = frozenset(), **waits: str) -> None:
        """Heartbeats and ticks for a while. `waits`: what everybody waits for, but for the `silent`."""
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            for name in sorted(ALL - silent):
                fields = {"generation": 0, "committed": self.state.committed, "phase": "sync"}
                self.hear(said(name, messages.Heartbeat, since_s=1.0 if waits else 0.0, **fields, **waits))
            self.hear(Tick())


@pytest.fixture
def job(make_world: Callable[..., World]) -> Job:
    """Training, some steps done, nothing wrong."""
    world = make_world()
    world.run_until(lambda: world.state.committed == 5)
    return Job(world.state, world.now)


def all_statuses(job: Job, lost: str, **fields: Any) -> Actions:
    done: list[Action] = []
    for name in sorted(ALL - {lost}):
        done += job.hear(status(name, job.state.generation, job.state.committed, **fields))
    return tuple(done)


def test_at_the_start_every_device_is_started(make_world: Callable[..., World]) -> None:
    """Catches a device that is forgotten, and one that is dead from the start and started all the same."""
    job = Job(make_world(dead=("1:2",)).state, 0.0)
    assert {action.device for action in of(job.hear(Begin()), Start)} == ALL - {"1:2"}


def test_when_all_have_said_hello_they_get_the_first_plan(make_world: Callable[..., World]) -> None:
    """Catches a plan that is sent while somebody is still missing, or that does not say `start`."""
    job = Job(make_world().state, 0.0)
    job.hear(Begin())
    for name in sorted(ALL)[:-1]:
        assert not sent(job.hear(said(name, messages.Hello, pid=1)), orders.PlanOrder)
    plans = sent(job.hear(said("1:3", messages.Hello, pid=1)), orders.PlanOrder)
    assert plans.keys() == ALL
    assert {order.resume.action for order in plans.values()} == {"start"}


def test_an_exit_makes_all_others_leave_the_generation_at_once(job: Job) -> None:
    """Catches survivors that wait out a time-out for a device that is known to be gone."""
    actions = job.hear(killed("1:2"))
    assert sent(actions, orders.Abort).keys() == ALL - {"1:2"}
    assert {order.generation for order in sent(actions, orders.Abort).values()} == {1}
    assert job.state.devices["1:2"].standing is Standing.LOST


def test_when_all_statuses_are_in_the_survivors_get_the_next_plan(job: Job) -> None:
    """Catches a plan without the transfers of the lost units, or one that still has the lost device."""
    job.hear(killed("1:2"))
    plans = sent(all_statuses(job, "1:2"), orders.PlanOrder)
    assert plans.keys() == ALL - {"1:2"}
    resume = plans["0:0"].resume
    assert (resume.action, resume.committed) == ("discard", job.state.committed)
    assert {move.source for move in resume.transfers} == {"0:2"}
    assert sum(move.stop - move.start for move in resume.transfers if move.kind == "head") == 2


def test_a_step_that_one_device_has_committed_is_applied_by_all(job: Job) -> None:
    """Catches a step that is half applied: one device has it, the others run it again."""
    job.hear(killed("1:2"))
    names = sorted(ALL - {"1:2"})
    job.hear(status(names[0], 1, 6, scalars=(3.0,)))
    for name in names[1:]:
        job.hear(status(name, 1, 5, complete=True))
    (planned,) = of(job.actions, Planned)
    assert (planned.resume.action, planned.resume.committed, planned.resume.scalars) == ("forward", 6, (3.0,))


def test_a_commit_counts_also_when_its_sender_has_died_since(job: Job) -> None:
    """Catches a committed step that is lost with the only device that has it."""
    job.hear(said("1:0", messages.Commit, generation=0, step=5, scalars=(7.0,)), killed("1:0"))
    for name in sorted(ALL - {"1:0"}):
        job.hear(status(name, 1, 5, complete=True))
    (planned,) = of(job.actions, Planned)
    assert (planned.resume.action, planned.resume.committed, planned.resume.scalars) == ("forward", 6, (7.0,))


def test_who_cannot_roll_forward_takes_all_back_to_the_checkpoint(job: Job) -> None:
    """Catches a device that goes on one step behind the others."""
    job.hear(Published(4, "four"), killed("1:2"))
    names = sorted(ALL - {"1:2"})
    job.hear(status(names[0], 1, 6, scalars=(3.0,)))
    for name in names[1:]:
        job.hear(status(name, 1, 5, complete=name != "0:1"))
    (planned,) = of(job.actions, Planned)
    assert (planned.resume.action, planned.resume.committed, planned.resume.checkpoint) == ("checkpoint", 4, "four")


def copies(steps: dict[str, int], device: str) -> tuple[messages.MemoryCopy, ...]:
    """Each device has its own copy, and that of the same slot of the other replica."""
    other = f"{1 - int(device[0])}{device[1:]}"
    return tuple(messages.MemoryCopy(device=d, step=steps.get(d, 4), generation=0) for d in (device, other))


def test_units_without_a_holder_come_from_copies_in_memory(job: Job) -> None:
    """Catches a job that reads an old checkpoint while a whole newer copy is in memory."""
    job.hear(Published(3, "three"), killed("1:2"), killed("0:2"))
    for name in sorted(ALL - {"1:2", "0:2"}):
        others = tuple(messages.MemoryCopy(device=d, step=4, generation=0) for d in (name, "1:2"))
        job.hear(status(name, 1, 5, memory=others if name == "1:3" else copies({}, name)))
    (planned,) = of(job.actions, Planned)
    assert (planned.resume.action, planned.resume.committed) == ("memory", 4)
    assert {move.source for move in planned.resume.transfers} == {"1:3"}


def test_copies_in_memory_of_different_steps_do_not_count(job: Job) -> None:
    """Catches a state that is put together from two steps."""
    job.hear(Published(3, "three"), killed("1:2"), killed("0:2"))
    for name in sorted(ALL - {"1:2", "0:2"}):
        others = (messages.MemoryCopy(device=name, step=4, generation=0),)
        if name == "1:3":
            others += (messages.MemoryCopy(device="1:2", step=3, generation=0),)
        job.hear(status(name, 1, 5, memory=others))
    (planned,) = of(job.actions, Planned)
    assert (planned.resume.action, planned.resume.committed) == ("checkpoint", 3)


def test_without_holder_copy_and_checkpoint_the_run_stops_and_says_so(job: Job) -> None:
    """Catches a run that goes on with units that nobody has."""
    job.hear(killed("1:2"), killed("0:2"))
    for name in sorted(ALL - {"1:2", "0:2"}):
        job.hear(status(name, 1, 5))
    (finish,) = of(job.actions, Finish)
    assert "a lost unit has no live holder" in finish.text
    assert "no checkpoint" in finish.text
    assert sent(job.actions, orders.Exit).keys() == ALL - {"1:2", "0:2"}


def test_a_replica_without_devices_leaves_and_the_others_take_its_sequences(job: Job) -> None:
    """Catches a batch that shrinks when a replica is gone."""
    job.hear(*(killed(f"1:{slot}") for slot in range(4)))
    for slot in range(4):
        job.hear(status(f"0:{slot}", 1, 5))
    (planned,) = of(job.actions, Planned)
    assert [(r.replica, r.num_sequences) for r in planned.plan.replicas] == [(0, 8)]


def test_a_degree_that_does_not_fit_is_not_adopted(job: Job) -> None:
    """Catches survivors that run out of memory, and a chain whose next link is never tried."""
    job.hear(killed("1:2"))
    all_statuses(job, "1:2")
    actions = job.hear(said("1:0", messages.LowMem, generation=1, need_bytes=2, free_bytes=1))
    assert sent(actions, orders.Abort).keys() == ALL - {"1:2"}
    plans = sent(all_statuses(job, "1:2"), orders.PlanOrder)
    assert plans.keys() == {"0:0", "0:1", "0:2", "0:3"}
    assert sent(job.actions, orders.Exit).keys() == {"1:0", "1:1", "1:3"}
    assert job.state.devices["1:0"].standing is Standing.PARKED
    assert any("does not fit" in word for word in job.state.disturbance.words) if job.state.disturbance else False


def test_a_python_error_stops_the_job_with_its_traceback(job: Job) -> None:
    """Catches a bad sample that kills one survivor after the other."""
    fields = {"cause": "other", "class_name": "ValueError", "text": "ValueError: x", "traceback": "Traceback ..."}
    (finish,) = of(job.hear(said("1:2", messages.Failed, **fields)), Finish)
    assert "1:2" in finish.text
    assert "Traceback ..." in finish.traceback
    assert sent(job.actions, orders.Exit).keys() == ALL


def test_a_broken_device_is_lost_and_comes_back_once_it_works(job: Job) -> None:
    """Catches an uncorrectable error of one GPU that stops the whole job, as a bug in Python would (pytorch#126544)."""
    fields = {"cause": "device", "class_name": "AcceleratorError", "text": "ECC error", "traceback": "Traceback ..."}
    assert not of(job.hear(said("1:2", messages.Failed, **fields)), Finish)
    job.hear(said("1:2", messages.Exited, code=1))
    device = job.state.devices["1:2"]
    assert (device.standing, device.cause, device.failures) == (Standing.LOST, "ECC error", 1)
    assert device.restart_at is not None
    assert job.state.stage is Stage.ABORT


def test_three_failures_without_a_commit_stop_the_job(job: Job) -> None:
    """Catches a bug that looks like one dead device after the other until none is left."""
    for lost in ("1:2", "1:3", "1:1"):
        actions = job.hear(killed(lost), after_s=1.0)
        live = [name for name in job.state.live()]
        for name in live:
            job.hear(status(name, job.state.generation, 5))
    (finish,) = of(actions, Finish)
    assert "3 failures at step 5" in finish.text


def test_devices_that_die_together_are_one_failure(job: Job) -> None:
    """Catches a job that stops because a whole node went down at once."""
    job.hear(killed("1:2"), killed("1:3"), killed("1:1"))
    assert job.state.failures == 1
    assert job.state.stage is Stage.ABORT


def test_a_late_heartbeat_is_answered_by_a_kill_first(job: Job) -> None:
    """Catches a slow device that is planned away while it still writes."""
    job.beat(1.25, silent=frozenset({"0:1"}))
    assert not of(job.actions, Kill)
    job.beat(0.5, silent=frozenset({"0:1"}))
    assert job.state.devices["0:1"].killed_at is not None
    assert job.state.stage is Stage.RUN
    job.hear(killed("0:1"))
    assert "no heartbeat" in job.state.devices["0:1"].cause


def test_who_cannot_be_killed_is_cut_off_and_told_to_leave_when_it_wakes(make_world: Callable[..., World]) -> None:
    """Catches a device that comes back from the dead into a newer generation."""
    world = make_world(limits={"auto_return": False})
    world.run_until(lambda: world.state.committed == 5)
    job = Job(world.state, world.now)
    job.beat(5.0, silent=frozenset({"0:1"}))
    assert job.state.devices["0:1"].standing is Standing.LOST
    woken = said("0:1", messages.Heartbeat, generation=0, committed=5, phase="sync")
    assert sent(job.hear(woken), orders.Exit).keys() == {"0:1"}


def test_a_controller_that_slept_blames_nobody(job: Job) -> None:
    """Catches a suspended machine that wakes up and kills all its workers."""
    assert not of(job.hear(Tick(), after_s=3600.0), Kill)


def test_a_failed_collective_is_only_a_suspicion(job: Job) -> None:
    """Catches an abort for each error text: the exit that explains it comes a moment later, and names the device."""
    assert job.hear(suspect("0:0"), suspect("1:1")) == ()
    assert job.state.stage is Stage.RUN
    actions = job.hear(killed("1:0"), after_s=0.05)
    assert sent(actions, orders.Abort).keys() == ALL - {"1:0"}
    assert job.state.disturbance is not None
    assert job.state.disturbance.phases_s == (("detect", pytest.approx(0.05)),)


def test_a_flake_is_answered_by_the_same_members(job: Job) -> None:
    """Catches a device that is thrown out because a cable was bent once."""
    job.hear(suspect("0:0"), suspect("1:0"))
    job.beat(0.75)
    assert job.state.stage is Stage.ABORT
    for name in sorted(ALL):
        job.hear(status(name, 1, job.state.committed))
    assert sent(job.actions, orders.PlanOrder).keys() == ALL


def train_and_flake(world: World, *ends: str) -> None:
    """Two steps, then failed collectives at `ends`; returns when something is done about it."""
    target = world.state.committed + 2
    world.run_until(lambda: world.state.stage is Stage.RUN and world.state.committed >= target)
    assert world.state.plan is not None
    fields = {"generation": world.state.plan.generation, "phase": "sync", "text": "closed"}
    for end in ends:
        world.happen(said(end, messages.Suspect, **fields))
    world.run_until(lambda: world.state.stage is not Stage.RUN or bool(world.state.dying()))


def test_when_a_link_flakes_again_the_end_in_most_failed_pairs_leaves(make_world: Callable[..., World]) -> None:
    """Catches a job that re-forms for ever around a broken link, or that throws out the wrong end."""
    world = make_world()
    train_and_flake(world, "0:1", "1:1")
    assert world.state.stage is Stage.ABORT
    train_and_flake(world, "0:1", "1:3")
    assert world.state.dying() == ("0:1",)


def test_a_device_without_which_all_is_lost_does_not_leave_for_a_flake(make_world: Callable[..., World]) -> None:
    """Catches a job of one replica that a bent cable ends."""
    world = make_world(replicas=1)
    for _ in range(3):
        train_and_flake(world, "0:1", "0:2")
        assert not world.state.dying()
    assert world.run().text is None


@pytest.mark.parametrize(("phase", "killed"), [("backward", ("1:1",)), ("checkpoint", ())])
def test_no_progress_kills_who_works_while_the_others_wait(job: Job, phase: str, killed: tuple[str, ...]) -> None:
    """Catches a hung device that keeps its heartbeat, an innocent one killed for waiting, and one for a slow disk."""
    began = job.now
    while job.now < began + 4.0 and not job.state.dying():
        job.now += 0.25
        for name in sorted(ALL):
            waits = None if name == "1:1" else "all-reduce"
            fields = {
                "generation": 0,
                "committed": 5,
                "phase": phase if name == "1:1" else "commit",
                "since_s": job.now - began if waits else 0.0,
            }
            job.hear(said(name, messages.Heartbeat, waits_for=waits, **fields))
        job.hear(Tick())
    assert job.state.dying() == killed


def test_no_progress_without_a_culprit_kills_nobody(job: Job) -> None:
    """Catches a slow step that costs the job its devices."""
    job.beat(3.0)
    assert job.state.live() == tuple(sorted(ALL))
    assert job.state.stage is Stage.RUN


def test_groups_that_do_not_form_three_times_stop_the_job(make_world: Callable[..., World]) -> None:
    """Catches a job that tries to form for ever."""
    refused = Fault("formfail", "0:0", "form", step=5)
    finish = make_world(Fault("kill", "1:2", "forward", step=5), refused, refused, refused).run()
    assert "did not form 3 times in a row" in str(finish.text)


def test_differing_bits_take_everybody_back_to_disk(job: Job) -> None:
    """Catches a digest whose result is only logged."""
    job.hear(Published(3, "three"))
    unclear = {"head 3": ("0:1", "1:1")}
    job.hear(said("0:0", messages.Mismatch, generation=0, units=("head 3",), unclear=unclear))
    for name in sorted(ALL):
        job.hear(status(name, 1, 5, memory=copies({}, name)))
    (planned,) = of(job.actions, Planned)
    assert (planned.resume.action, planned.resume.checkpoint) == ("checkpoint", "three")
    assert "head 3" in planned.reason


def test_nothing_happens_after_the_end(job: Job) -> None:
    """Catches orders to workers of a run that is over."""
    ended = replace(job.state, stage=Stage.FINISHED)
    assert decide(ended, killed("1:2"), job.now) == (ended, ())
