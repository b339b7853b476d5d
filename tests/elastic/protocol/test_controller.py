"""The executor over workers that only talk: what a run leaves behind, whatever happens to it."""

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from runflat.cluster.events import Event, EventKind, event_to_json, read_events
from runflat.cluster.ledger import Category, Ledger
from runflat.elastic.assemble import assemble
from runflat.elastic.controller import Controller
from runflat.elastic.fake_launcher import FakeLauncher, Fault
from runflat.elastic.inject import Inject
from runflat.elastic.messages import Struck
from runflat.elastic.planning import Planner
from runflat.elastic.requests import ask
from runflat.elastic.state import Limits
from runflat.errors import ConfigError, RunError
from runflat.plan.plan import plan_from_json
from runflat.train.data import sample_hash

NUM_STEPS = 40
LOSS = Fault("kill", "1:2", "forward", 3)


class Quiet:
    """Remembers what it is shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.waits: list[str | None] = []

    def step(self, record: Mapping[str, Any]) -> None:
        """Steps are read from the file."""

    def say(self, text: str) -> None:
        self.lines.append(text)

    def waiting(self, text: str | None) -> None:
        self.waits.append(text)


def numbered(previous: str, step: int, samples: Any) -> str:
    return sample_hash(previous, step, [(number, number) for number in samples])


class Run:
    """A run in a folder, with a fake launcher whose clock it uses."""

    def __init__(self, folder: Path, planner: Planner, *faults: Fault, num_steps: int = NUM_STEPS, **fields: Any):
        limits = Limits(**{"back_off_s": 0.1, "timeout_s": 4.0, **fields.pop("limits", {})})
        self.folder = folder
        self.view = Quiet()
        self.launcher = FakeLauncher(num_steps, faults)
        self.controller: Controller = assemble(
            folder,
            planner,
            self.view,
            limits=limits,
            sample_hash=numbered,
            learning_rate=lambda step: 0.5,
            secret="secret",
            clock=lambda: self.launcher.now,
            **fields,
        )

    def __call__(self) -> dict[str, Any]:
        self.controller.supervise(self.launcher)
        return self.controller.summary()

    def steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "steps.jsonl").read_text().splitlines()]

    def records(self, kind: str) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]
        return [row for row in rows if row.get("record") == kind]


@pytest.fixture
def make_run(tmp_path: Path, make_planner: Callable[..., Planner]) -> Callable[..., Run]:
    def make(*faults: Fault, **fields: Any) -> Run:
        return Run(tmp_path, make_planner(), *faults, **fields)

    return make


def test_faults_are_injected_into_a_running_job_by_request(make_run: Callable[..., Run]) -> None:
    """Catches a fault that goes to the wrong worker or to none, and a request without sense that stops the job."""
    run = make_run()
    folder = run.folder / "requests"
    event = {"event": "kill", "device": "1:2", "step": 6, "phase": "sync"}
    wishes = {"good": event, "nobody": event | {"device": "9:9"}, "nonsense": {"event": "dance"}, "nothing": None}
    for name, wish in wishes.items():
        (folder / f"{name}.json").write_text(json.dumps({"action": "inject", "device": "1:2", "event": wish}))
    run()
    assert [(fault.device, fault.step) for fault in run.launcher.struck] == [("1:2", 6)]
    replies = {name: json.loads((folder / f"{name}.reply.json").read_text()) for name in wishes}
    assert {name: reply["ok"] for name, reply in replies.items()} == {name: name == "good" for name in wishes}
    assert "no device 9:9" in replies["nobody"]["text"]


def expected_hash(num_steps: int = NUM_STEPS) -> str:
    value = ""
    for step in range(num_steps):
        value = numbered(value, step, range(8 * step, 8 * step + 8))
    return value


FAULTS = {
    "nothing": (),
    "a loss and a return": (LOSS,),
    "the reporter dies after its commit": (Fault("kill", "1:0", "update", 3),),
    "the reporter and another die before they report": (
        Fault("kill", "0:0", "update", 3),
        Fault("kill", "1:2", "update", 3),
    ),
    "the reporter dies in the barrier": (Fault("kill", "0:0", "commit", 3),),
    "a second loss in the transfer": (LOSS, Fault("kill", "0:1", "transfer")),
    "a loss in the switch": (LOSS, Fault("kill", "0:1", "switch")),
    "a flake": (Fault("flake", "0:1", "sync", 3),),
    "a hang": (Fault("hang", "0:1", "sync", 3),),
}


@pytest.mark.parametrize("case", FAULTS)
def test_every_sequence_of_every_step_is_used_once(make_run: Callable[..., Run], case: str) -> None:
    """Catches a step that is missing, doubled or out of order in the books, whoever died before it could report."""
    run = make_run(*FAULTS[case])
    summary = run()
    assert [record["step"] for record in run.steps()] == list(range(NUM_STEPS))
    assert all(sum(replica["num_samples"] for replica in record["replicas"]) == 8 for record in run.steps())
    assert (summary["num_samples"], summary["sample_hash"]) == (8 * NUM_STEPS, expected_hash())
    assert {(record["loss"], record["grad_norm"]) for record in run.steps()} == {(1.0, 1.0)}
    assert len(run.launcher.struck) == len(FAULTS[case])


@pytest.mark.parametrize("case", FAULTS)
def test_the_parts_of_the_ledger_sum_to_the_total(make_run: Callable[..., Run], case: str) -> None:
    """Catches device-seconds that are lost, booked twice, or negative."""
    run = make_run(*FAULTS[case])
    summary = run()
    if case in ("a flake", "a hang"):
        assert summary["device_s"]["detect"] == pytest.approx(8 * run.records("incident")[0]["phases_s"]["detect"])
    Ledger.from_json(summary["device_s"]).check(8, summary["wall_s"])
    assert run.records("ledger")[-1]["device_s"] == summary["device_s"]


def test_the_ledger_says_where_the_time_of_a_loss_went(make_run: Callable[..., Run]) -> None:
    """Catches a recovery that is booked as work, and a lost device whose time is nobody's."""
    run = make_run(LOSS, limits={"auto_return": False})
    device_s = run()["device_s"]
    (incident,) = run.records("incident")
    assert incident["devices"] == ["1:2"]
    assert incident["action"] == "discard"
    reform_s = sum(incident["phases_s"][phase] for phase in ("abort", "barrier", "form", "digest"))
    assert device_s[Category.REFORM] == pytest.approx(7 * reform_s, abs=0.05)
    assert device_s[Category.TRANSFER] == pytest.approx(7 * incident["phases_s"]["transfer"], abs=0.05)
    assert device_s[Category.FAILED] == pytest.approx(run.controller.now - incident["started_s"], abs=0.3)
    assert device_s[Category.REPLAY] > 0
    assert 0 < device_s[Category.START] < 8 * 0.6


