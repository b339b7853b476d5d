"""Formulas that a simulator must agree with; each result of a simulation has its formula printed beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from runflat.sim.rates import RateTable


def availability(failed: float, tp: int) -> float:
    """Share of groups of ``tp`` devices without a failed one, when a share ``failed`` of devices failed by chance."""
    return float((1 - failed) ** tp)


def lost_probabilities(failed: float, tp: int) -> list[float]:
    """Probability that a group of ``tp`` devices lost 0, 1, ... ``tp`` of them, by chance."""
    return [math.comb(tp, lost) * failed**lost * (1 - failed) ** (tp - lost) for lost in range(tp + 1)]


def drop_loss(failed: float, tp: int) -> float:
    """Throughput lost when replicas with a hit group leave, hit groups packed and fractions of replicas allowed."""
    return 1 - availability(failed, tp)


def ntp_loss(failed: float, tp: int, sequences_by_lost: Sequence[int]) -> float:
    """Throughput lost when hit replicas do fewer whole sequences in the healthy time, hit groups packed.

    Args:
        failed: Share of devices that failed, by chance.
        tp: Full degree.
        sequences_by_lost: Sequences of a replica whose groups lost 0, 1, ... devices; beyond the end none.
    """
    full = sequences_by_lost[0]
    chances = lost_probabilities(failed, tp)
    done = sum(p * sequences for p, sequences in zip(chances, sequences_by_lost, strict=False))
    return 1 - done / full


def whole_sequences(table: RateTable, tp: int, local_batch: int) -> list[int]:
    """Whole sequences that a replica does in the time of a healthy step, by devices lost per group, 0 to ``tp``."""
    limit_s = table.healthy_step_s
    lines = (table.line(lost)[0] for lost in range(tp + 1))
    return [min(line.most(limit_s), local_batch) if line is not None else 0 for line in lines]


def rsc_mttf_h(num_nodes: float, per_node_day: float) -> float:
    """Hours between failures of a job on ``num_nodes`` nodes (arXiv 2410.21680)."""
    return 24 / (num_nodes * per_node_day)


def rsc_ettr(num_nodes: float, per_node_day: float, restart_s: float, interval_s: float, save_s: float = 0.0) -> float:
    """Expected effective training time ratio of arXiv 2410.21680.

    (1 - N r (u0 + dt/2)) / (1 + w/dt), with N nodes, failure rate r, restart time u0, checkpoint interval dt and save
    time w.
    """
    lost_days = (restart_s + interval_s / 2) / 86_400
    return (1 - num_nodes * per_node_day * lost_days) / (1 + save_s / interval_s)


def restart_goodput(gap_s: float, restart_s: float) -> float:
    """Share of time left when each failure, one per ``gap_s``, stops everybody for ``restart_s``."""
    return (gap_s - restart_s) / gap_s


def replica_out_goodput(gap_s: float, stall_s: float, out_s: float, num_replicas: int) -> float:
    """Share of work done when each failure stops everybody for a while and one replica for longer.

    Args:
        gap_s: Seconds between failures.
        stall_s: Seconds for which all stop.
        out_s: Seconds from the failure until the replica is back.
        num_replicas: Replicas, one of which is out.
    """
    return (gap_s - out_s + (out_s - stall_s) * (num_replicas - 1) / num_replicas) / gap_s
