"""Who could work now, and what the chain makes of it: the facts of the controller, put to the planner."""

from __future__ import annotations

from runflat.elastic import heal
from runflat.elastic.state import Standing, State
from runflat.plan.plan import Plan
from runflat.plan.strategies import Decision, Strategy


def choose(state: State) -> Decision:
    """The decision after everybody has left the old generation and said what it holds."""
    fit = set(state.live()) - state.leaving
    if Strategy.SPARE in state.planner.chain:
        fit |= set(state.standby())
    return state.planner.decide(
        fit,
        state.decision,
        state.too_low,
        state.slow,
        has_holders=nothing_done(state) or not state.planner.missing(holdings(state)),
        has_checkpoint=nothing_done(state) or has_checkpoint(state),
    )


def nothing_done(state: State) -> bool:
    """Whether the run stands where it began, so that anybody can begin anew."""
    return state.committed == state.start_step


def holdings(state: State) -> dict[str, Plan]:
    """By device that trains: the plan whose units it says that it holds."""
    known = {name: status.holds for name, status in state.statuses.items() if name in state.live()}
    return {name: state.plans[holds] for name, holds in known.items() if holds in state.plans}


def has_checkpoint(state: State) -> bool:
    """Whether there is a whole copy of everything: on disk, or in the memory of who is there."""
    if heal.good_checkpoint(state) is not None:
        return True
    copies = {name: heal.good_copies(state, entries) for name, entries in state.copies().items()}
    return state.planner.newest_copy(copies, state.plans) is not None


def joiners(state: State, decision: Decision) -> tuple[str, ...]:
    """Devices that stand by and get a place by `decision`."""
    standby = state.standing(Standing.STANDBY)
    return tuple(device for _, device in decision.devices if device in standby)
