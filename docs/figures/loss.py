"""Draws loss.svg from loss.json: the loss of two runs, one whole and one without a device, and how far they are apart.

loss.json holds what two runs wrote; to measure anew:
    runflat train examples/demo.toml --run runs/hurt
    the same file without its line `dead = ...`, with --run runs/whole
    python docs/figures/loss.py --measure runs/whole runs/hurt
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "runflat"  # the same file each time

import matplotlib.pyplot as plt  # noqa: E402 - the backend is chosen first

HERE = Path(__file__).parent
SHOWN = {"whole": ("TP 4 and TP 4", "#1f77b4"), "hurt": ("TP 4 and TP 3", "#d62728")}


def measured(run: Path) -> dict[str, Any]:
    """What the figure needs of a run's folder."""
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    return {
        "replicas": summary["replicas"],
        "sample_hash": summary["sample_hash"],
        "holdout_loss": summary["holdout_loss"],
        "loss": [step["loss"] for step in steps],
    }


def draw(data: dict[str, Any]) -> None:
    """Write loss.svg."""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7, 4.2), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    for name, (label, colour) in SHOWN.items():
        loss = data[name]["loss"]
        above.plot(range(1, len(loss) + 1), loss, colour, lw=4 if name == "whole" else 1.5, label=label)
    above.set_ylabel("loss, nats per byte")
    above.legend(frameon=False)
    pairs = list(zip(data["whole"]["loss"], data["hurt"]["loss"], strict=True))
    apart = [abs(hurt - whole) / whole for whole, hurt in pairs]
    below.semilogy(range(1, len(apart) + 1), [max(value, 1e-8) for value in apart], "#444444", lw=1.2)
    below.set_ylabel("relative difference")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(HERE / "loss.svg", metadata={"Date": None})


def main() -> None:
    """Draw, after reading two runs if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs=2, type=Path, metavar=("WHOLE", "HURT"), help="folders of the two runs")
    runs = parser.parse_args().measure
    result = HERE / "loss.json"
    if runs:
        found = dict(zip(SHOWN, map(measured, runs), strict=True))
        if found["whole"]["sample_hash"] != found["hurt"]["sample_hash"]:
            parser.error("the two runs used different sequences")
        result.write_text(json.dumps(found, indent=1) + "\n")
    draw(json.loads(result.read_text()))


if __name__ == "__main__":
    main()
