"""Effective training time of Llama 3 405B: restart from checkpoints, with spare servers at hand.

    python experiments/llama3_effective_time/run.py

Source: arXiv 2407.21783, section 3.3.4: 466 interruptions in 54 days on 16,384 GPUs, over 90 % effective training time.
That bounds the mean loss per interruption at 16.7 minutes; what a restart took is not published, so it is varied.
"""

from __future__ import annotations

from pathlib import Path

from runflat.report.claims import Claim, Row, above, figure, line, near, save_claim
from runflat.sim.config import ClusterConfig, RecoveryConfig, SimConfig
from runflat.sim.experiment import run_all
from runflat.sim.presets import preset
from runflat.traces.generate import LLAMA3_DEVICE_DAYS, FailureSource, hardware_software

SOURCE = "arXiv 2407.21783 section 3.3.4"
DAY_MIN = 1440.0
RESTARTS_MIN = (5.0, 7.5, 10.0, 12.5, 15.0)
INTERVAL_S = 300.0


def question(restart_min: float, seeds: int) -> SimConfig:
    """The preset with all 466 interruptions, servers to replace failed ones, and one restart time."""
    base = preset("llama3")
    components = hardware_software(466, LLAMA3_DEVICE_DAYS, hardware_h=96, blast=8)
    return base.model_copy(
        update={
            # The cluster had 24K GPUs for this job of 16K.
            "cluster": ClusterConfig(hardware="h100", domain_size=8, spare_domains=200),
            "failures": FailureSource(components=components),
            "recovery": RecoveryConfig(
                detect_s=60, restart_s=60 * restart_min - 60, checkpoint_interval_s=INTERVAL_S, checkpoint_save_s=0.0
            ),
            "strategies": ("restart",),
            "seeds": seeds,
        }
    )


def compute(draws: int = 20) -> Claim:
    """The claim from that many draws per restart time."""
    found = []
    for restart_min in RESTARTS_MIN:
        config = question(restart_min, draws)
        (result,) = run_all(config, record=False)
        found.append((result.throughput.mean, config.failures_per_s() * 86_400))
    effective = [value for value, _ in found]
    # Spares fail too; only failures of the 16,384 devices at work interrupt.
    per_day = 466 / 54
    formula = [1 - per_day * (minutes + INTERVAL_S / 120) / DAY_MIN for minutes in RESTARTS_MIN]
    rows: list[Row] = [
        above("effective time, 10 min restarts", 0.90, effective[2], SOURCE),
        above("effective time, 12.5 min restarts", 0.90, effective[3], SOURCE),
    ]
    rows += [
        near(f"{minutes:g} min restarts", wanted, ours, 0.006, "1 - rate x (restart + half an interval)")
        for minutes, wanted, ours in zip(RESTARTS_MIN, formula, effective, strict=True)
    ]
    lines = [line("simulated", RESTARTS_MIN, effective, "o"), line("formula", RESTARTS_MIN, formula, "-", "simulated")]
    return Claim(
        name="llama3_effective_time",
        rows=tuple(rows),
        figure=figure("Llama 3 405B, 16,384 GPUs, 54 days", "minutes per restart", "effective training time", lines),
        config=question(10.0, draws).model_dump(mode="json"),
    )


if __name__ == "__main__":
    save_claim(compute(), Path(__file__).parent)
