"""Run a simulation: every candidate on the same failures, over seeds, with confidence bands."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from runflat.cluster.ledger import Category, Ledger
from runflat.plan.batch import BatchRule
from runflat.plan.strategies import Chain, Choice, Hit, Strategy, choose, reduced_degree
from runflat.sim.arrange import Arrangement, Full, Packed, Placed, Seats
from runflat.sim.config import SimConfig, parse_candidate
from runflat.sim.engine import Engine
from runflat.sim.job import JobSim, Series, Totals
from runflat.sim.perf_times import job_times
from runflat.sim.placement import Placement
from runflat.sim.rates import RateTable
from runflat.sim.times import Times
from runflat.traces.readers import read_trace
from runflat.traces.trace import DAY_S, FailureTrace

GRID = 200
"""Points of time at which bands over seeds are taken."""


class LinkTable:
    """Which link of a chain handles a group that lost so many devices, with the words of the links before it."""

    def __init__(self, chain: Chain, config: SimConfig, times: Times) -> None:
        self._chain, self._job, self._times = chain, config.job, times
        self._choices: dict[int, Choice] = {}

    def choice(self, lost: int) -> Choice:
        """The choice of :func:`runflat.plan.strategies.choose` when no spare is free and other replicas go on."""
        if lost not in self._choices:
            job = self._job
            degree = reduced_degree(job.tp, lost, job.degrees)
            hit = Hit(tp_full=job.tp, degree=degree, num_dead=lost, fits_memory=self._times.fits(lost))
            self._choices[lost] = choose(self._chain, hit)
        return self._choices[lost]

    def __call__(self, lost: int) -> Strategy | None:
        """The link alone."""
        return self.choice(lost).strategy


def fallen_through(config: SimConfig, times: Times) -> list[str]:
    """For each candidate, the links that cannot handle a group which lost one device, with the reason."""
    lines = []
    for candidate in config.strategies:
        choice = LinkTable(parse_candidate(candidate)[0], config, times).choice(1)
        # A spare may be free or not; that it may run out is no news.
        words = [word for word in choice.words if not word.startswith(f"{Strategy.SPARE.value}:")]
        if words:
            link = choice.strategy.value if choice.strategy else "nothing"
            lines.append(f"{candidate}: {'; '.join(words)}; so {link} handles it")
    return lines


def build_job(
    config: SimConfig, candidate: str, *, times: Times | None = None, record: bool = False, failures_per_s: float = 0.0
) -> JobSim:
    """A job at time 0 with all devices healthy.

    Args:
        config: The question.
        candidate: Chain, as in ``spare,ntp+boost``.
        times: Step times; default as the question says.
        record: Keep the series.
        failures_per_s: Failure rate of the cluster, for the checkpoint interval.
    """
    chain, boost = parse_candidate(candidate)
    times = times or job_times(config)
    topology, link = config.topology, LinkTable(chain, config, times)
    placement = Placement(topology, cover=Strategy.SPARE in chain)
    arrangement: Arrangement
    if not {Strategy.NTP, Strategy.DROP} & set(chain):
        arrangement = Full(
            topology.num_groups,
            topology.dp,
            topology.pp,
            spare=Strategy.SPARE in chain,
            eager=config.recovery.restart_to_rejoin,
        )
    else:
        # Under a cap spare domains form replicas of their own, as the fixed minibatch of arXiv 2504.06095 has them.
        extra = config.rule is BatchRule.CAPPED and Strategy.SPARE in chain
        num_seats = topology.num_groups if extra else topology.num_job_groups
        swap = Strategy.SPARE in chain and not extra
        seats = Seats(num_seats, topology.num_groups, swap=swap)
        arrangement = (Packed if config.repack else Placed)(seats, num_seats, topology.pp, link)
    limits = config.power.limits() if config.power else None
    table = RateTable(
        times,
        tp_full=topology.tp_full,
        num_sequences=config.job.dp * config.job.local_batch,
        local_batch=config.job.local_batch,
        cap=config.cap,
        rule=config.rule,
        power=limits,
        boost=boost,
        domain_size=topology.domain_size,
    )
    return JobSim(
        placement,
        arrangement,
        table,
        config.costs(failures_per_s, table.healthy_step_s),
        record=record,
        nominal_w=limits.nominal_w if limits else 0.0,
    )


def make_trace(config: SimConfig, seed: int) -> FailureTrace:
    """The failures of one seed, or the recorded trace (the same for each seed)."""
    topology = config.topology
    if config.failures is not None:
        rng = np.random.default_rng(seed)
        return config.failures.generate(
            num_devices=topology.num_devices, days=config.days, domain_size=topology.domain_size, rng=rng
        )
    assert config.trace is not None
    trace = read_trace(config.trace, num_devices=config.trace_num_nodes)
    return trace.expand_nodes(config.trace_node_size) if config.trace_node_size > 1 else trace


def event_entries(
    trace: FailureTrace, num_devices: int, warm_up_s: float = 0.0
) -> list[tuple[float, str, tuple[int, ...]]]:
    """(time, ``fail`` or ``back``, devices) of a trace; devices of one incident move together.

    Rows about devices that the job does not hold are left out.
    """
    entries: list[tuple[float, str, tuple[int, ...]]] = []
    columns = zip(
        trace.incident.tolist(), trace.time_s.tolist(), trace.end_s.tolist(), trace.device.tolist(), strict=True
    )
    groups: dict[tuple[int, float, float], list[int]] = {}
    for incident, time_s, end_s, device in columns:
        if device < num_devices:
            groups.setdefault((incident, time_s, end_s), []).append(device)
    for (_, time_s, end_s), devices in groups.items():
        entries.append((time_s, "fail", tuple(devices)))
        if math.isfinite(end_s):
            entries.append((end_s + warm_up_s, "back", tuple(devices)))
    return entries


def simulate(
    config: SimConfig, candidate: str, trace: FailureTrace, *, times: Times | None = None, record: bool = False
) -> Totals:
    """One candidate on one trace.

    Devices that fail at time 0 are down before the job starts, and cost no recovery.
    """
    num_devices = config.topology.num_devices
    span_s = min(config.days * DAY_S, trace.span_s) if config.trace else config.days * DAY_S
    rate = config.failures_per_s() or trace.num_incidents / span_s
    job = build_job(config, candidate, times=times, record=record, failures_per_s=rate)
    entries = event_entries(trace, num_devices, config.recovery.warm_up_s)
    early = [device for time_s, kind, devices in entries if kind == "fail" and time_s <= 0 for device in devices]
    job.settle(early)
    engine: Engine[tuple[int, ...]] = Engine(entry for entry in entries if not (entry[1] == "fail" and entry[0] <= 0))

    def handle(time_s: float, kind: str, devices: tuple[int, ...]) -> None:
        (job.fail if kind == "fail" else job.back)(time_s, devices)

    engine.run(span_s, handle)
    return job.totals(span_s)


@dataclass(frozen=True, slots=True)
class Band:
    """Mean over seeds with the 5th and 95th percentile and the standard error of the mean."""

    mean: float
    p5: float
    p95: float
    error: float


def band(values: Sequence[float]) -> Band:
    """The band of at least one value."""
    array = np.asarray(values, dtype=np.float64)
    low, high = np.quantile(array, (0.05, 0.95))
    error = float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else 0.0
    return Band(float(array.mean()), float(low), float(high), error)


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateResult:
    """What one candidate came to, over seeds."""

    candidate: str
    goodput: Band
    """Committed over possible sequences of all devices held."""
    throughput: Band
    """The same over those of the healthy job: spares do not count against it."""
    ledger: Ledger
    """Device-seconds, summed over seeds."""
    num_devices: int
    """Devices held."""
    device_hours: float
    """Devices held times hours, of one seed."""
    incidents_per_day: dict[str, float]
    pauses: float
    """Mean pauses of a seed."""
    seeds_without_pause: float
    """Share of seeds that never paused."""
    peak_hit_groups: Band
    energy_wh_per_token: float
    """0 without a power configuration."""
    mean_w: float
    grid_days: tuple[float, ...]
    grid_throughput: tuple[tuple[float, float, float], ...]
    """(5th percentile, mean, 95th) of throughput over the healthy one, at ``grid_days``."""
    series: Series | None
    """Of the first seed."""

    def to_json(self) -> dict[str, object]:
        """All of it by name; the ledger as device-hours."""
        row = asdict(self)
        row["ledger_device_h"] = {name: s / 3600 for name, s in self.ledger.to_json().items()}
        del row["ledger"]
        return row


def healthy_sequences_per_s(config: SimConfig, times: Times | None = None) -> float:
    """Sequences per second of the healthy job."""
    line = (times or job_times(config)).line(0)
    assert line is not None
    return config.job.dp * config.job.local_batch / line.at(config.job.local_batch)


def summarise(config: SimConfig, candidate: str, runs: Sequence[Totals], healthy_per_s: float) -> CandidateResult:
    """The result of a candidate from its runs, one per seed."""
    topology = config.topology
    used = topology.num_job_devices / topology.num_devices
    throughput = [run.sequences / (healthy_per_s * run.wall_s) for run in runs]
    wall_s = sum(run.wall_s for run in runs)
    incidents: Counter[str] = Counter()
    for run in runs:
        incidents.update(run.incidents)
    tokens = sum(run.sequences for run in runs) * config.job.seq_len
    energy_j = sum(run.energy_j for run in runs)
    grid_s = np.linspace(0.0, runs[0].wall_s, GRID)
    curves = np.array([_on_grid(run.series, grid_s) for run in runs if run.series is not None])
    bands: tuple[tuple[float, float, float], ...] = ()
    if len(curves):
        low, high = np.quantile(curves, (0.05, 0.95), axis=0)
        rows = np.stack((low, curves.mean(axis=0), high), axis=1) / healthy_per_s
        bands = tuple((float(a), float(b), float(c)) for a, b, c in rows)
    return CandidateResult(
        candidate=candidate,
        goodput=band([value * used for value in throughput]),
        throughput=band(throughput),
        ledger=Ledger().merge(run.ledger for run in runs),
        num_devices=topology.num_devices,
        device_hours=topology.num_devices * runs[0].wall_s / 3600,
        incidents_per_day={name: count / (wall_s / DAY_S) for name, count in sorted(incidents.items())},
        pauses=sum(run.pauses for run in runs) / len(runs),
        seeds_without_pause=sum(run.ledger.device_s[Category.PAUSE] == 0 for run in runs) / len(runs),
        peak_hit_groups=band([float(run.peak_hit_groups) for run in runs]),
        energy_wh_per_token=energy_j / 3600 / tokens if tokens else 0.0,
        mean_w=energy_j / wall_s,
        grid_days=tuple((grid_s / DAY_S).tolist()),
        grid_throughput=bands,
        series=runs[0].series,
    )


def _on_grid(series: Series, grid_s: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[float]:
    """Throughput in force at each time of the grid."""
    index = np.searchsorted(np.asarray(series.time_s), grid_s, side="right") - 1
    values: list[float] = np.asarray(series.throughput)[np.maximum(index, 0)].tolist()
    return values


def run_all(config: SimConfig, *, times: Times | None = None, record: bool = True) -> list[CandidateResult]:
    """Each candidate of ``config`` on the same failures, seed by seed."""
    times = times or job_times(config)
    runs: dict[str, list[Totals]] = {candidate: [] for candidate in config.strategies}
    for seed in range(config.first_seed, config.first_seed + config.seeds):
        trace = make_trace(config, seed)
        for candidate, found in runs.items():
            found.append(simulate(config, candidate, trace, times=times, record=record))
    healthy = healthy_sequences_per_s(config, times)
    return [summarise(config, candidate, found, healthy) for candidate, found in runs.items()]
