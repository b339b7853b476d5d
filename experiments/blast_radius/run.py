"""Throughput lost when each failure takes more devices down, at an equal share of failed devices.

    python experiments/blast_radius/run.py

Source: arXiv 2504.06095, Figure 10 (secondary), without values: lower degrees lose more as the radius grows, and stay
far better than leaving.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from runflat.report.claims import Claim, Row, above, figure, line, save_claim
from runflat.sim.config import SimConfig
from runflat.sim.presets import preset
from runflat.sim.static import at_failed_share

BLOCKS = (1, 2, 4, 8)
SHARE = 0.004
CHAINS = ("drop", "ntp", "ntp+boost")
SOURCE = "arXiv 2504.06095 Figure 10, in words"


def question() -> SimConfig:
    """The paper's job, any reduced degree allowed, so that large radii have one."""
    config = preset("ntp-paper")
    return config.model_copy(update={"job": config.job.model_copy(update={"degrees": ()})})


def compute(draws: int = 200) -> Claim:
    """The claim from that many placements per point."""
    config = question()
    found: dict[str, list[float]] = {}
    watts: dict[str, list[float]] = {}
    for chain in CHAINS:
        results = [
            at_failed_share(config, chain, SHARE, draws=draws, rng=np.random.default_rng(block), block=block)
            for block in BLOCKS
        ]
        found[chain] = [1 - result.throughput.mean for result in results]
        watts[chain] = [result.watts.mean for result in results]
    rows: list[Row] = []
    for index, block in enumerate(BLOCKS):
        margin = found["drop"][index] - found["ntp"][index]
        rows.append(above(f"drop minus ntp, radius {block}", 0.0, margin, SOURCE))
    growth = [found["ntp"][index] * block for index, block in enumerate(BLOCKS)]
    rows.append(
        above("ntp, loss per hit group at radius 8 over radius 1", 1.0, growth[-1] / growth[0], SOURCE,
              "at an equal share of failed devices fewer groups are hit, each one harder")
    )  # fmt: skip
    lines = [line(chain, BLOCKS, found[chain]) for chain in CHAINS]
    return Claim(
        name="blast_radius",
        rows=tuple(rows),
        figure=figure("0.4 % of devices failed in blocks", "devices per failure", "throughput lost", lines),
        config={**config.model_dump(mode="json"), "watts": watts},
    )


if __name__ == "__main__":
    save_claim(compute(), Path(__file__).parent)
