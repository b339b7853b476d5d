"""Every strategy on the recorded two-failure trace, each goodput against a prediction from other runs.

    python benchmarks/compare/run.py --strategies ntp drop spare,ntp --spares 1 --measure 0 1 2

Runs `runflat compare` on examples/compare.toml under traces drawn from the seeds of --measure (two kills, other
devices, steps and phases), takes the phase times of each strategy from them (medians), predicts the run under
examples/two_failures.json from these, the events and the declared device rate, and then makes that run. Writes
result.json beside itself: goodput and prediction of each strategy, their ratio, the order of the strategies.
Exit code 1 if a prediction is off by more than 3 % or the order of ntp, drop and restart is not theirs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from runflat.cluster.events import parse_events
from runflat.commands.config_files import load_config
from runflat.commands.models import section_config
from runflat.config import TrainConfig
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.sim.config import ClusterConfig, JobConfig, RecoveryConfig, SimConfig
from runflat.sim.emulated import emulated_line
from runflat.sim.measured import measured_recovery, read_incidents
from runflat.sim.replay import EMULATED_PARTS, replay
from runflat.traces.generate import Component, FailureSource

ROOT = Path(__file__).parents[2]
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


def start_s(run: Path) -> float:
    """Seconds before the first step."""
    first = json.loads((run / "steps.jsonl").read_text().splitlines()[0])
    return float(first["time_s"] - first["step_s"])


def predict(config: TrainConfig, chain: str, spares: int, steps: int, runs: Sequence[Path]) -> float:
    """Goodput that the simulator says for `chain` on the recorded trace, with the phase times of `runs`."""
    layout, train = config.layout, config.train
    model = build_meta_model(section_config(config.model), torch.float32, None)
    started = statistics.median(start_s(run) for run in runs)
    costs = measured_recovery(
        read_incidents(run / "events.jsonl" for run in runs),
        RecoveryConfig(join_s=0, checkpoint_save_s=0, start_s=started),
    )
    question = SimConfig(
        job=JobConfig(
            tp=layout.tp,
            dp=layout.replicas,
            local_batch=train.global_batch // layout.replicas,
            seq_len=config.data.seq_len,
        ),
        cluster=ClusterConfig(domain_size=layout.tp, spare_devices=spares if "spare" in chain.split(",") else 0),
        failures=FailureSource(components=(Component(name="none", per_device_day=0.0),)),
        recovery=costs,
    )
    assert config.device.rate_tflops is not None
    line = emulated_line(
        read_rules(model, layout.tp).spec,
        tp_full=layout.tp,
        seq_len=config.data.seq_len,
        rate_flops=config.device.rate_tflops * 1e12,
    )
    events = parse_events(TRACE.read_text())
    return replay(question, chain, events, num_steps=steps, line=line, parts=EMULATED_PARTS).goodput


def main() -> int:
    """Measure, predict, run, judge; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["ntp", "drop", "spare,ntp"])
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--measure", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--quick", action="store_true", help="ntp and drop, one seed, the first failure; nothing is judged"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of result.json")
    args = parser.parse_args()
    if args.quick:
        args.strategies, args.measure = ["ntp", "drop"], [0]
    config = load_config(CONFIG)
    steps = QUICK_STEPS if args.quick else config.train.steps
    args.out.mkdir(parents=True, exist_ok=True)
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
    (args.out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for chain, entry in found.items():
        print(f"{chain:<16} goodput {entry['goodput']}, predicted {entry['goodput_predicted']:.4f}")
    print(f"order as expected: {in_order}; all within {TOLERANCE:.0%}: {close}")
    return 0 if args.quick or (in_order and close) else 1


if __name__ == "__main__":
    sys.exit(main())
