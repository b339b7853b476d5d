"""Two faults in every pair of phases, with ranks as threads: real groups, real weights, no processes."""

from __future__ import annotations

import itertools
import os
import signal
from functools import partial
from typing import Any

import pytest

from runflat.check.diff import compare
from runflat.check.live import Watch, until
from runflat.elastic.controller import Controller, Workers
from runflat.elastic.launch_threads import ThreadWorkers
from runflat.elastic.state import Limits, Stage, Standing
from runflat.train.checkpoint import newest_checkpoint

STEP_PHASES = ("forward", "backward", "sync", "commit", "update", "checkpoint")
RECOVERY_PHASES = ("detect", "abort", "barrier", "form", "transfer", "digest")
RETURN_PHASES = ("import", "selftest", "copy", "join")
PHASES = STEP_PHASES + RECOVERY_PHASES + RETURN_PHASES
FIRST, SECOND, CAUSE = "0:0", "1:1", "0:1"
"""The two devices of a pair, each of which leaves a holder of its slot, and one whose links flake: nobody is lost."""
LAYOUT = (
    "--model.num-layers 1 --layout.tp 2 --layout.replicas 2 "
    "--train.global-batch 4 --train.dtype float64 --train.checkpoint-every 10 "
    "--train.steps 1000000 --data.seq-len 8"
)
PATIENT = {"max_failures": 12, "max_losses": 10**6, "back_off_s": 1e-9, "heartbeat_floor_s": 1.5, "heartbeat_factor": 1}
STRIKE_S = 30.0


class Job:
    """A run over threads, with a hold on its insides."""

    def __init__(self) -> None:
        self.controller: Controller | None = None
        self.workers: ThreadWorkers | None = None
        self.struck: list[dict[str, Any]] = []

    def settled(self) -> bool:
        """Whether all devices train and nothing is under way."""
        assert self.controller is not None
        state = self.controller.state
        all_active = all(device.standing is Standing.ACTIVE for device in state.devices.values())
        return all_active and state.stage is Stage.RUN and state.growth is None and state.disturbance is None

    def inject(self, device: str, kind: str, phase: str, ahead: int = 0) -> None:
        """Have `device` suffer a fault the next time that it comes to `phase`."""
        assert self.controller is not None
        assert self.workers is not None
        row = {"event": kind, "device": device, "step": self.controller.state.committed + ahead, "phase": phase}
        row |= {"peer": FIRST} if kind == "flake" else {}
        if phase in RETURN_PHASES:
            self.workers.inject(row)
        else:
            self.workers.sessions[device].striker.add(row)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """Returns the job that the next run will be."""
    held = Job()

    class Held(ThreadWorkers):
        def forget(self, event: Any) -> None:
            held.struck.append(dict(event))
            super().forget(event)

    supervise = Controller.supervise

    def hold(controller: Controller, workers: Workers) -> None:
        assert isinstance(workers, Held)
        held.controller, held.workers = controller, workers
        supervise(controller, workers)

    monkeypatch.setattr("runflat.elastic.launch_local.LocalWorkers", Held)
    monkeypatch.setattr("runflat.elastic.state.Limits", partial(Limits, **PATIENT))
    monkeypatch.setattr(Controller, "supervise", hold)
    return held


def strike(job: Job, first: str, kind: str, second: str) -> None:
    """Let both faults of a pair strike, and what must come before so that their phases come at all."""
    before = len(job.struck)
    expected = 2
    job.inject(SECOND, kind, second)
    job.inject(FIRST, "kill", first)
    for device, phase in ((FIRST, first), (SECOND, second)):
        if phase in RETURN_PHASES:
            job.inject(device, "kill", "forward", 1)
            expected += 1
    if not {first, second} & {*STEP_PHASES, *RETURN_PHASES}:
        job.inject(CAUSE, "flake", "forward", 1)
        expected += 1
    until(f"{kind} in {second} after kill in {first}", lambda: len(job.struck) >= before + expected, STRIKE_S)
    until(f"all devices to be back after {first}, {second}", job.settled, STRIKE_S)


ALL = [
    pytest.param(first, PHASES, id=f"{first}-all", marks=[pytest.mark.soak, pytest.mark.timeout(900)])
    for first in PHASES
]
SOME = [
    pytest.param(first, tuple(PHASES[(2 * row + column) % len(PHASES)] for column in (0, 1, 7)), id=first)
    for row, first in enumerate(PHASES)
    if row % 4 == 0
]


@pytest.mark.soak
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("first", "seconds"), [*SOME, *ALL])
def test_a_second_fault_after_a_first(live: Any, job: Job, first: str, seconds: tuple[str, ...]) -> None:
    """Catches a phase in which a second fault hangs the run, loses a step, or leaves wrong bits."""
    kinds = itertools.cycle(("kill", "stop", "kill", "kill"))

    def act(watch: Watch) -> None:
        until("all devices to train", lambda: job.controller is not None and job.settled(), 100.0)
        for second in seconds:
            strike(job, first, next(kinds), second)
        os.kill(os.getpid(), signal.SIGINT)

    hurt = live.train("hurt", LAYOUT, alongside=act)
    assert hurt.error is None
    end = hurt.summary["step"]
    assert [row["step"] for row in hurt.watch.steps()] == list(range(end))
    whole = live.train("whole", f"{LAYOUT} --train.stop-after {end}").watch
    ends = [newest_checkpoint(watch.run, pytest.fail) for watch in (whole, hurt.watch)]
    assert [found.progress.step for found in ends] == [end, end]
    # Not lifted, for speed: norms round to float32. A lost step, or a unit of another step, would be far above this.
    assert compare(*ends).whole("weight") <= 1e-4
    assert hurt.summary["sample_hash"] == whole.summary()["sample_hash"]
