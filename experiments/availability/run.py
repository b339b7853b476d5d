"""Share of tensor-parallel groups without a failed device, by degree: closed form and placement by chance.

    python experiments/availability/run.py

Source: arXiv 2504.06095, Figure 3 (secondary: TP 64 falls to 94 % at 0.1 % failed); the closed form is (1 - f) ** TP.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from runflat.report.claims import Claim, Row, figure, line, near, save_claim
from runflat.sim.closed_form import availability
from runflat.sim.config import ClusterConfig, JobConfig, SimConfig
from runflat.sim.static import whole_groups
from runflat.traces.generate import Component, FailureSource

SHARES = (0.0005, 0.001, 0.002, 0.003, 0.004)
DEGREES = (8, 16, 32, 64, 72)
NUM_DEVICES = 32_768


def question(tp: int) -> SimConfig:
    """About 32K devices in domains of the degree."""
    return SimConfig(
        name=f"tp{tp}",
        cluster=ClusterConfig(domain_size=tp),
        job=JobConfig(tp=tp, dp=NUM_DEVICES // tp),
        failures=FailureSource(components=(Component(name="none", per_device_day=0.0),)),
    )


def compute(draws: int = 1000) -> Claim:
    """The claim from that many placements per point."""
    rows: list[Row] = []
    lines = []
    for tp in DEGREES:
        rng = np.random.default_rng(tp)
        results = [whole_groups(question(tp), share, draws=draws, rng=rng) for share in SHARES]
        found = [share.mean for _, share in results]
        formula = [availability(failed, tp) for failed, _ in results]
        lines += [
            line(f"TP {tp}, placed", SHARES, found, "o"),
            line(f"TP {tp}, formula", SHARES, formula, "-", f"TP {tp}, placed"),
        ]
        rows += [
            near(f"TP {tp} at {100 * share:g} % failed", wanted, ours, 0.001, "closed form")
            for share, wanted, ours in zip(SHARES, formula, found, strict=True)
        ]
    ours = next(row.ours for row in rows if row.what.startswith("TP 64 at 0.1 "))
    rows.append(near("TP 64 at 0.1 % failed, as published", 0.94, ours, 0.003, "arXiv 2504.06095 Figure 3"))
    return Claim(
        name="availability",
        rows=tuple(rows),
        figure=figure("Groups without a failed device", "share of devices failed", "share of groups", lines),
        config=question(64).model_dump(mode="json"),
    )


if __name__ == "__main__":
    save_claim(compute(), Path(__file__).parent)
