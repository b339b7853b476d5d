"""Predict one recorded or injected run: its events by step or time go in, ledger, goodput and decisions come out.

The decisions are those of :func:`runflat.plan.strategies.decide`, device by device, as the runtime takes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runflat.cluster.events import LOSES_DEVICE, Event, EventKind
from runflat.errors import TraceError
from runflat.plan.strategies import Decision, JobFacts
from runflat.plan.units import ModelSpec
from runflat.sim.config import ClusterConfig, JobConfig, RecoveryConfig, SimConfig, parse_candidate
from runflat.sim.decided import Decided, LineBySlots
from runflat.sim.emulated import emulated_line
from runflat.sim.job import JobSim, Totals
from runflat.sim.perf_times import job_times
from runflat.sim.placement import Placement
from runflat.sim.times import Times
from runflat.traces.generate import Component, FailureSource

PHASE_PARTS: Mapping[str | None, float] = {
    None: 0.0,
    "forward": 1 / 6,
    "backward": 2 / 3,
    "sync": 0.98,
    "commit": 1.0,
    "update": 1.0,
    "checkpoint": 1.0,
}
"""Part of a step that is done in the middle of a phase, where a forward pass takes half as long as a backward one.

From ``commit`` on somebody may have committed, so the others roll forward and nothing is lost."""


EMULATED_PARTS: Mapping[str | None, float] = {**PHASE_PARTS, "forward": 0.0, "backward": 0.0, "sync": 1.0}
"""The same for emulated devices: they compute at once and then sleep until the declared time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """The prediction for one run."""

    totals: Totals
    decisions: tuple[tuple[float, Decision], ...]
    """(steps done, decision) after each loss and return."""
    wall_s: float
    goodput: float


@dataclass(frozen=True, slots=True)
class _Due:
    """An event that waits for its step or its time."""

    event: Event
    devices: tuple[int, ...]
    failed: bool
    step: float | None
    time_s: float


def replay(
    config: SimConfig,
    candidate: str,
    events: Sequence[Event],
    *,
    num_steps: int,
    times: Times | None = None,
    line: LineBySlots | None = None,
    parts: Mapping[str | None, float] = PHASE_PARTS,
) -> ReplayResult:
    """Predict a run of ``num_steps`` committed steps.

    Args:
        config: The job; its failures are not used.
        candidate: Strategy chain.
        events: What happens, by step and phase or by time; kinds that lose no device are passed over.
        num_steps: Steps after which the run ends.
        times: Step times, such as measured ones; default as the question says.
        line: Seconds of a replica by its dead slots, where that is known more exactly than by their number.
        parts: Part of a step that is done when an event strikes, by phase.

    Raises:
        TraceError: for an event about a device that the job does not hold, or a job that never gets there.
    """
    times = times or job_times(config)
    topology = config.topology
    decided = _decided(config, candidate, times, line)
    healthy_s = decided.rates([]).step_s
    job = JobSim(Placement(topology, cover=False), decided, decided, config.costs(0.0, healthy_s))
    decisions: list[tuple[float, Decision]] = []
    waiting = _due(config, events, parts)
    while waiting:
        when = [job.time_at(due.step) if due.step is not None else due.time_s for due in waiting]
        index = min(range(len(waiting)), key=lambda i: (when[i], i))
        if when[index] >= job.time_at(num_steps):
            break
        due = waiting.pop(index)
        job.advance(when[index])
        link = decided.see([topology.device_id(device) for device in due.devices], failed=due.failed)
        job.occur(when[index], due.devices, link, failed=due.failed)
        decisions.append((job.steps, decided.decision))
    wall_s = job.time_at(num_steps)
    if wall_s == float("inf"):
        raise TraceError(f"after the last event nothing can run, so step {num_steps} is never reached: add a 'return'")
    totals = job.totals(wall_s)
    used = topology.num_job_devices / topology.num_devices
    possible = config.job.dp * config.job.local_batch / healthy_s * wall_s / used
    return ReplayResult(totals=totals, decisions=tuple(decisions), wall_s=wall_s, goodput=totals.sequences / possible)


def replay_emulated(
    spec: ModelSpec,
    job: JobConfig,
    candidate: str,
    events: Sequence[Event],
    *,
    num_steps: int,
    rate_flops: float,
    costs: RecoveryConfig,
    spare_devices: int = 0,
) -> ReplayResult:
    """Predict a run on emulated devices, each replica a domain of its own; see :func:`replay`.

    Args:
        spec: Its model, by which the units are dealt out.
        job: Its layout.
        candidate: Strategy chain.
        events: What happens.
        num_steps: Steps after which the run ends.
        rate_flops: Declared FLOPs per second of a device.
        costs: Recovery costs, such as :func:`runflat.sim.measured.measured_costs` of other runs.
        spare_devices: Spares held.
    """
    config = SimConfig(
        job=job,
        cluster=ClusterConfig(domain_size=job.tp, spare_devices=spare_devices),
        failures=FailureSource(components=(Component(name="none", per_device_day=0.0),)),
        recovery=costs,
    )
    line = emulated_line(spec, tp_full=job.tp, seq_len=job.seq_len, rate_flops=rate_flops)
    return replay(config, candidate, events, num_steps=num_steps, line=line, parts=EMULATED_PARTS)


def _decided(config: SimConfig, candidate: str, times: Times, line: LineBySlots | None) -> Decided:
    """The job in health, its decisions to come."""
    topology = config.topology
    facts = JobFacts(
        num_replicas=topology.dp,
        tp_full=topology.tp_full,
        pp=topology.pp,
        num_sequences=config.job.dp * config.job.local_batch,
        rule=config.rule,
        cap=config.cap,
        degrees=config.job.degrees,
    )
    return Decided(
        facts,
        parse_candidate(candidate)[0],
        tuple(topology.device_id(number) for number in range(topology.num_devices)),
        line or (lambda dead: times.line(facts.most_hit(dead))),
        lambda degree: times.fits(topology.tp_full - degree),
    )


def _due(config: SimConfig, events: Sequence[Event], parts: Mapping[str | None, float]) -> list[_Due]:
    """The losses and returns among the events, with device numbers."""
    found: list[_Due] = []
    down: set[str] = set()
    topology = config.topology
    for number, event in enumerate(events, start=1):
        failed = event.event in LOSES_DEVICE
        if not failed and event.event is not EventKind.RETURN:
            continue
        if event.device is None:
            raise TraceError(f"event {number} is about node {event.node!r}; a replay needs the 'device'")
        if event.step is None and event.time_s is None:
            raise TraceError(f"event {number} has neither 'step' nor 'time_s'")
        # A run records what was injected (by step) and then what was seen of it (by time): one loss, not two.
        if (event.device in down) == failed:
            continue
        (down.add if failed else down.discard)(event.device)
        # A device joins between two steps, wherever in a step it came back.
        part = parts.get(event.phase, 0.0) if failed else 0.0
        step = None if event.step is None else event.step + part
        devices = (topology.device_number(event.device),)
        found.append(_Due(event, devices, failed, step, event.time_s or 0.0))
    return found
