"""Throughput when a given share of devices has failed, placed by chance: no time passes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runflat.plan.batch import BatchRule
from runflat.sim.config import SimConfig, parse_candidate
from runflat.sim.experiment import Band, band, build_job, healthy_sequences_per_s
from runflat.sim.times import Times


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticResult:
    """Over many placements of the same number of failed devices."""

    failed: float
    """Share of devices that failed: the nearest to what was asked that whole blocks allow."""
    throughput: Band
    """Over the healthy job's."""
    whole_groups: Band
    """Share of groups without a failed device."""
    watts: Band
    """Draw over the healthy job's; 0 without a power configuration."""


def at_failed_share(
    config: SimConfig,
    candidate: str,
    failed: float,
    *,
    draws: int,
    rng: np.random.Generator,
    block: int = 1,
    times: Times | None = None,
) -> StaticResult:
    """Throughput with a share ``failed`` of the devices out, in aligned blocks of ``block`` devices.

    Args:
        config: The cluster, job and batch rule.
        candidate: Strategy chain.
        failed: Share 0..1 of devices.
        draws: Placements to average over.
        rng: The only source of chance.
        block: Blast radius: devices that go down together.
        times: Step times; default as the question says.
    """
    topology = config.topology
    num_blocks = topology.num_devices // block
    hit_blocks = round(failed * topology.num_devices / block)
    healthy = healthy_sequences_per_s(config, times)
    start = build_job(config, candidate, times=times).rates
    throughput: list[float] = []
    whole: list[float] = []
    watts: list[float] = []
    for _ in range(draws):
        job = build_job(config, candidate, times=times)
        blocks = rng.choice(num_blocks, size=hit_blocks, replace=False).tolist()
        job.settle(device for b in blocks for device in range(b * block, (b + 1) * block))
        throughput.append(job.rates.sequences_per_s / healthy)
        whole.append(1 - job.num_hit_groups / topology.num_groups)
        watts.append(job.rates.watts / start.watts if start.watts else 0.0)
    return StaticResult(
        failed=hit_blocks * block / topology.num_devices,
        throughput=band(throughput),
        whole_groups=band(whole),
        watts=band(watts),
    )


def whole_groups(config: SimConfig, failed: float, *, draws: int, rng: np.random.Generator) -> tuple[float, Band]:
    """(share of devices that failed, share of groups without one of them) over placements by chance.

    Args:
        config: The cluster and job.
        failed: Share 0..1 of devices; the nearest whole number of devices is taken.
        draws: Placements to average over.
        rng: The only source of chance.
    """
    topology = config.topology
    num_failed = round(failed * topology.num_devices)
    group = np.array([-1 if (g := topology.group_of(d)) is None else g for d in range(topology.num_devices)])
    shares = []
    for _ in range(draws):
        hit = np.unique(group[rng.choice(topology.num_devices, size=num_failed, replace=False)])
        shares.append(1 - float((hit >= 0).sum()) / topology.num_groups)
    return num_failed / topology.num_devices, band(shares)


def spares_needed(config: SimConfig, candidate: str, hit_groups: int, *, times: Times | None = None) -> int:
    """Fewest spare domains with which the capped job runs on although ``hit_groups`` domains lack one device each.

    Args:
        config: Cluster and job; its number of spare domains is not used.
        candidate: Chain; ``spare`` is put in front of it.
        hit_groups: Domains that lack one device.
        times: Step times; default as the question says.
    """
    chain, _ = parse_candidate(candidate)
    text = candidate if "spare" in {link.value for link in chain} else f"spare,{candidate}"
    low, high = -1, hit_groups + config.job.pp
    while high - low > 1:
        middle = (low + high) // 2
        cluster = config.cluster.model_copy(update={"spare_domains": middle})
        trial = config.model_copy(update={"cluster": cluster, "rule": BatchRule.CAPPED})
        job = build_job(trial, text, times=times)
        job.settle(domain * trial.cluster.domain_size for domain in range(hit_groups))
        low, high = (low, middle) if job.rates.sequences else (middle, high)
    return high
