"""Spare domains that a fixed batch needs so that it never pauses: leave, lower degree, the same with more power.

    python experiments/spare_domains/run.py

Source: arXiv 2504.06095, Figure 7 (secondary): 90, 16, 0 over a 15-day trace at the Llama 3 rate with 5-day repair.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from runflat.report.claims import Claim, Row, figure, line, near, save_claim
from runflat.sim.presets import preset
from runflat.sim.spares import spare_domains_for
from runflat.sim.static import spares_needed
from runflat.traces.describe import down_steps

CHAINS = ("drop", "ntp", "ntp+boost")
PUBLISHED = {"drop": 90, "ntp": 16, "ntp+boost": 0}
SOURCE = "arXiv 2504.06095 Figure 7"


def peaks(draws: int) -> list[int]:
    """Most devices out at once in 15 days from an empty start, by draw: at most so many domains are hit."""
    config = preset("ntp-paper")
    assert config.failures is not None
    found = []
    for seed in range(draws):
        trace = config.failures.generate(
            num_devices=config.topology.num_devices,
            days=config.days,
            domain_size=config.cluster.domain_size,
            rng=np.random.default_rng(seed),
        )
        found.append(int(down_steps(trace)[1].max()))
    return found


def compute(draws: int = 2000) -> Claim:
    """The claim from that many traces."""
    config = preset("ntp-paper")
    found = peaks(draws)
    median, late, top = (int(np.quantile(found, q)) for q in (0.5, 0.95, 1.0))
    rows: list[Row] = [
        near(f"{chain}, 90 domains hit", PUBLISHED[chain], spares_needed(config, chain, 90), 0, SOURCE)
        for chain in CHAINS
    ]
    note = (
        f"at the stated rate and repair time the peak of {draws} draws is {median} (median), {late} (95th percentile), "
        f"{top} (highest), and {sum(peak >= 90 for peak in found)} draws reach 90: a cautious number"
    )
    rows.append(near("drop, median peak of our traces", median, spares_needed(config, "drop", median), 0, "peak", note))
    needed = spares_needed(config, "ntp", median)
    rows.append(
        Row(
            what="ntp, median peak of our traces",
            wanted=16,
            ours=needed,
            low=8,
            high=16,
            source=SOURCE,
            note="below 16, as a spare domain is used even where spare domains do not fill a whole replica",
        )
    )
    simulated = config.model_copy(update={"seeds": max(draws // 20, 5)})
    bounds = {"drop": (80, 100), "ntp": (8, 16), "ntp+boost": (0, 0)}
    for chain, (low, high) in bounds.items():
        need = spare_domains_for(simulated, chain, 0.99)
        what = f"{chain}, simulated, no pause in 99 % of {simulated.seeds} draws"
        wanted = PUBLISHED[chain]
        rows.append(Row(what=what, wanted=wanted, ours=need.spare_domains, low=low, high=high, source=SOURCE))
    hits = list(range(0, 131, 10))
    lines = [line(chain, hits, [spares_needed(config, chain, hit) for hit in hits]) for chain in CHAINS]
    return Claim(
        name="spare_domains",
        rows=tuple(rows),
        figure=figure("Fixed batch: spare domains for no pause", "domains that lack a device", "spare domains", lines),
        config={**config.model_dump(mode="json"), "peaks": found},
    )


if __name__ == "__main__":
    save_claim(compute(), Path(__file__).parent)
