"""Faults that are not a plain death, against real processes: what must go on, what must stop, and with which words."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from runflat.check.diff import compare
from runflat.check.live import Command, Watch, is_alive, until
from runflat.commands.models import section_config
from runflat.commands.train import parse
from runflat.elastic.launch_local import LocalWorkers
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.cost import device_memory
from runflat.plan.planner import build_plan, live_devices
from runflat.train.checkpoint import newest_checkpoint
from runflat.train.data import prepare

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PAIRS = "--layout.tp 2 --layout.replicas 2 --train.global-batch 8"
MICRO_BATCH = 2
PACED = "--devices emulated --device.rate-tflops 4e-4"


def test_a_sample_that_raises_everywhere_stops_the_job(live: Any) -> None:
    """Catches a job that lets a bug kill one survivor after the other, and an error whose first cause is lost."""
    events = [
        {"event": "raise", "device": f"{replica}:{slot}", "step": 2, "phase": "forward"}
        for replica in range(2)
        for slot in range(2)
    ]
    ran = live.train("raise", f"{PAIRS} --train.steps 100", events)
    assert ran.code == 1
    text = (ran.watch.run / "error.txt").read_text()
    assert "Traceback" in text
    assert "InjectedError: injected at step 2, phase forward" in text
    assert "InjectedError" in ran.error
    assert "error.txt" in ran.error
    lost = [event["device"].partition(":")[0] for event in ran.watch.happened("fail")]
    assert len(lost) == len(set(lost)), "more than one device of a replica was lost to a bug"


def memory_gb(live: Any) -> float:
    """What a device needs in a whole replica of TP 4, which TP 3 does not fit in."""
    config = parse(live.flags(""))
    model = build_meta_model(section_config(config.model), torch.float32, None)
    spec = read_rules(model, 4).spec

    def need(tp: int) -> int:
        plan = build_plan(spec, live_devices(4, 1, tuple((0, slot) for slot in range(tp, 4))), 4, 14, 32)
        return max(device_memory(spec, plan.replicas[0], slot, 32, MICRO_BATCH, 4).total_bytes for slot in range(tp))

    assert need(4) < need(3)
    return (need(4) + 1) / 1e9


def test_a_degree_that_does_not_fit_is_not_adopted(live: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches survivors that run out of memory one after the other, and an end without a word about the way on.

    Replica 1 loses a device: TP 3 does not fit, so it leaves. Then replica 0 loses one, and nothing is left.
    """
    events = [
        {"event": "kill", "device": "1:2", "step": 3, "phase": "backward"},
        {"event": "kill", "device": "0:1", "step": 6, "phase": "sync"},
    ]
    arguments = f"--layout.tp 4 --layout.replicas 2 --train.global-batch 14 --train.micro-batch {MICRO_BATCH}"
    arguments += " --train.steps 9 --train.checkpoint-every 2"
    ran = live.train("full", f"{arguments} --device.memory-gb {memory_gb(live):.9f}", events)
    text = capsys.readouterr().out
    assert "TP 3 does not fit in memory, replica 1 does not go on with it" in text
    after = [row for row in ran.watch.steps() if row["step"] in (4, 5)]
    assert [[replica["num_samples"] for replica in row["replicas"]] for row in after] == [[14], [14]]
    assert ran.code == 1
    assert "no device is left that can work" in ran.error
    assert "checkpoints/step-00000006" in ran.error
    assert "--resume" in ran.error


@pytest.mark.parametrize(("memory_every", "source", "repeated"), [(0, "checkpoint", 2), (2, "memory", 1)])
def test_all_holders_of_a_slot_lost_at_once(live: Any, memory_every: int, source: str, repeated: int) -> None:
    """Catches units that nobody holds any more, filled with anything but the newest whole copy, and steps left out.

    Disk has step 3 and memory, where there are copies in it, has step 4; the steps since then run again.
    """
    arguments = f"{PAIRS} --train.steps 9 --train.checkpoint-every 3 --train.dtype float64 --train.lift-casts"
    whole = live.train("whole", arguments).watch
    # The second dies as soon as it leaves the step for the first one's sake: before anything can have moved from it.
    phases = {"0:1": "backward", "1:1": "abort"}
    events = [{"event": "kill", "device": device, "step": 5, "phase": phase} for device, phase in phases.items()]
    ran = live.train("hurt", f"{arguments} {PACED} --train.memory-every {memory_every}", events)
    assert (ran.code, ran.error) == (0, None)
    last = ran.watch.records("plan")[-1]
    assert (last["action"], last["committed"]) == (source, 5 - repeated)
    ends = [newest_checkpoint(watch.run, pytest.fail) for watch in (whole, ran.watch)]
    assert compare(*ends).whole("weight") <= 1e-11
    assert ran.summary["sample_hash"] == whole.summary()["sample_hash"]
    assert [row["step"] for row in ran.watch.steps()] == list(range(9))


