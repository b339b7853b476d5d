"""How what the controller hears, says and does grows with the number of devices.

    python benchmarks/scaling/run.py

First real jobs of 8, 32 and 64 devices (TP 4) whose workers are threads: real groups, a tiny model, one loss and the
return of the lost device. Counted are messages and orders of a step, of the loss and of the return; heartbeats are told
apart, since they come by the second. Then the controller alone, with workers that only talk, for llama3-70b at TP 8 up
to 4,096 devices: the CPU seconds that a heartbeat, a step and a loss take it, reading of messages and writing of orders
included.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from runflat.check.bench import arguments, report
from runflat.check.live import Watch, until
from runflat.check.tally import Counted, Timed
from runflat.commands.models import model_config
from runflat.commands.train import parse, train
from runflat.elastic.assemble import assemble, layout_planner
from runflat.elastic.fake_launcher import Fault
from runflat.elastic.state import Limits
from runflat.parallel.comms import Network
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.units import ModelSpec

HERE = Path(__file__).parent
TP, BIG_TP = 4, 8
THREADS, QUICK_THREADS = (8, 32, 64), (8, 16)
ALONE, QUICK_ALONE = (16, 64, 512, 4096), (16, 64)
LOST = "1:2"
FIRST, STEPS = 3, 6
"""Steps before the first that is counted, and how many are."""
PATIENCE_S = 240.0
PATIENCE = Network(meet_timeout_s=60.0, form_timeout_s=60.0)
"""For groups of as many devices as share the cores of this machine; where each has its own, they form side by side."""
FLAGS = (
    "--model.num-layers 1 --data.seq-len 8 --train.steps 1000000 --train.checkpoint-every 0 --train.timeout-s 120 "
    "--layout.tp 4"
)
BEATS_PER_S = 4
TEXT = """How what the controller hears, says and does grows with the number of devices.

*Threads*: a whole job (a tiny model at TP 4) whose devices are threads of one process, with real groups of gloo, one
loss and the return of the lost device. Messages are those of all devices together, orders and answers; heartbeats are
left out, since they come by the second. Times are those of so many devices on the cores of one machine: every device
connects to every other, so that all together have more than twice the work when there are twice as many, and share the
cores for it. What one device would have to do by itself is the CPU time beside it.

