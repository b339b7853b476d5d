"""Which replica is slower than its plan says: it gets fewer sequences, and is named. A part of `decide`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from runflat.elastic.actions import Turn
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
    work = report.num_samples * state.planner.work(report.replica, replica.dead_slots)
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
    turn.set(slow=slow, paces={})
    for replica, factor in slow.items():
        members = [device for device in state.plan.replica(replica).devices if device is not None]
        busiest = max(members, key=lambda name: state.devices[name].busy)
        turn.say(
            f"replica {replica} takes {factor:.1f} times as long for its work as the fastest one does (in it {busiest} "
            f"waits least for the others): it gets fewer sequences"
        )
    if not slow:
        turn.say("no replica is slow any more")


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
