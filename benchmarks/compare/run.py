"""Every strategy on the recorded two-failure trace, each goodput against a prediction from other runs.

    python benchmarks/compare/run.py --strategies ntp drop spare,ntp --spares 1 --measure 0 1 2

Runs `runflat compare` on examples/compare.toml under traces drawn from the seeds of --measure (two kills, other
devices, steps and phases), takes the phase times of each strategy from them (medians), predicts the run under
examples/two_failures.json from these, the events and the declared device rate, and then makes that run. Writes
result.json and README.md beside itself: goodput and prediction of each strategy, their ratio, the strategies' order.
Exit code 1 if a prediction is off by more than 3 % or the order of ntp, drop and restart is not theirs.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from runflat.check.bench import arguments, report
from runflat.cluster.events import parse_events
from runflat.commands.config_files import load_config
from runflat.commands.models import section_config
from runflat.config import TrainConfig
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.sim.config import JobConfig
from runflat.sim.measured import measured_costs
from runflat.sim.replay import replay_emulated

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONFIG = ROOT / "examples" / "compare.toml"
TRACE = ROOT / "examples" / "two_failures.json"
TOLERANCE = 0.03
ORDER = ("ntp", "drop", "restart")
"""Goodput falls in this order, among those that were run."""
TIMEOUT_S = 3600
QUICK_STEPS = 16


def drawn_trace(seed: int, config: TrainConfig) -> str:
    """Two kills in different replicas and at different slots, as the injector reads them."""
    chance = random.Random(seed)
    replicas = chance.sample(range(config.layout.replicas), 2)
    slots = chance.sample(range(config.layout.tp), 2)
    steps = (chance.randrange(6, 12), chance.randrange(18, 26))
    rows = [
        {"event": "kill", "device": f"{replica}:{slot}", "step": step, "phase": chance.choice(("forward", "backward"))}
        for replica, slot, step in zip(replicas, slots, steps, strict=True)
    ]
    return json.dumps(rows)


def compare(trace: Path, strategies: Sequence[str], spares: int, steps: int, folder: Path) -> list[dict[str, Any]]:
    """What `runflat compare` found; its runs stand in `folder`."""
    command = [sys.executable, "-m", "runflat.cli", "compare", str(CONFIG), "--inject", str(trace), "--json"]
    command += ["--strategies", *strategies, "--run", str(folder), "--train.steps", str(steps)]
    if spares:
        command += ["--spares", str(spares)]
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=TIMEOUT_S, stdout=subprocess.PIPE, text=True)
    runs: list[dict[str, Any]] = json.loads(done.stdout)["runs"]
    return runs


def predict(config: TrainConfig, chain: str, spares: int, steps: int, runs: Sequence[Path]) -> float:
    """Goodput that the simulator says for `chain` on the recorded trace, with the phase times of `runs`."""
    layout, train = config.layout, config.train
    local_batch = train.global_batch // layout.replicas
    assert config.device.rate_tflops is not None
    model = build_meta_model(section_config(config.model), torch.float32, None)
    return replay_emulated(
        read_rules(model, layout.tp).spec,
        JobConfig(tp=layout.tp, dp=layout.replicas, local_batch=local_batch, seq_len=config.data.seq_len),
        chain,
        parse_events(TRACE.read_text()),
        num_steps=steps,
        rate_flops=config.device.rate_tflops * 1e12,
        costs=measured_costs(runs, train.memory_every),
        spare_devices=spares if "spare" in chain.split(",") else 0,
    ).goodput


def main() -> int:
    """Measure, predict, run, judge; returns the exit code."""
    parser = arguments(__doc__, HERE)
    parser.add_argument("--strategies", nargs="+", default=["ntp", "drop", "spare,ntp"])
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--measure", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    if args.quick:  # nothing is judged
        args.strategies, args.measure = ["ntp", "drop"], [0]
    config = load_config(CONFIG)
    steps = QUICK_STEPS if args.quick else config.train.steps
    spares = args.spares if any("spare" in chain.split(",") for chain in args.strategies) else 0
    folder = Path(tempfile.mkdtemp(prefix="compare-"))
    print(f"runs: {folder}")
    for seed in args.measure:
        trace = folder / f"trace-{seed}.json"
        trace.write_text(drawn_trace(seed, config))
        compare(trace, args.strategies, spares, steps, folder / f"measure-{seed}")
    predicted = {}
    for chain in args.strategies:
        runs = [folder / f"measure-{seed}" / chain.replace(",", "+") for seed in args.measure]
        predicted[chain] = predict(config, chain, spares, steps, runs)
    rows = compare(TRACE, args.strategies, spares, steps, folder / "judged")
    found: dict[str, Any] = {}
    for row in rows:
        chain, goodput = row["strategies"], row["goodput"]
        error = predicted[chain] / goodput - 1 if goodput else None
        found[chain] = {**row, "goodput_predicted": predicted[chain], "goodput_error": error}
    ordered = [found[chain]["goodput"] or 0.0 for chain in ORDER if chain in found]
    in_order = ordered == sorted(ordered, reverse=True)
    close = all(
        entry["goodput_error"] is not None and abs(entry["goodput_error"]) <= TOLERANCE for entry in found.values()
    )
    result = {"spares": spares, "measured_seeds": args.measure, "in_order": in_order, "close": close, "runs": found}
    table = [
        (
            f"{chain} (emulated): goodput, and as predicted",
            f"{row['goodput']:.4f}, {row['goodput_predicted']:.4f}",
            "3 %",
        )
        for chain, row in found.items()
    ]
    table.append((f"goodput falls from {', '.join(ORDER)}", str(in_order), "True"))
    report(args.out, "Strategies on one trace", __doc__.partition("\n\n")[0], table, result)
    return 0 if args.quick or (in_order and close) else 1


if __name__ == "__main__":
    sys.exit(main())