def test_goodput_is_that_of_the_full_plan_of_this_run(make_run: Callable[..., Run]) -> None:
    """Catches a rate that is measured on the hurt job, which would flatter it."""
    run = make_run(LOSS)
    summary = run()
    goodput = NUM_STEPS * summary["healthy_step_s"] / summary["wall_s"]
    assert summary["goodput"] == pytest.approx(goodput)
    assert summary["goodput_reason"] is None
    assert "goodput" in run.controller.table()


def test_a_run_without_a_healthy_step_says_where_its_healthy_rate_comes_from(make_run: Callable[..., Run]) -> None:
    """Catches a goodput that is missing, or measured on the hurt job, where a device was away from the start."""
    hurt = make_run(dead=("1:2",))
    summary = hurt()
    assert [replica["num_samples"] for replica in hurt.steps()[0]["replicas"]] == [5, 3]
    assert hurt.steps()[0]["step_s"] == pytest.approx(0.125)
    assert summary["healthy_step_s"] == pytest.approx(0.1), "four of the eight sequences take 0.1 s"
    assert summary["goodput"] == pytest.approx(NUM_STEPS * summary["healthy_step_s"] / summary["wall_s"])
    assert "scaled" in summary["goodput_reason"]
    assert "scaled" in hurt.controller.table()


def test_declared_times_win_over_scaled_ones(make_run: Callable[..., Run]) -> None:
    """Catches emulated devices whose healthy rate is guessed though it is declared."""
    summary = make_run(dead=("1:2",), declared_step_s=0.25)()
    assert summary["healthy_step_s"] == 0.25
    assert "declared" in summary["goodput_reason"]
    assert summary["goodput"] == pytest.approx(NUM_STEPS * 0.25 / summary["wall_s"])


def test_events_can_be_read_and_plans_are_kept(make_run: Callable[..., Run]) -> None:
    """Catches a recorded run that cannot be replayed, and a generation whose plan nobody can look up."""
    run = make_run(LOSS)
    summary = run()
    kinds = [(event.event, event.device) for event in read_events(run.folder / "events.jsonl")]
    assert kinds == [(EventKind.FAIL, "1:2"), (EventKind.RETURN, "1:2")]
    plans = [plan_from_json(path.read_text()) for path in sorted((run.folder / "plans").iterdir())]
    assert [plan.generation for plan in plans] == [0, 1, 2]
    assert [plan.replicas[1].tp for plan in plans] == [4, 3, 4]
    assert [change["joined"] for change in summary["changes"]] == [["1:2"]]
    devices = json.loads((run.folder / "devices.json").read_text())
    assert devices["finished"]
    assert {row["state"] for row in devices["devices"]} == {"active"}


