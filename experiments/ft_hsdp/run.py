"""98,304 GPUs in 12 replicas, a failure each 18 minutes: everybody restarts, or one replica is out for a while.

    python experiments/ft_hsdp/run.py

Source: arXiv 2602.00277 (abstract; details secondary): 44 % with 10-minute restarts, 80 % with 3-minute stalls. The
published numbers follow from regular failures; failures by chance are shown beside them.
"""

from __future__ import annotations

from pathlib import Path

from runflat.plan.batch import BatchRule
from runflat.report.claims import Claim, Row, figure, line, near, save_claim
from runflat.sim.closed_form import replica_out_goodput, restart_goodput
from runflat.sim.config import ClusterConfig, JobConfig, RecoveryConfig, SimConfig
from runflat.sim.experiment import make_trace, simulate
from runflat.sim.job import Totals
from runflat.traces.generate import Component, FailureSource, Repair
from runflat.traces.trace import DAY_S, FailureTrace, build_trace

SOURCE = "arXiv 2602.00277"
GAP_S, RESTART_S, STALL_S = 18 * 60.0, 600.0, 180.0
NUM_REPLICAS, REPLICA = 12, 8192
DAYS = 3.0


def question(spare_domains: int, gap_s: float = GAP_S) -> SimConfig:
    """Twelve replicas of 1,024 servers; one spare server to restart on."""
    rate = DAY_S / gap_s / (NUM_REPLICAS * REPLICA)
    failures = Component(name="any", per_device_day=rate, repair=Repair(hours=RESTART_S / 3600))
    return SimConfig(
        name="ft-hsdp",
        cluster=ClusterConfig(domain_size=8, spare_domains=spare_domains),
        job=JobConfig(tp=8, pp=REPLICA // 8, dp=NUM_REPLICAS, local_batch=4096, step_s=30),
        failures=FailureSource(components=(failures,)),
        recovery=RecoveryConfig(
            detect_s=0, reform_s=STALL_S, transfer_s=0, join_s=0, restart_s=RESTART_S,
            checkpoint_save_s=0, checkpoint_interval_s=1.0, discard_step=False,
        ),
        rule=BatchRule.FLEXIBLE,
        days=DAYS,
        repack=False,
    )  # fmt: skip


def regular(spare_domains: int) -> FailureTrace:
    """A failure each 18 minutes, in one replica after the other."""
    count = int(DAYS * DAY_S / GAP_S)
    rows = [(GAP_S * (i + 0.5), RESTART_S, i % NUM_REPLICAS * REPLICA, "regular") for i in range(count)]
    num_devices = question(spare_domains).topology.num_devices
    return build_trace(rows, num_devices=num_devices, span_s=DAYS * DAY_S)


def share(totals: Totals, config: SimConfig) -> float:
    """Sequences over those of the healthy job."""
    return totals.sequences / (config.job.dp * config.job.local_batch / config.job.step_s * totals.wall_s)


def compute(draws: int = 5) -> Claim:
    """The claim; ``draws`` traces by chance for the sensitivity."""
    spared, plain = question(4), question(0)
    together = share(simulate(spared, "restart", regular(4)), spared)
    apart = share(simulate(plain, "drop", regular(0)), plain)
    rows: list[Row] = [
        near("restart of all, regular failures", 0.444, together, 0.002, SOURCE),
        near("one replica out, regular failures", 0.801, apart, 0.003, SOURCE),
        near("formula, restart", 0.444, restart_goodput(GAP_S, RESTART_S), 0.001, SOURCE),
        near("formula, one out", 0.801, replica_out_goodput(GAP_S, STALL_S, RESTART_S, NUM_REPLICAS), 0.001, SOURCE),
    ]
    chance = {
        name: sum(share(simulate(config, name, make_trace(config, seed)), config) for seed in range(draws)) / draws
        for name, config in (("restart", spared), ("drop", plain))
    }
    # Failures at random instants: P(no other within x) = exp(-x / gap), so the time up is exp(-restart / gap).
    rows.append(
        near("restart of all, failures by chance", 0.574, chance["restart"], 0.04, "exp(-10 / 18)",
             "better than regular ones, as failures that fall into a restart cost less")
    )  # fmt: skip
    gaps = [6.0, 12.0, 18.0, 36.0, 72.0]
    lines = [
        line("all restart (formula)", gaps, [max(restart_goodput(gap * 60, RESTART_S), 0) for gap in gaps]),
        line("one replica out (formula)", gaps, [
            max(replica_out_goodput(gap * 60, STALL_S, RESTART_S, NUM_REPLICAS), 0) for gap in gaps
        ]),
        line("simulated, regular", [18.0, 18.0], [together, apart], "s"),
        line("simulated, by chance", [18.0, 18.0], [chance["restart"], chance["drop"]], "x"),
    ]  # fmt: skip
    return Claim(
        name="ft_hsdp",
        rows=tuple(rows),
        figure=figure("98,304 GPUs in 12 replicas", "minutes between failures", "goodput", lines),
        config=plain.model_dump(mode="json"),
    )


if __name__ == "__main__":
    save_claim(compute(), Path(__file__).parent)