*Controller alone*: its CPU time with workers that only talk, for llama3-70b at TP 8, reading of messages and writing of
orders included: a step, a loss (from the first status to the plan in force), and the heartbeats of all devices, four a
second."""
Result = dict[str, Any]


def as_threads(num_devices: int, folder: Path) -> Result:
    """One job with real workers, threads of this process: what passes in a step, a loss, a return."""
    run = folder / f"threads-{num_devices}"
    replicas = num_devices // TP
    flags = f"--run {run} {FLAGS} --layout.replicas {replicas} --train.global-batch {replicas}"
    made: list[Counted] = []
    problems: list[BaseException] = []

    def launch(job: Any, _: Any) -> Counted:
        made.append(Counted(job, PATIENCE))
        return made[0]

    def act() -> None:
        watch = Watch(run)
        try:
            watch.reached(FIRST + STEPS, PATIENCE_S)
            made[0].kill(LOST)
            until("the incident", lambda: _losses(watch), PATIENCE_S)
            until("the return", lambda: watch.records("change"), PATIENCE_S)
        except BaseException as problem:  # whatever it is, it is told when the run has ended
            problems.append(problem)
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=act, daemon=True)
    helper.start()
    train(parse(flags.split()), launch=launch)
    helper.join()
    if problems:
        raise problems[0]
    return _counted(num_devices, made[0], Watch(run))


def _losses(watch: Watch) -> list[dict[str, Any]]:
    """Incidents of the device that was killed, and of no other."""
    return [row for row in watch.records("incident") if row["devices"] == [LOST]]


def _counted(num_devices: int, workers: Counted, watch: Watch) -> Result:
    tally, (change, *_) = workers.tally, watch.records("change")
    (loss,) = _losses(watch)
    cpu_s = workers.cpu_s
    steps = [tally.of_step[step] for step in range(FIRST, FIRST + STEPS)]
    before, back = tally.of_change[loss["generation"]], tally.of_change[change["generation"]]
    return {
        "devices": num_devices,
        "step": dict(max(steps, key=Counter.total)),
        "step_s": median(row["step_s"] for row in watch.steps()[FIRST : FIRST + STEPS]),
        "loss": {**before, "suspect": tally.others["suspect"]},
        "loss_order_bytes": tally.order_bytes[loss["generation"]],
        "step_cpu_s": (cpu_s[f"step {FIRST + STEPS - 1}"] - cpu_s[f"step {FIRST - 1}"]) / STEPS,
        "loss_cpu_s": cpu_s[f"generation {loss['generation']}"] - cpu_s["exit"],
        "loss_phases_s": loss["phases_s"],
        "return": dict(back),
        "return_stages_s": change["stages_s"],
        "return_stopped_s": change["stopped_s"],
    }


class Nobody:
    """Watches nothing."""

    def step(self, record: Mapping[str, Any]) -> None:
        """A step is complete."""

    def say(self, text: str) -> None:
        """Something happened."""

    def waiting(self, text: str | None) -> None:
        """Something is waited for."""


def alone(num_devices: int, spec: ModelSpec, folder: Path) -> Result:
    """The controller of a job whose workers only talk: its CPU seconds for what it hears, with one loss."""
    replicas = num_devices // BIG_TP
    planner = layout_planner(
        spec, tp=BIG_TP, replicas=replicas, num_sequences=4 * replicas, seq_len=4096, element_bytes=4
    )
    launcher = Timed(FIRST + STEPS, (Fault("kill", LOST, "forward", FIRST),))
    run = folder / f"alone-{num_devices}"
    run.mkdir()
    controller = assemble(
        run,
        planner,
        Nobody(),
        limits=Limits(auto_return=False),
        sample_hash=lambda before, step, samples: before,
        learning_rate=lambda step: 1.0,
        secret="secret",
        clock=lambda: launcher.now,
    )
    controller.supervise(launcher)
    (loss,) = controller.incidents
    tally, used = launcher.tally, launcher.seconds
    generation = max(tally.of_change)
    recovery = ("status", "ready", "formed", "running")
    num_steps = len(tally.of_step)
    return {
        "devices": num_devices,
        "heartbeat_s": used["heartbeat"] / tally.others["heartbeat"],
        "step_s": (used["commit"] + used["step"]) / num_steps,
        "tick_s": used["tick"] / (4 * launcher.now),
        "change_s": sum(used[kind] for kind in recovery) / len(tally.of_change),
        "order_bytes": tally.order_bytes[generation],
        "plan_order_bytes": tally.order_bytes[generation] / (num_devices - 1),
        "step": dict(max(tally.of_step.values(), key=Counter.total)),
        "loss": dict(tally.of_change[generation]),
        "cause": loss["cause"],
        "seconds": dict(used),
        "messages": {**tally.others},
    }


def rows(real: list[Result], toy: list[Result]) -> list[tuple[str, ...]]:
    """The table: a line for each number of devices."""
    found = []
    for one in real:
        total, lost, back = (sum(one[what].values()) for what in ("step", "loss", "return"))
        stood_s = sum(one["loss_phases_s"].values())
        lost_s = f"{stood_s:.2f} s, {one['loss_cpu_s'] / one['devices'] * 1e3:.0f} ms of CPU a device"
        cells = (f"{one['step_s']:.2f} s", lost_s, f"{one['return_stopped_s']:.2f} s")
        found.append((f"{one['devices']}, threads", f"{total}", f"{lost}", f"{back}", *cells))
    for one in toy:
        total, lost = (sum(one[what].values()) for what in ("step", "loss"))
        share = one["heartbeat_s"] * BEATS_PER_S * one["devices"]
        cells = (f"{one['step_s'] * 1e3:.1f} ms", f"{one['change_s']:.2f} s", f"heartbeats {share:.1%} of a core")
        found.append((f"{one['devices']:,}, controller alone", f"{total:,}", f"{lost:,}", "", *cells))
    return found


def main() -> None:
    """Measures, writes result.json and README.md."""
    args = arguments(__doc__, HERE).parse_args()
    # torch's store client asks for a host name at each connection. A name server that leaves some of 64 questions at
    # once without an answer is not what is measured: a second, once, is all that it may take.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    model = build_meta_model(model_config("llama3-70b"), torch.float32)
    spec = read_rules(model, BIG_TP).spec
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        toy = [alone(number, spec, folder) for number in (QUICK_ALONE if args.quick else ALONE)]
        real = [as_threads(number, folder) for number in (QUICK_THREADS if args.quick else THREADS)]
    header = ("devices", "messages of a step", "of a loss", "of a return", "a step", "a loss", "a return stops for")
    report(
        args.out,
        "Scaling",
        TEXT,
        rows(real, toy),
        {"threads": real, "alone": toy},
        header=header,
    )


if __name__ == "__main__":
    main()
