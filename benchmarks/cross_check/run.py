"""The simulator against the runtime: runs on emulated devices with injected failures, predicted from other runs.

    python benchmarks/cross_check/run.py --measure 0 1 2 3 4 --judge 5 6 7 8 9

Each seed is a training run with two kills (and, with --returns, one return). Recovery phases are medians over the
measured seeds, and so are the seconds before the first step; only the events and the declared device rate are those of
the judged run. Compared are goodput, each ledger category as a share of all device-time, and the plans, which must be
identical. Writes result.json and README.md beside itself. A judged run whose clock was late shows it in its step times.
With --keep, runs that are in the folder already are taken as they are.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from runflat.check.bench import arguments, report
from runflat.cluster.events import parse_events
from runflat.commands.models import section_config
from runflat.config import ModelSection
from runflat.elastic.assemble import layout_planner
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.plan import plan_from_json
from runflat.sim.config import JobConfig, RecoveryConfig
from runflat.sim.measured import measured_costs
from runflat.sim.replay import ReplayResult, replay_emulated

HERE = Path(__file__).parent
TP, DP, LOCAL, SEQ_LEN, STEPS, RATE_TFLOPS = 4, 2, 7, 64, 14, 4e-5
PHASES = ("forward", "backward")


def scenario(seed: int, returns: bool) -> str:
    """Two kills in different replicas, and a return of the first; as the injector reads it."""
    chance = random.Random(seed)
    first, second = chance.sample(range(DP), 2)
    rows: list[dict[str, object]] = [
        {"event": "kill", "device": f"{first}:{chance.randrange(TP)}", "step": 3, "phase": chance.choice(PHASES)},
        {"event": "kill", "device": f"{second}:{chance.randrange(TP)}", "step": 7, "phase": chance.choice(PHASES)},
    ]
    if returns:
        rows.append({"event": "return", "device": rows[0]["device"], "step": 9})
    return json.dumps(rows)


def train(seed: int, folder: Path, returns: bool, keep: bool, rate_tflops: float = RATE_TFLOPS) -> Path:
    """The run folder of a seed, after the run."""
    run, injected = folder / f"seed-{seed}", folder / f"seed-{seed}.json"
    if keep and (run / "summary.json").is_file():
        return run
    injected.write_text(scenario(seed, returns))
    flags = {
        "--run": run, "--layout.tp": TP, "--layout.replicas": DP, "--model.preset": "tiny",
        "--train.steps": STEPS, "--train.warmup_steps": 2, "--train.global_batch": DP * LOCAL,
        "--data.seq_len": SEQ_LEN, "--devices": "emulated", "--device.rate_tflops": rate_tflops,
        "--inject": injected,
    }  # fmt: skip
    argv = [str(part) for flag in flags.items() for part in flag]
    subprocess.run([sys.executable, "-m", "runflat.cli", "train", *argv], check=True, timeout=600)
    return run


def predict(costs: RecoveryConfig, injected: str) -> ReplayResult:
    """What the simulator says of a run with these faults."""
    model = build_meta_model(section_config(ModelSection(preset="tiny")), torch.float32, None)
    return replay_emulated(
        read_rules(model, TP).spec,
        JobConfig(tp=TP, dp=DP, local_batch=LOCAL, seq_len=SEQ_LEN),
        "ntp,drop",
        parse_events(injected),
        num_steps=STEPS,
        rate_flops=RATE_TFLOPS * 1e12,
        costs=costs,
    )


def same_plans(run: Path, predicted: ReplayResult) -> bool:
    """Whether the predicted decisions give the plans that were in force, device by device and unit by unit.

    Numbers of generations are the runtime's: it may use one up without a plan coming of it.
    """
    model = build_meta_model(section_config(ModelSection(preset="tiny")), torch.float32, None)
    planner = layout_planner(
        read_rules(model, TP).spec, tp=TP, replicas=DP, num_sequences=DP * LOCAL, seq_len=SEQ_LEN, element_bytes=4
    )
    generations = {json.loads(line)["generation"] for line in (run / "steps.jsonl").read_text().splitlines()}
    plans = [plan_from_json(path.read_text()) for path in sorted((run / "plans").glob("*.json"))]
    first, *recorded = [plan for plan in plans if plan.generation in generations]
    decisions = [decision for _, decision in predicted.decisions]
    built = []
    for decision, plan in zip(decisions, recorded, strict=False):
        built.append(planner.plan(decision, plan.generation, first))
        first = built[-1]
    return built == recorded and len(decisions) == len(recorded)


def compare(run: Path, predicted: ReplayResult) -> dict[str, Any]:
    """Errors of a prediction: of goodput relative, of each category in shares of all device-time."""
    summary = json.loads((run / "summary.json").read_text())
    total = sum(summary["device_s"].values())
    ledger = predicted.totals.ledger
    ours = {name: seconds / ledger.total_device_s for name, seconds in ledger.to_json().items()}
    errors = {name: ours[name] - seconds / total for name, seconds in summary["device_s"].items()}
    steps = [json.loads(line)["step_s"] for line in (run / "steps.jsonl").read_text().splitlines()]
    return {
        "goodput": summary["goodput"],
        "goodput_predicted": predicted.goodput,
        "goodput_error": predicted.goodput / summary["goodput"] - 1,
        "category_errors": errors,
        "largest_category_error": max(abs(error) for error in errors.values()),
        "plans_identical": same_plans(run, predicted),
        "step_s": steps,
    }


def cross_check(
    measure: list[int], judge: list[int], folder: Path, *, returns: bool = False, keep: bool = False
) -> dict[str, Any]:
    """All judged seeds, by number, after the measured ones gave their phase times."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = [train(seed, folder, returns, keep) for seed in measure]
    costs = measured_costs(runs)
    found: dict[str, Any] = {}
    for seed in judge:
        run = train(seed, folder, returns, keep)
        found[str(seed)] = compare(run, predict(costs, scenario(seed, returns)))
    return {"costs": costs.model_dump(mode="json"), "measured": measure, "judged": found}


def main() -> None:
    """Runs, judges, writes result.json and README.md."""
    parser = arguments(__doc__, HERE)
    parser.add_argument("--measure", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--judge", type=int, nargs="+", default=[5, 6, 7, 8, 9])
    parser.add_argument("--runs", type=Path, default=Path("runs/cross_check"))
    parser.add_argument("--returns", action="store_true")
    parser.add_argument("--keep", action="store_true")
    given = parser.parse_args()
    measure, judge = ([0], [5]) if given.quick else (given.measure, given.judge)
    result = cross_check(measure, judge, given.runs, returns=given.returns, keep=given.keep)
    rows = []
    for seed, found in result["judged"].items():
        rows += [
            (
                f"seed {seed} (emulated): goodput, and as predicted",
                f"{found['goodput']:.4f}, {found['goodput_predicted']:.4f} ({100 * found['goodput_error']:+.2f} %)",
                "within 3 %",
            ),
            (
                f"seed {seed} (emulated): largest error of a ledger category",
                f"{100 * found['largest_category_error']:.2f} % of all time",
                "<= 3 %",
            ),
            (f"seed {seed} (emulated): plans", "identical" if found["plans_identical"] else "DIFFER", "identical"),
        ]
    report(given.out, "Simulator against runtime", __doc__.partition("\n\n")[0], rows, result)


if __name__ == "__main__":
    main()
