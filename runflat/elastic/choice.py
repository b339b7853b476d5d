"""Who could work now, and what the chain makes of it: the facts of the controller, put to the planner."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from runflat.elastic import heal
from runflat.elastic.actions import Turn
from runflat.elastic.device import Standing
from runflat.elastic.state import SAME_MEMBERS, Stage, State
from runflat.plan.batch import BatchRule
from runflat.plan.plan import Plan
from runflat.plan.strategies import Decision, Strategy, handled_by

WEIGHTS = {Strategy.SPARE.value: 1, Strategy.NTP.value: 2, Strategy.DROP.value: 3, Strategy.RESTART.value: 4}
"""Of two links that an incident took, the heavier names it."""


def choose(state: State) -> Decision:
    """The decision after everybody has left the old generation and said what it holds."""
    chain, fit = state.planner.chain, set(state.live()) - state.leaving
    if Strategy.SPARE in chain or state.stage is Stage.PAUSE:
        fit |= set(state.standby())
    if state.stop_asked:  # no further step is done, so that no rule can pause it
        job = replace(state.planner.job, rule=BatchRule.CONSTANT)
        state = replace(state, planner=replace(state.planner, job=job))
    decision = _decide(state, fit)
    if Strategy.RESTART in chain and (decision.stop or decision.strategy is Strategy.RESTART):
        return _decide(state, fit | _waiting(state))  # who waits for a restart is in the next one
    return decision


def _waiting(state: State) -> set[str]:
    """Healthy devices that do not train: their processes wait, start, or can be started."""
    starting = {d.name for d in state.devices.values() if d.standing is Standing.STARTING and d.awaited}
    parked = {d.name for d in state.devices.values() if d.standing is Standing.PARKED and d.surplus}
    return {*state.standby(), *starting, *parked}


def _decide(state: State, fit: Collection[str]) -> Decision:
    return state.planner.decide(
        fit,
        state.decision,
        state.too_low,
        state.slow,
        has_holders=nothing_done(state) or not state.planner.missing(holdings(state), partial(state)),
        has_checkpoint=nothing_done(state) or has_checkpoint(state),
    )


def nothing_done(state: State) -> bool:
    """Whether the run stands where it began, so that anybody can begin anew."""
    return state.committed == state.start_step


def holdings(state: State) -> dict[str, Plan]:
    """By device that trains: the plan whose units it says that it holds."""
    known = {name: status.holds for name, status in state.statuses.items() if name in state.live()}
    return {name: state.plans[holds] for name, holds in known.items() if holds in state.plans}


def partial(state: State) -> frozenset[str]:
    """Where optimizer state is sharded: who has new weights of its own pieces only, or will when it rolls forward."""
    return frozenset(
        name for name, status in state.statuses.items() if not status.gathered or status.committed < state.committed
    )


def has_checkpoint(state: State) -> bool:
    """Whether there is a whole copy of everything: on disk, or in the memory of who is there."""
    if heal.good_checkpoint(state) is not None:
        return True
    live = state.live()
    copies = {name: heal.good_copies(state, entries) for name, entries in state.copies().items() if name in live}
    return state.planner.newest_copy(copies, state.plans) is not None


def joiners(state: State, decision: Decision) -> tuple[str, ...]:
    """Devices that stand by and get a place by `decision`."""
    standby = state.standing(Standing.STANDBY)
    return tuple(device for _, device in decision.devices if device in standby)


def note(turn: Turn, decision: Decision, action: str) -> None:
    """`decision` is being carried out: its incident says by which link, and why by none before it."""
    before, opened = turn.state.decision, turn.state.disturbance
    turn.set(decision=decision)
    for word in decision.words:
        turn.say(word)
    if opened is not None:
        link = handled_by(before, decision) if before else decision.strategy
        links = [opened.strategy, link.value if link else SAME_MEMBERS]
        strategy = max(links, key=lambda name: WEIGHTS.get(name, 0))
        words = tuple(dict.fromkeys((*opened.words, *decision.words)))
        turn.set(disturbance=replace(opened, words=words, strategy=strategy, action=action))
