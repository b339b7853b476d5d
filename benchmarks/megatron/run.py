"""Time of a step without failures: runflat, the same training written by hand as Megatron-LM does it, torch's DTensor.

    python benchmarks/megatron/run.py [--steps 150]

The three train the demo's llama from the same weights on the same sequences, 2 replicas x TP 2, with one thread per
process and buckets of the same size. They take turns step by step, in the same processes; a ratio is that of two
neighbouring steps, timed from a barrier until the slowest process is done. runflat's step is the whole of what
`worker.steps()` does: heartbeats, reports to the controller and the agreement that ends a step are in it.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from loop import SYSTEMS, Recorded, loop

from runflat.api import launch
from runflat.check.bench import arguments, report, spread

HERE = Path(__file__).parent
LAYOUT = {"tp": 2, "replicas": 2}
SEQ_LEN = 128
BATCH, MICRO_BATCH, BUCKET_MB = 16, 4, 1.0
WARM_UP = 6
"""Steps at the start that are not counted."""
LIMIT = 1.05
"""runflat's step over the one by hand, median."""
LOSS_TOLERANCE = 1e-5
"""Relative, in the first steps; later the rounding of float32 grows with every update."""
LOSS_STEPS = 10
NOTE = """Two replicas of two processes on this machine, gloo over loopback, float32. The weights of the one by hand are
those of transformers' llama: query, key and value (gate and up) are products of their own, not one fused product as in
Megatron-LM. Losses of the first {steps} steps agree to {error:.0e}."""


def train(folder: Path, steps: int) -> list[Recorded]:
    """Run all three for `steps` steps; what each process measured."""
    launch(
        loop,
        model={"preset": "demo", "vocab_size": 264},
        layout=LAYOUT,
        data={"seq_len": SEQ_LEN},
        train={
            "steps": steps,
            "global_batch": BATCH,
            "micro_batch": MICRO_BATCH,
            "bucket_mb": BUCKET_MB,
            "schedule": "constant",
            "lr": 1e-3,
            "memory_every": 0,
        },
        run=folder,
    )
    return [Recorded(**json.loads(path.read_text())) for path in sorted(folder.glob("measured-*.json"))]


def main() -> None:
    """Measures, writes result.json and README.md; exit code 1 where the losses differ."""
    parser = arguments(__doc__, HERE)
    parser.add_argument("--steps", type=int, default=150, help="of each of the three")
    args = parser.parse_args()
    steps = 30 if args.quick else args.steps
    with tempfile.TemporaryDirectory() as folder:
        recorded = train(Path(folder), steps + WARM_UP)
    seconds = {name: [max(step) for step in zip(*(r.seconds[name] for r in recorded), strict=True)] for name in SYSTEMS}
    seconds = {name: values[WARM_UP:] for name, values in seconds.items()}
    error = loss_error(recorded[0])
    rows, data = [], {"loss_error": error, "layout": LAYOUT, "seconds": seconds}
    for name in SYSTEMS:
        ratios = [ours / base for ours, base in zip(seconds[name], seconds["by hand"], strict=True)]
        data[name] = {"step_s": spread(seconds[name]), "over_by_hand": spread(ratios)}
        median, wanted = statistics.median(ratios), f"<= {LIMIT}" if name == "runflat" else ""
        rows.append((name, f"{statistics.median(seconds[name]) * 1e3:.0f} ms", f"{median:.3f}", wanted))
    text = f"{__doc__.partition(chr(10))[0]}\n\n{NOTE.format(steps=LOSS_STEPS, error=error)}"
    header = ("", "median step", "over the one by hand, median of pairs", "wanted")
    report(args.out, "Time of a step without failures", text, rows, data, header=header)
    if error > LOSS_TOLERANCE:
        sys.exit(f"the losses of the three differ by {error:.1e}, more than {LOSS_TOLERANCE:.0e}: they do not compare.")


def loss_error(recorded: Recorded) -> float:
    """Largest relative difference of a loss from the one by hand, over the first steps."""
    pairs: list[tuple[float, float]] = []
    for name in SYSTEMS:
        pairs += zip(recorded.losses[name][:LOSS_STEPS], recorded.losses["by hand"][:LOSS_STEPS], strict=True)
    return max(abs(ours - base) / base for ours, base in pairs)


if __name__ == "__main__":
    main()