def test_what_passes_is_no_failure_and_what_does_not_is(live: Any) -> None:
    """Catches a device killed for a short stop, one that is waited for without end, a flake that costs a device."""
    events = [
        {"event": "stop", "device": "1:0", "step": 3, "phase": "forward", "duration_s": 2.0},
        {"event": "flake", "device": "0:0", "peer": "0:1", "step": 6, "phase": "sync"},
        {"event": "stop", "device": "1:1", "step": 9, "phase": "backward"},
    ]
    ran = live.train("stops", f"{PAIRS} {PACED} --train.steps 13", events)
    assert (ran.code, ran.error) == (0, None)
    steps = ran.watch.steps()
    assert [row["step"] for row in steps] == list(range(13))
    assert steps[3]["generation"] == steps[0]["generation"], "a stop of 2 s was taken for a failure"
    assert steps[3]["time_s"] - steps[2]["time_s"] >= 2.0, "the device was not stopped at all"

    flake, stop = ran.summary["incidents"]
    assert flake["cause"] == "link flake"
    assert [len(row["replicas"]) for row in steps] == [2] * 13
    assert "no heartbeat" in stop["cause"]
    assert stop["devices"] == ["1:1"]
    assert 5.0 <= stop["phases_s"]["detect"] <= 10.0
    assert [event["device"] for event in ran.watch.happened("fail")] == ["1:1"]


class CannotKill(LocalWorkers):
    """A launcher without the power to end a process, as where a node is cut off."""

    def kill(self, device: str) -> None:
        """Does nothing."""


@pytest.mark.parametrize("asleep_s", [8.0, pytest.param(20.0, marks=pytest.mark.soak)])
def test_a_woken_worker_of_an_old_generation_leaves(
    live: Any, monkeypatch: pytest.MonkeyPatch, asleep_s: float
) -> None:
    """Catches a worker that was given up, wakes, and disturbs the job or writes into its folder."""
    monkeypatch.setattr("runflat.elastic.launch_local.LocalWorkers", CannotKill)
    woken: list[int] = []

    def wake(watch: Watch) -> None:
        watch.reached(3)
        pid = watch.pid("1:1")
        os.kill(pid, signal.SIGSTOP)
        asleep = watch.steps()[-1]["time_s"]
        until("the job to go on without it", lambda: watch.steps()[-1]["time_s"] >= asleep + asleep_s)
        assert watch.state("1:1") == "lost"
        files = {path for path in watch.run.rglob("*") if "1-1" in path.name}
        os.kill(pid, signal.SIGCONT)
        until("the woken worker's end", lambda: not is_alive(pid), 10.0)
        assert {path for path in watch.run.rglob("*") if "1-1" in path.name} == files
        woken.append(pid)
        os.kill(os.getpid(), signal.SIGINT)

    stays_away = [{"event": "return", "device": "1:1", "step": 10**6}]
    ran = live.train("asleep", f"{PAIRS} {PACED} --train.steps 1000", stays_away, wake)
    assert woken
    assert ran.error is None
    assert ran.summary["stopped"]
    assert [event["device"] for event in ran.watch.happened("fail")] == ["1:1"]
    assert [row["step"] for row in ran.watch.steps()] == list(range(ran.summary["step"]))


def test_controller_killed_then_resumed(live: Any, tmp_path: Path) -> None:
    """Catches workers that outlive their controller, and the steps since the last checkpoint lost with it."""
    run = tmp_path / "run"
    watch = Watch(run)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = ["train", *live.flags(f"--layout.tp 2 --train.global-batch 4 {PACED} --train.steps 100000")]
    with Command([*arguments, "--run", str(run)], tmp_path / "log", environment) as command:
        watch.reached(5, 120)
        workers = [watch.pid("0:0"), watch.pid("0:1")]
        os.kill(command.process.pid, signal.SIGKILL)
        until("the end of the workers", lambda: not any(map(is_alive, workers)), 30)
    in_books = watch.num_steps()
    assert not list((run / "checkpoints").glob("step-*")), "only a controller may publish"
    end = in_books + 5
    ran = live.train("run", f"--resume {run} --train.steps {end}")
    assert (ran.code, ran.error) == (0, None)
    assert watch.records("plan")[-1]["committed"] >= in_books
    assert [row["step"] for row in watch.steps()] == list(range(end)), "a step that workers finished alone has no line"
    assert ran.summary["sample_hash"] == expected_hash(live, end, 4)


def expected_hash(live: Any, num_steps: int, batch: int) -> str:
    """The hash of the samples that a run without interruption uses."""
    config = parse(live.flags(""))
    text = prepare(config.data.paths, cache_dir=live.folder / "tokens", seq_len=32, model_vocab_size=264)
    value = ""
    for step in range(num_steps):
        value = text.sample_hash(value, step, range(batch * step, batch * (step + 1)))
    return value
