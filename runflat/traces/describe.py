"""What a trace says: rates, repair quantiles, concurrency, bursts and weak nodes, as numbers and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from runflat.traces.generate import HOUR_S
from runflat.traces.trace import DAY_S, FailureTrace, Floats, Ints

QUANTILES = (0.25, 0.5, 0.75, 0.9, 0.95)
DOWN_QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """Numbers about a trace; shares and fractions 0..1."""

    num_incidents: int
    num_outages: int
    num_devices: int
    num_never_hit: int
    span_days: float
    per_device_day: float
    """Incidents per device and day."""
    mean_gap_h: float
    gap_cv: float
    """Standard deviation over mean of the times between incidents: 1 for Poisson, more for bursts."""
    repair_mean_h: float
    repair_quantiles_h: tuple[float, ...]
    """At :data:`QUANTILES`, over outages that ended."""
    down_mean: float
    down_quantiles: tuple[float, ...]
    """Fraction of devices out at once, at :data:`DOWN_QUANTILES` of the time."""
    down_max: float
    top_tenth_share: float
    """Share of incidents on the tenth of devices that was hit most."""
    causes: tuple[tuple[str, int], ...]
    """(cause, incidents), most frequent first."""

    def to_json(self) -> dict[str, object]:
        """All numbers by name."""
        return asdict(self)


def down_steps(trace: FailureTrace) -> tuple[Floats, Ints]:
    """Times in seconds, and how many devices are out from each time until the next; starts at 0.

    A device whose outages overlap counts once; an outage of zero length never counts.
    """
    start_s, end_s = _merged_intervals(trace)
    times = np.concatenate(([0.0], start_s, np.minimum(end_s, trace.span_s)))
    change = np.concatenate(([0], np.ones(len(start_s), dtype=np.int64), -np.ones(len(end_s), dtype=np.int64)))
    order = np.argsort(times, kind="stable")
    times, down = times[order], np.cumsum(change[order])
    last = np.append(times[1:] > times[:-1], True)
    return times[last], down[last]


def _merged_intervals(trace: FailureTrace) -> tuple[Floats, Floats]:
    """Starts and ends in seconds, where overlapping outages of one device are joined."""
    order = np.lexsort((trace.time_s, trace.device))
    starts: list[float] = []
    ends: list[float] = []
    previous = -1
    for device, start_s, end_s in zip(
        trace.device[order].tolist(), trace.time_s[order].tolist(), trace.end_s[order].tolist(), strict=True
    ):
        if device == previous and start_s <= ends[-1]:
            ends[-1] = max(ends[-1], end_s)
            continue
        previous = device
        starts.append(start_s)
        ends.append(end_s)
    return np.array(starts), np.array(ends)


def down_quantiles(trace: FailureTrace, quantiles: Sequence[float] = DOWN_QUANTILES) -> tuple[float, ...]:
    """Fraction of devices that is out at once, at the given quantiles of time."""
    times, down = down_steps(trace)
    weight = np.diff(np.append(times, max(trace.span_s, float(times[-1]))))
    order = np.argsort(down, kind="stable")
    share = np.cumsum(weight[order]) / weight.sum()
    picked = np.minimum(np.searchsorted(share, quantiles), len(order) - 1)
    return tuple(float(value) / trace.num_devices for value in down[order][picked])


def describe(trace: FailureTrace) -> TraceFacts:
    """The numbers of a trace with at least one outage."""
    first = trace.first_of_incident()
    gaps = np.diff(np.sort(trace.time_s[first]))
    ended = trace.duration_s[np.isfinite(trace.duration_s)] / HOUR_S
    times, down = down_steps(trace)
    weight = np.diff(np.append(times, max(trace.span_s, float(times[-1]))))
    hits = np.sort(np.bincount(trace.device[first], minlength=trace.num_devices))[::-1]
    tenth = max(trace.num_devices // 10, 1)
    counts = np.bincount(trace.cause[first], minlength=len(trace.causes))
    causes = sorted(zip(trace.causes, counts.tolist(), strict=True), key=lambda entry: (-entry[1], entry[0]))
    days = trace.span_s / DAY_S
    return TraceFacts(
        num_incidents=trace.num_incidents,
        num_outages=len(trace),
        num_devices=trace.num_devices,
        num_never_hit=int((hits == 0).sum()),
        span_days=days,
        per_device_day=trace.num_incidents / (trace.num_devices * days) if days else 0.0,
        mean_gap_h=float(gaps.mean()) / HOUR_S if len(gaps) else 0.0,
        gap_cv=float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() else 0.0,
        repair_mean_h=float(ended.mean()) if len(ended) else 0.0,
        repair_quantiles_h=tuple(np.quantile(ended, QUANTILES).tolist()) if len(ended) else (0.0,) * len(QUANTILES),
        down_mean=float((down * weight).sum() / weight.sum() / trace.num_devices) if weight.sum() else 0.0,
        down_quantiles=down_quantiles(trace) if weight.sum() else (0.0,) * len(DOWN_QUANTILES),
        down_max=float(down.max()) / trace.num_devices,
        top_tenth_share=float(hits[:tenth].sum() / hits.sum()) if hits.sum() else 0.0,
        causes=tuple((name, count) for name, count in causes if count),
    )


def facts_table(facts: TraceFacts) -> str:
    """The facts as lines for people."""
    quantiles = ", ".join(f"p{int(q * 100)} {h:.1f}" for q, h in zip(QUANTILES, facts.repair_quantiles_h, strict=True))
    down = ", ".join(
        f"p{int(q * 100)} {100 * d:.2f}" for q, d in zip(DOWN_QUANTILES, facts.down_quantiles, strict=True)
    )
    mtbf_days = 1 / facts.per_device_day if facts.per_device_day else float("inf")
    causes = ", ".join(f"{name} {count}" for name, count in facts.causes[:8])
    rest = sum(count for _, count in facts.causes[8:])
    return "\n".join(
        (
            f"{facts.num_incidents} failures ({facts.num_outages} outages) of {facts.num_devices} devices or nodes in "
            f"{facts.span_days:.1f} days; {facts.num_never_hit} were never hit",
            f"rate           {facts.per_device_day:.3g} per device-day, one failure in {mtbf_days:.3g} device-days",
            f"between        mean {facts.mean_gap_h:.3g} h, variation {facts.gap_cv:.2f} (1 chance, more bursts)",
            f"repair, hours  mean {facts.repair_mean_h:.1f}, {quantiles}",
            f"out at once, % mean {100 * facts.down_mean:.2f}, {down}, max {100 * facts.down_max:.2f}",
            f"weak devices   the tenth that was hit most has {100 * facts.top_tenth_share:.0f} % of the failures",
            f"causes         {causes}" + (f", other {rest}" if rest else ""),
        )
    )
