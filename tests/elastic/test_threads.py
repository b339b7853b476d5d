"""Two faults in every pair of phases, with ranks as threads: real groups, real weights, no processes."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from runflat.check.diff import compare
from runflat.check.live import Watch, until
from runflat.elastic.controller import Controller, Workers
from runflat.elastic.device import Standing
from runflat.elastic.launch_threads import ThreadWorkers
from runflat.elastic.state import Limits, Stage
from runflat.train.checkpoint import newest_checkpoint

STEP_PHASES = ("forward", "backward", "sync", "commit", "update", "checkpoint")
RECOVERY_PHASES = ("detect", "abort", "barrier", "form", "transfer", "digest")
RETURN_PHASES = ("import", "selftest", "copy", "join")
BESIDE = ("import", "selftest", "copy")
"""Phases of a return in which a fault costs no recovery."""
PHASES = STEP_PHASES + RECOVERY_PHASES + RETURN_PHASES
FIRST, SECOND, CAUSE = "0:0", "1:1", "0:1"
"""The two devices of a pair, each of which leaves a holder of its slot, and one whose links flake: nobody is lost."""
LAYOUT = (
    "--model.num-layers 1 --layout.tp 2 --layout.replicas 2 "
    "--train.global-batch 4 --train.dtype float64 --train.checkpoint-every 10 "
    "--train.steps 1000000 --train.timeout-s 20 --train.lr 1e-4 --data.seq-len 8"
)
"""So low a learning rate that rounding does not grow over hundreds of steps."""
LIMITS = {
    "max_failures": 12,
    "max_losses": 10**6,
    "back_off_s": 0.0,
    "heartbeat_floor_s": 1.5,
    "heartbeat_factor": 1,
    "start_s": 8.0,
}
"""Devices fail all the time and come back at once; one that is silent is found soon, also while it starts."""
STRIKE_S = 60.0

Pair = tuple[str, str, str]
"""Phase of the first fault, a kill; kind and phase of the second."""
KINDS = ("kill", "stop")
SOME: tuple[Pair, ...] = (
    ("forward", "kill", "form"),
    ("backward", "stop", "transfer"),
    ("commit", "kill", "barrier"),
    ("update", "kill", "forward"),
    ("digest", "stop", "abort"),
    ("form", "kill", "copy"),
    ("selftest", "kill", "join"),
    ("join", "stop", "sync"),
)
"""Each kind of phase before and after each other kind, for every change."""


class Job:
    """A run over threads, with a hold on its insides."""

    def __init__(self) -> None:
        self.controller: Controller | None = None
        self.workers: ThreadWorkers | None = None
        self.num_struck = 0
        self.struck_in = -1
        """Generation that the last fault has struck."""
        self.then: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
        """Faults to arm when that device is struck in that phase."""

    def settled(self) -> bool:
        """Whether all devices train under a plan that nothing has struck, and nothing is under way."""
        assert self.controller is not None
        state = self.controller.state
        if state.plan is None or state.plan.generation <= self.struck_in:
            return False  # what has just struck may not have been noticed yet
        all_active = all(device.standing is Standing.ACTIVE for device in state.devices.values())
        return all_active and state.stage is Stage.RUN and state.growth is None and state.disturbance is None

    def num_losses(self) -> int:
        """How often the controller has lost a device."""
        assert self.controller is not None
        return sum(device.failures for device in self.controller.state.devices.values())

    def arm(self, device: str, kind: str, phase: str) -> None:
        """Have `device` suffer a fault the next time that it comes to `phase`."""
        assert self.controller is not None
        assert self.workers is not None
        row = {"event": kind, "device": device, "step": self.controller.state.committed, "phase": phase}
        row |= {"peer": FIRST} if kind == "flake" else {}
        if phase in RETURN_PHASES:
            self.workers.inject(row)
        else:
            self.workers.sessions[device].striker.add(row)

    def has_struck(self, event: Any) -> None:
        """A fault strikes: those that wait for it are armed."""
        assert self.controller is not None
        assert self.controller.state.plan is not None
        self.num_struck += 1
        self.struck_in = self.controller.state.plan.generation
        for fault in self.then.pop((event["device"], event["phase"]), ()):
            self.arm(*fault)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """Returns the job that the next run will be."""
    held = Job()

    class Held(ThreadWorkers):
        def forget(self, event: Any) -> None:
            super().forget(event)
            held.has_struck(event)

    supervise = Controller.supervise

    def hold(controller: Controller, workers: Workers) -> None:
        assert isinstance(workers, Held)
        held.controller, held.workers = controller, workers
        supervise(controller, workers)

    monkeypatch.setattr("runflat.elastic.launch_local.LocalWorkers", Held)
    monkeypatch.setattr("runflat.elastic.state.Limits", partial(Limits, **LIMITS))
    monkeypatch.setattr(Controller, "supervise", hold)
    return held


LOSS, FLAKE = (FIRST, "kill", "forward"), (CAUSE, "flake", "forward")


def strike(job: Job, pair: Pair) -> None:
    """Let both faults of a pair strike, the second one after the first, and what makes their phases come at all."""
    first, kind, second = pair
    faults = [(FIRST, "kill", first)]
    if first in RETURN_PHASES:
        faults.insert(0, LOSS)
    elif first in RECOVERY_PHASES:
        faults.insert(0, FLAKE)
    then = [(SECOND, kind, second)]
    if second in RETURN_PHASES:
        then.append((SECOND, "kill", "forward"))
    elif second in RECOVERY_PHASES and first in BESIDE:
        then.append(FLAKE)
    struck, lost = job.num_struck, job.num_losses()
    job.then[FIRST, first] = then
    for fault in faults:
        job.arm(*fault)
    if {first, second} <= {"detect", "abort"}:
        finish(job, f"the first fault of {pair}", struck + len(faults), lost + 1)
        if job.num_struck == struck + len(faults):  # SECOND had come past its phase: in another recovery, then
            then.append(FLAKE)
            job.arm(*FLAKE)
    every = (*faults, *then)
    finish(job, f"both faults of {pair}", struck + len(every), lost + sum(fault is not FLAKE for fault in every))


def finish(job: Job, what: str, struck: int, lost: int) -> None:
    """Wait until that many faults have struck and devices were lost (who is silent, some time later), and all train."""
    until(f"{what} to strike", lambda: job.num_struck >= struck, STRIKE_S)
    until(f"all devices to train after {what}", lambda: job.num_losses() >= lost and job.settled(), STRIKE_S)


CASES = [
    pytest.param(SOME, id="some"),
    *(
        pytest.param(
            tuple((first, kind, second) for second in PHASES),
            id=f"{first}-{kind}",
            marks=[pytest.mark.soak, pytest.mark.timeout(900)],
        )
        for first, kind in itertools.product(PHASES, KINDS)
    ),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("pairs", CASES)
def test_a_second_fault_after_a_first(live: Any, job: Job, pairs: Sequence[Pair]) -> None:
    """Catches a pair of phases in which a second fault hangs the run, loses a step, or leaves wrong bits."""

    def act(watch: Watch) -> None:
        until("all devices to train", lambda: job.controller is not None and job.settled(), 100.0)
        for pair in pairs:
            strike(job, pair)
        os.kill(os.getpid(), signal.SIGINT)

    hurt = live.train("hurt", LAYOUT, alongside=act)
    assert hurt.error is None
    end = hurt.summary["step"]
    assert [row["step"] for row in hurt.watch.steps()] == list(range(end))
    whole = live.train("whole", f"{LAYOUT} --train.stop-after {end}").watch
    ends = [newest_checkpoint(watch.run, pytest.fail) for watch in (whole, hurt.watch)]
    assert [found.progress.step for found in ends] == [end, end]
    # Not lifted, for speed: norms round to float32. A lost step, or a unit of another step, would be far above this.
    assert compare(*ends).whole("weight") <= 1e-6
    assert hurt.summary["sample_hash"] == whole.summary()["sample_hash"]
