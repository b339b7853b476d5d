"""Which replica is slower than its plan says, and by which device: it gets fewer sequences. A part of `decide`.

Replicas are compared by the time that they take for the work that the plan gives them. Within a replica all devices
take equally long, since they compute together: the slow one is that which waits least for the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace

from runflat.cluster.events import Event, EventKind
from runflat.elastic.actions import Note, Turn
from runflat.elastic.device import Standing
from runflat.elastic.messages import StepReport
from runflat.elastic.state import State

LEAST_CHANGE = 0.25
"""A factor is only replaced by one that differs by this part of it: shares must not follow noise."""


def on_step(turn: Turn, report: StepReport) -> None:
    """A replica has reported a step: note its pace, and conclude when enough steps agree."""
    state = turn.state
    plan = state.plan
    if plan is None or report.generation != plan.generation or not report.num_samples:
        return
    replica = plan.replica(report.replica)
    work = report.num_samples * state.planner.seconds(report.replica, replica.dead_slots)
    recent = (*state.paces.get(report.replica, ()), report.compute_s / work)[-state.limits.slow_steps :]
    turn.set(paces={**state.paces, report.replica: recent})
    if report.replica == plan.replicas[-1].replica:
        _conclude(turn)


def _conclude(turn: Turn) -> None:
    state = turn.state
    assert state.plan is not None
    if any(len(state.paces.get(r.replica, ())) < state.limits.slow_steps for r in state.plan.replicas):
        return
    slow = _factors(state)
    if not _differs(slow, state.slow):
        return
    for replica in state.slowest.keys() - slow.keys():
        _note(turn, state.slowest[replica], 1.0, f"replica {replica} is not slow any more")
    slowest = {}
    for replica, factor in slow.items():
        members = [device for device in state.plan.replica(replica).devices if device is not None]
        slowest[replica] = min(members, key=lambda name: state.devices[name].waiting_s)
        text = f"replica {replica} takes {factor:.1f} times as long for its work as the fastest one does"
        text += f" (in it {slowest[replica]} waits least for the others)"
        if not state.limits.drain_slow:
            _note(turn, slowest[replica], factor, f"{text}: it gets fewer sequences")
        else:
            _note(turn, slowest[replica], factor, f"{text}: the device leaves")
            turn.device(slowest[replica], standing=Standing.DRAINING, by_word=True, surplus=False)
            turn.do(Note(Event(event=EventKind.DRAIN, device=slowest[replica], time_s=turn.now, cause="slow")))
    leaving = turn.state.standing(Standing.DRAINING)
    kept = {replica: factor for replica, factor in slow.items() if slowest[replica] not in leaving}
    turn.set(slow=kept, slowest={replica: slowest[replica] for replica in kept}, paces={})


def _note(turn: Turn, device: str, factor: float, text: str) -> None:
    """Say it, and write an event down; with its step, so that a recorded run can be injected again."""
    state = turn.state
    event = Event(event=EventKind.SLOW, device=device, factor=factor, step=state.committed, detail=text)
    turn.do(Note(replace(event, time_s=turn.now, generation=state.plan.generation if state.plan else None)))
    turn.say(text)


def _factors(state: State) -> dict[int, float]:
    """How many times as long each slow replica takes; it must have been slow in each of the recent steps."""
    fastest = min(statistics.median(paces) for paces in state.paces.values())
    return {
        replica: statistics.median(paces) / fastest
        for replica, paces in state.paces.items()
        if min(paces) >= state.limits.slow_factor * fastest
    }


def _differs(new: Mapping[int, float], old: Mapping[int, float]) -> bool:
    if new.keys() != old.keys():
        return True
    return any(abs(new[replica] - old[replica]) > LEAST_CHANGE * old[replica] for replica in new)
