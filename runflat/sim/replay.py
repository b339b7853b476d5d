"""Predict one recorded or injected run: its events by step or time go in, ledger, goodput and decisions come out.

The decisions are those of :func:`runflat.plan.strategies.decide`, device by device, as the runtime takes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runflat.cluster.events import LOSES_DEVICE, Event, EventKind
from runflat.cluster.health import Health
from runflat.errors import TraceError
from runflat.plan.strategies import Decision, JobFacts, Place, decide
from runflat.sim.config import SimConfig, parse_candidate
from runflat.sim.experiment import build_job, healthy_sequences_per_s
from runflat.sim.job import Totals
from runflat.sim.perf_times import job_times
from runflat.sim.times import Times

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
    parts: Mapping[str | None, float] = PHASE_PARTS,
) -> ReplayResult:
    """Predict a run of ``num_steps`` committed steps.

    Args:
        config: The job; its failures are not used, and groups stay in their replicas.
        candidate: Strategy chain.
        events: What happens, by step and phase or by time; kinds that lose no device are passed over.
        num_steps: Steps after which the run ends.
        times: Step times, such as measured ones; default as the question says.
        parts: Part of a step that is done when an event strikes, by phase.

    Raises:
        TraceError: for an event about a device that the job does not hold, or a job that never gets there.
    """
    config = config.model_copy(update={"repack": False})
    times = times or job_times(config)
    job = build_job(config, candidate, times=times)
    topology = config.topology
    health = Health(tuple(topology.device_id(number) for number in range(topology.num_devices)))
    decisions: list[tuple[float, Decision]] = []
    waiting = _due(config, events, parts)
    while waiting:
        when = [job.time_at(due.step) if due.step is not None else due.time_s for due in waiting]
        index = min(range(len(waiting)), key=lambda i: (when[i], i))
        if when[index] >= job.time_at(num_steps):
            break
        due = waiting.pop(index)
        (job.fail if due.failed else job.back)(when[index], due.devices)
        names = [topology.device_id(device) for device in due.devices]
        health = Health(health.devices, health.failed.union(names) if due.failed else health.failed.difference(names))
        decisions.append(
            (job.steps, _decide(config, candidate, times, health, decisions[-1][1] if decisions else None))
        )
    wall_s = job.time_at(num_steps)
    if wall_s == float("inf"):
        raise TraceError(f"after the last event nothing can run, so step {num_steps} is never reached: add a 'return'")
    totals = job.totals(wall_s)
    used = topology.num_job_devices / topology.num_devices
    possible = healthy_sequences_per_s(config, times) * wall_s / used
    return ReplayResult(totals=totals, decisions=tuple(decisions), wall_s=wall_s, goodput=totals.sequences / possible)


def _decide(config: SimConfig, candidate: str, times: Times, health: Health, previous: Decision | None) -> Decision:
    """The decision that the runtime takes at this health."""
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
    placement: dict[Place, str] = {
        (replica, slot): f"{replica}:{slot}"
        for replica in range(topology.dp)
        for slot in range(topology.tp_full * topology.pp)
    }

    def seconds(replica: int, dead: tuple[int, ...]) -> float:
        line = times.line(facts.most_hit(dead))
        assert line is not None
        return line.per_sequence_s

    return decide(
        facts,
        health,
        parse_candidate(candidate)[0],
        placement=placement,
        seconds=seconds,
        fits_memory=lambda degree: times.fits(topology.tp_full - degree),
        previous=previous,
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
