"""Draws loss.svg from loss.json: a run that loses a device and takes it back, and the same run without a failure.

loss.json holds what two runs wrote; to measure anew:
    runflat demo --run runs/demo
    runflat train --resume runs/demo/whole
    python docs/figures/loss.py --measure runs/demo/whole runs/demo/hurt
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
SHOWN = {"whole": ("without a failure", "#1f77b4"), "hurt": ("a device is killed and returns", "#d62728")}
SMALLEST = 1e-8
"""Where the axis of the difference begins; equal losses are not drawn."""


def measured(run: Path) -> dict[str, Any]:
    """What the figure needs of a run's folder."""
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    return {
        "sample_hash": summary["sample_hash"],
        "holdout_loss": summary["holdout_loss"],
        "loss": [step["loss"] for step in steps],
        "degrees": [degrees(run, step["generation"]) for step in steps],
    }


def degrees(run: Path, generation: int) -> list[int]:
    """Live devices of each replica under the plan of `generation`."""
    plan = json.loads((run / "plans" / f"generation-{generation:06d}.json").read_text())
    return [sum(device is not None for device in replica["devices"]) for replica in plan["replicas"]]


def draw(data: dict[str, Any]) -> None:
    """Write loss.svg."""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7, 4.2), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    for name, (label, colour) in SHOWN.items():
        loss = data[name]["loss"]
        above.plot(range(1, len(loss) + 1), loss, colour, lw=4 if name == "whole" else 1.5, label=label)
    full = data["hurt"]["degrees"][0]
    hurt = [number for number, now in enumerate(data["hurt"]["degrees"], 1) if now != full]
    for axes in (above, below):
        axes.axvspan(min(hurt) - 0.5, max(hurt) + 0.5, color="#888888", alpha=0.2, lw=0)
    low = " and ".join(f"TP {degree}" for degree in data["hurt"]["degrees"][min(hurt) - 1])
    above.text(max(hurt) + 1, max(data["whole"]["loss"]) * 0.85, f"grey: {low}", color="#444444")
    above.set_ylabel("loss, nats per byte")
    above.legend(frameon=False)
    pairs = list(zip(data["whole"]["loss"], data["hurt"]["loss"], strict=True))
    apart = [abs(one - other) / other for other, one in pairs]
    below.semilogy(range(1, len(apart) + 1), [value or None for value in apart], "o", color="#444444", ms=2.5)
    below.set_ylim(bottom=SMALLEST)
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
