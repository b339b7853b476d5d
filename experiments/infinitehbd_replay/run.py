"""All strategies on a recorded failure trace of 400 servers, and what repair times of the wrong shape would have said.

    python experiments/infinitehbd_replay/run.py --trace fault_trace.json

The trace is stepfun-ai/InfiniteHBD-Trace (Apache-2.0), which is not part of this repository. A row is a server out of
service, drains included; how many of its GPUs failed is not recorded, so two readings are shown: the whole server (in
domains of eight servers, TP 64), and one GPU of it (TP 8).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from runflat.plan.batch import BatchRule
from runflat.report.claims import Claim, Row, above, figure, line, near, save_claim
from runflat.sim.config import ClusterConfig, JobConfig, PowerConfig, RecoveryConfig, SimConfig
from runflat.sim.experiment import healthy_sequences_per_s, simulate
from runflat.traces.describe import DOWN_QUANTILES, describe, down_quantiles
from runflat.traces.generate import Component, FailureSource, source_like
from runflat.traces.readers import read_trace
from runflat.traces.trace import DAY_S, FailureTrace

NUM_NODES, NODE = 400, 8
WANTED = (0.0175, 0.055, 0.0775)
SOURCE = "InfiniteHBD-Trace, computed independently"
CHAINS = ("restart", "drop,restart", "ntp,drop,restart", "ntp+boost,drop,restart")


def question(tp: int, days: float) -> SimConfig:
    """3,200 GPUs in domains of ``tp``, with the recorded failures given by hand."""
    return SimConfig(
        name=f"infinitehbd-tp{tp}",
        cluster=ClusterConfig(domain_size=tp),
        job=JobConfig(tp=tp, dp=NUM_NODES * NODE // tp, local_batch=16, step_s=20),
        failures=FailureSource(components=(Component(name="none", per_device_day=0.0),)),
        recovery=RecoveryConfig(restart_to_rejoin=True),
        power=PowerConfig(curve="ntp", tdp_w=1200, nominal_w=960, max_w=1200),
        rule=BatchRule.CONSTANT,
        days=days,
    )


def readings(trace: FailureTrace) -> dict[str, tuple[int, FailureTrace]]:
    """(degree, trace of devices) of the two readings."""
    one = replace(trace, device=trace.device * NODE, num_devices=NUM_NODES * NODE, names=())
    return {"server, TP 64": (64, trace.expand_nodes(NODE)), "one GPU, TP 8": (8, one)}


def goodputs(trace: FailureTrace) -> dict[str, dict[str, float]]:
    """Goodput by reading and chain."""
    found: dict[str, dict[str, float]] = {}
    for name, (tp, devices) in readings(trace).items():
        config = question(tp, trace.span_s / DAY_S)
        healthy = healthy_sequences_per_s(config)
        found[name] = {}
        for chain in CHAINS:
            totals = simulate(config, chain, devices)
            found[name][chain] = totals.sequences / (healthy * totals.wall_s)
    return found


def resampled(trace: FailureTrace, source: FailureSource, draws: int) -> list[float]:
    """Mean quantiles of servers out at once when failures come by chance, at :data:`DOWN_QUANTILES`."""
    days = trace.span_s / DAY_S
    drawn = [
        down_quantiles(
            source.generate(num_devices=NUM_NODES, days=days, domain_size=1, rng=np.random.default_rng(seed))
        )
        for seed in range(draws)
    ]
    return np.mean(np.array(drawn), axis=0).tolist()


def redrawn(trace: FailureTrace, kind: str, draws: int) -> list[float]:
    """The same with the recorded arrivals, and repair times shuffled or drawn from an exponential of their mean."""
    rng = np.random.default_rng(0)
    mean_s = float(trace.duration_s.mean())
    drawn = []
    for _ in range(draws):
        duration_s = rng.permutation(trace.duration_s) if kind == "shuffled" else rng.exponential(mean_s, len(trace))
        drawn.append(down_quantiles(replace(trace, duration_s=duration_s)))
    return np.mean(np.array(drawn), axis=0).tolist()


def compute(path: Path, draws: int = 20) -> Claim:
    """The claim for the trace in a file."""
    trace = read_trace(path, num_devices=NUM_NODES)
    facts = describe(trace)
    rows: list[Row] = [
        near(f"servers out at p{int(100 * q)}", wanted, ours, 0.0001, SOURCE)
        for q, wanted, ours in zip(DOWN_QUANTILES, WANTED, facts.down_quantiles, strict=True)
    ]
    found = goodputs(trace)
    for name, by_chain in found.items():
        values = [by_chain[chain] for chain in CHAINS]
        for better, worse, margin in zip(CHAINS[1:], CHAINS, np.diff(values), strict=False):
            rows.append(above(f"{name}: {better} minus {worse}", 0.0, float(margin), "order of the strategies"))
    empirical = source_like(trace).model_copy(update={"burn_in_days": 150.0})
    exponential = source_like(trace, repair="exponential").model_copy(update={"burn_in_days": 150.0})
    bursty = empirical.model_copy(update={"burst_shape": 0.62, "weak_node_shape": 0.9, "node_size": 1})
    by_source = {
        "recorded": list(facts.down_quantiles),
        "recorded arrivals, shuffled repair": redrawn(trace, "shuffled", draws),
        "recorded arrivals, exponential repair": redrawn(trace, "exponential", draws),
        "Poisson, resampled repair": resampled(trace, empirical, draws),
        "Poisson, exponential repair": resampled(trace, exponential, draws),
        "bursts and weak servers, resampled repair": resampled(trace, bursty, draws),
    }
    rows.append(
        above("recorded p99 over Poisson with exponential repair", 1.5,
              WANTED[2] / by_source["Poisson, exponential repair"][2], "same rate and mean repair",
              "so do resampled repair times: under Poisson arrivals the number out depends on the mean repair alone")
    )  # fmt: skip
    rows.append(
        above("recorded p99 over recorded arrivals with exponential repair", 1.2,
              WANTED[2] / by_source["recorded arrivals, exponential repair"][2], "same arrivals and mean repair",
              "long repairs came in waves: shuffling the recorded repair times loses the worst days too")
    )  # fmt: skip
    lines = [line(name, DOWN_QUANTILES, values) for name, values in by_source.items()]
    return Claim(
        name="infinitehbd_replay",
        rows=tuple(rows),
        figure=figure("400 servers, 345 days", "share of time", "servers out at once", lines),
        config={"goodput": found, "down_quantiles": by_source, "num_nodes": NUM_NODES},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    save_claim(compute(parser.parse_args().trace), Path(__file__).parent)
