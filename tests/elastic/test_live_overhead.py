"""With no failure, supervision costs nothing that can be counted."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from runflat.check.live import Command, Watch, cpu_s
from runflat.check.ranks import run_ranks
from runflat.commands.prepare import prepare, run_folder
from runflat.commands.train import parse
from runflat.elastic.inspection import Inspection
from runflat.elastic.stepping import Step
from runflat.parallel.comms import Comms, Network
from runflat.plan.cost import device_traffic
from runflat.plan.plan import Place
from runflat.train.engine import Engine
from runflat.train.step import Scalars, StepResult

ROOT = Path(__file__).parents[2]
NUM_STEPS = 3


class Alone:
    """The worker of a step, as far as a step sees it: nobody to talk to, and no wishes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.said: list[str] = []
        self.inspection = Inspection(engine, self.say)

    def say(self, kind: str, **fields: Any) -> None:
        """Keeps what is said."""
        self.said.append(kind)

    def wishes(self) -> tuple[bool, bool]:
        """Nothing."""
        return False, False

    def commit(self, scalars: Scalars) -> StepResult:
        """Applies the step."""
        return self.engine.commit(scalars)


@pytest.mark.parametrize(
    ("flags", "num_digests"),
    [
        ("", 0),
        ("--layout.dead 1:2", 0),
        ("--train.digest-every 2", 2),
        ("--train.digest-every 9 --train.memory-every 2", 2),
    ],
)
def test_a_step_launches_what_the_plan_counts_and_nothing_else(live: Any, flags: str, num_digests: int) -> None:
    """Catches a collective that recovery needs but that every step pays for; digests cost one each where asked for.

    Of three steps, 0 and 2 are due every second step.
    """
    layout = f"--layout.tp 4 --layout.replicas 2 --train.global-batch 14 {flags} --run {live.folder / 'run'}"
    config = parse(live.flags(layout))
    prepared = prepare(config, run_folder(config), print)
    launched: Counter[Place] = Counter()

    def work(place: Place, comms: Comms) -> list[str]:
        engine = Engine(prepared.job, torch.device("cpu"), lambda name: None)
        engine.build(prepared.plan, place, None)
        engine.join(comms)
        engine.enter(prepared.plan, place, comms)
        host = Alone(engine)
        for _ in range(NUM_STEPS):
            with Step(host, 0) as step:
                step.compute()
            assert step.error is None
        assert engine.progress.step == NUM_STEPS
        return host.said

    def network_of(place: Place) -> Network:
        return Network(recorder=lambda *_: launched.update([place]))

    any_engine = Engine(prepared.job, torch.device("cpu"), lambda name: None)
    sync = any_engine.layout(prepared.plan)
    said = run_ranks(prepared.plan, sync, work, network_of, in_memory=True)
    for place in prepared.plan.places:
        counted = device_traffic(prepared.spec, prepared.plan, sync, place, 32, prepared.config.train.micro_batch, 4)
        assert launched[place] == NUM_STEPS * counted.num_collectives + num_digests, place
        reports = place[1] == prepared.plan.replica(place[0]).live_slots[0]
        assert said[place] == ["commit", "step"] * (NUM_STEPS if reports else 0)


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.timeout(600)
def test_supervision_uses_little_of_the_processors(live: Any) -> None:
    """Catches heartbeats, orders or a controller that take more than 2 % of the CPU time that the workers take."""
    watch = Watch(live.folder / "demo")
    flags = "--model.preset demo --layout.tp 4 --layout.replicas 2 --train.global-batch 14 --data.seq-len 64"
    command = ["train", "--run", str(watch.run), *flags.split(), "--train.steps", "1000"]
    used = []
    with Command(command, live.folder / "log", {**os.environ, "PYTHONPATH": str(ROOT)}) as started:
        for step in (5, 95):
            watch.reached(step, 300)
            total = {"controller": sum(cpu_s(started.process.pid).values()), "side": 0.0, "all": 0.0}
            for device in watch.devices():
                threads = cpu_s(watch.pid(device))
                total["all"] += sum(threads.values())
                total["side"] += threads.get("heartbeat", 0.0) + threads.get("orders", 0.0)
            used.append(total)
    first, last = used
    side_s = sum(last[key] - first[key] for key in ("controller", "side"))
    assert side_s <= 0.02 * (last["all"] - first["all"])
