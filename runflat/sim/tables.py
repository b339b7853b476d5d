"""Results as tables and sentences for people."""

from __future__ import annotations

from collections.abc import Sequence

from runflat.cluster.ledger import Category
from runflat.sim.config import SimConfig
from runflat.sim.experiment import CandidateResult


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows under each other, the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def percent(share: float, digits: int = 2) -> str:
    """A share as per cent."""
    return f"{100 * share:.{digits}f}"


def question(config: SimConfig) -> str:
    """The question in two or three lines."""
    topology, job = config.topology, config.job
    held = topology.num_devices - topology.num_job_devices
    source = (
        f"{config.failures.per_device_day * topology.num_devices:.3g} failures a day, mean repair "
        f"{config.failures.mean_repair_h:.3g} h"
        if config.failures
        else f"failures of {config.trace}"
    )
    lines = [
        f"{config.name}: {topology.num_job_devices} devices as TP {job.tp} x PP {job.pp} x DP {job.dp} in domains of "
        f"{topology.domain_size}" + (f", and {held} spare ones" if held else ""),
        f"{source}; {config.days:g} days, {config.seeds} draw(s), batch rule {config.rule.value}, "
        f"hit groups {'packed together' if config.repack else 'left where they are'}",
    ]
    if config.power:
        limits = config.power.limits()
        lines.append(
            f"power {limits.nominal_w:g} W nominal, {limits.max_w:g} W at most (headroom {limits.headroom:.2f}x), "
            f"curve '{limits.curve.name}'"
        )
    return "\n".join(lines)


def results_table(results: Sequence[CandidateResult]) -> str:
    """One row per candidate: goodput with its band, and where the device-hours went."""
    shown = [
        category
        for category in Category
        if category is not Category.PRODUCTIVE and any(r.ledger.share(category) > 5e-5 for r in results)
    ]
    head = ["strategy", "goodput %", "5..95 %", "productive", *(category.value for category in shown)]
    powered = any(result.mean_w for result in results)
    rows = [[*head, *(["MW", "mWh/token"] if powered else [])]]
    for result in results:
        good = result.goodput
        row = [result.candidate, percent(good.mean), f"{percent(good.p5)}..{percent(good.p95)}"]
        row += [percent(result.ledger.share(category)) for category in (Category.PRODUCTIVE, *shown)]
        if powered:
            row += [f"{result.mean_w / 1e6:.2f}", f"{1000 * result.energy_wh_per_token:.3g}"]
        rows.append(row)
    return columns(rows)


def explanation(results: Sequence[CandidateResult]) -> str:
    """What the columns of :func:`results_table` mean, and which row is best."""
    best = max(results, key=lambda result: result.goodput.mean)
    lines = [
        "goodput: tokens committed, over those that all devices held (spares too) would have committed without",
        "failure. The other columns split all device-hours in per cent: productive work, waiting for slower replicas",
        "(imbalance), recovery (detect, reform, transfer, restart), work done twice (replay), saving (checkpoint),",
        "waiting for devices (pause), healthy but unused (idle), out of service (failed).",
        f"Best here: {best.candidate}.",
    ]
    if len(results) > 1:
        worst = min(results, key=lambda result: result.goodput.mean)
        hours = (best.goodput.mean - worst.goodput.mean) * best.device_hours
        lines[-1] += f" It saves {hours:,.0f} device-hours against {worst.candidate} over the whole time."
    return "\n".join(lines)