def test_an_incident_is_one_readable_line(make_run: Callable[..., Run]) -> None:
    """Catches a timeline for which one must read the source."""
    run = make_run(LOSS)
    run()
    (line,) = [line for line in run.view.lines if line.startswith("incident 1")]
    for part in ("1:2", "step 3", "SIGKILL", "abort", "form", "ran again", "first commit"):
        assert part in line


def test_an_incident_that_the_run_did_not_outlive_repeated_nothing(make_run: Callable[..., Run]) -> None:
    """Catches a line that says that a step ran again where nothing ran any more."""
    run = make_run(LOSS, Fault("raise", "0:1", "digest", nth=2))
    with pytest.raises(RunError):
        run()
    (line,) = [line for line in run.view.lines if line.startswith("incident 1")]
    assert "the run ended before the next commit" in line
    assert "ran again" not in line


def test_a_script_drains_and_returns(make_run: Callable[..., Run]) -> None:
    """Catches an injected event of the controller's that is dropped because it came a moment too early."""
    kill = Event(event=EventKind.KILL, device="0:1", time_s=1.5)
    events = (*Inject().drain("1:2", 5).return_("1:2", 10).events, kill)
    run = make_run(events=events, num_steps=60)
    assert run()["replicas"][1]["tp"] == 4
    assert [(event.event, event.device) for event in read_events(run.folder / "events.jsonl")] == [
        (EventKind.DRAIN, "1:2"),
        (EventKind.FAIL, "0:1"),
        (EventKind.RETURN, "1:2"),
    ]
    assert run.controller.summary()["replicas"][0]["tp"] == 3, "what a script kills comes back by the script only"


def test_a_request_of_another_process_is_answered(make_run: Callable[..., Run]) -> None:
    """Catches a command that waits in vain, and one that is taken from an earlier life of the run."""
    run = make_run(num_steps=60)
    answers = []

    def listening(_: float) -> None:
        """Instead of sleeping: let the run go on a little."""
        run.controller._turn(run.launcher)

    run.launcher.later(1.0, lambda: answers.append(ask(run.folder, "drain", "1:2", listening)))
    run()
    assert answers == [(True, "1:2 leaves at the next step boundary")]
    assert not list((run.folder / "requests").iterdir())
    with pytest.raises(ConfigError, match="not running"):
        ask(run.folder, "drain", "1:2", listening)


def test_one_interrupt_ends_the_run_after_a_step(make_run: Callable[..., Run]) -> None:
    """Catches a Ctrl-C that is lost, or that loses the step in flight."""
    run = make_run()
    run.launcher.later(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    summary = run()
    assert run.controller.stopped
    assert 0 < summary["step"] < NUM_STEPS
    assert len(run.steps()) == summary["step"]


def test_a_second_interrupt_ends_it_at_once(make_run: Callable[..., Run]) -> None:
    """Catches a run that cannot be stopped while it waits for a worker."""
    run = make_run()
    before = signal.getsignal(signal.SIGINT)
    for at_s in (1.0, 1.001):
        run.launcher.later(at_s, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run()
    assert not any(worker.alive for worker in run.launcher.workers.values())
    assert signal.getsignal(signal.SIGINT) is before


def test_a_python_error_is_the_runs_error_and_its_traceback_is_kept(make_run: Callable[..., Run]) -> None:
    """Catches a failure that is reported as the loss of a device."""
    run = make_run(Fault("raise", "0:1", "forward", 3))
    with pytest.raises(RunError, match="worker 0:1 failed: ValueError: bad sample"):
        run()
    assert "bad sample" in (run.folder / "error.txt").read_text()
    assert [record["step"] for record in run.steps()] == [0, 1, 2]


def test_what_is_waited_for_is_shown_after_a_second(make_run: Callable[..., Run]) -> None:
    """Catches a run that stands still without a word."""
    run = make_run(Fault("stop", "0:1", "abort"), LOSS)
    run()
    assert any(text and "waiting for status of 0:1" in text for text in run.view.waits)
    assert run.view.waits[-1] is None


def test_a_stop_with_a_duration_is_woken_once(make_run: Callable[..., Run]) -> None:
    """Catches a device that is woken twice, or not at all, or at once."""
    run = make_run()
    woken: list[tuple[str, float]] = []

    def note(device: str, number: signal.Signals) -> None:
        if number is signal.SIGCONT:
            woken.append((device, run.launcher.now))

    stop = Inject().stop("0:1", 3, duration_s=1.0).events[0]
    run.launcher.signal = note
    run.launcher.later(0.6, lambda: run.launcher.workers["0:1"].say(Struck, event=event_to_json(stop)))
    run()
    ((device, at),) = woken
    assert device == "0:1"
    assert 1.6 <= at < 2.0
