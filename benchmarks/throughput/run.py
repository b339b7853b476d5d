"""Tokens per second of emulated devices after losses, against what the surviving devices could do at best.

    python benchmarks/throughput/run.py

Everything here is emulated: computation and collectives are real, durations are declared. 12 heads and FFN blocks that
divide by 12; the batch divides by what the replicas can do. Rates are medians between commits.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from runflat.check.bench import arguments, report
from runflat.check.live import Command, Watch, until
from runflat.plan.plan import plan_from_json
from runflat.plan.units import unit_bytes
from runflat.train.checkpoint import newest_checkpoint

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LOSS_STEP, STEPS = 15, 30
STATE_BYTES = 3 * 4
"""Per element: weight and two moments."""
MODEL = (
    "--model.preset tiny --model.hidden-size 96 --model.num-heads 12 --model.num-kv-heads 12 --model.head-dim 8 "
    "--model.vocab-size 264 --data.seq-len 32"
)
CASES: dict[str, tuple[str, float, tuple[str, ...], float, float]] = {
    "2 x TP 4, one of eight lost": (
        "--layout.tp 4 --layout.replicas 2 --train.global-batch 14", 1e-4, ("1:2",), 7 / 8, 0.97
    ),
    "3 replicas at degrees 4, 3, 2": (
        "--layout.tp 4 --layout.replicas 3 --train.global-batch 18", 8e-5, ("1:2", "2:1", "2:3"), 9 / 12, 0.95
    ),
}  # fmt: skip
"""Flags, TFLOP/s, devices that are lost, fraction that survives, part of it that is wanted."""


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Runs one case; returns rates before and after the loss, and the bytes that moved."""
    flags, rate_tflops, lost, fraction, wanted = CASES[name]
    run, injected = folder / str(len(lost)), folder / "events.json"
    kills = [{"event": "kill", "device": device, "step": LOSS_STEP, "phase": "backward"} for device in lost]
    injected.write_text(json.dumps(kills))
    command = ["train", "--run", str(run), *MODEL.split(), *flags.split(), "--train.steps", str(STEPS)]
    command += ["--devices", "emulated", "--device.rate-tflops", str(rate_tflops), "--inject", str(injected)]
    watch = Watch(run)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with Command(command, folder / "log", environment) as started:
        until(f"the end of {name}", lambda: started.process.poll() is not None, 600)
        if started.process.returncode:
            sys.exit(f"{name} ended with code {started.process.returncode}:\n{started.output()}")
    summary = watch.summary()
    before, after = rate(watch, 0), rate(watch, summary["generation"])
    return {
        "healthy_steps_per_s": before,
        "hurt_steps_per_s": after,
        "ratio": after / before,
        "surviving_fraction": fraction,
        "part_of_fraction": after / before / fraction,
        "wanted_part": wanted,
        "bytes_moved": sum(incident["bytes_moved"] for incident in summary["incidents"]),
        "bytes_lost": sum(shard_bytes(watch, device) for device in lost),
        "emulated": summary["emulated"],
    }


def rate(watch: Watch, generation: int) -> float:
    """Steps per second under a generation."""
    times = [row["time_s"] for row in watch.steps() if row["generation"] == generation]
    return 1 / statistics.median(later - earlier for earlier, later in pairwise(times))


def shard_bytes(watch: Watch, device: str) -> int:
    """Weights and moments of the units that a device held before any loss."""
    spec = newest_checkpoint(watch.run, lambda text: sys.exit(text)).spec
    plan = plan_from_json((watch.run / "plans" / "generation-000000.json").read_text())
    place = plan.place(device)
    assert place is not None
    held = plan.replica(place[0]).held(spec.kinds, place[1])
    return sum(unit_bytes(spec, kind, unit, STATE_BYTES) for kind, units in held.items() for unit in units)


def main() -> None:
    """Measures, writes result.json and README.md. It is quick as it is."""
    args = arguments(__doc__, HERE).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = {name: measure(name, Path(folder)) for name in CASES}
    rows = []
    for name, result in results.items():
        part, wanted = result["part_of_fraction"], result["wanted_part"]
        rows += [
            (f"{name}: rate against the surviving fraction", f"{part:.3f}", f">= {wanted}"),
            (f"{name}: bytes moved against bytes lost", f"{result['bytes_moved'] / result['bytes_lost']:.3f}", "1"),
            (f"{name}: emulated clocks were kept", str(result["emulated"]["valid"]), "True"),
        ]
    report(args.out, "Throughput after losses (emulated)", __doc__.partition("\n\n")[0], rows, results)


if __name__ == "__main__":
    main()
