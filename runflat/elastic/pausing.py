"""The capped batch rule below its target: everybody waits for a device. Parts of `decide`."""

from __future__ import annotations

from runflat.elastic.actions import Turn
from runflat.elastic.choice import choose
from runflat.elastic.device import Standing
from runflat.elastic.orders import Exit
from runflat.elastic.state import Stage, State
from runflat.plan.strategies import Decision


def enter(turn: Turn, decision: Decision) -> None:
    """Nobody trains: all stay as they are, with the state and the gradients that they hold."""
    state = turn.state
    gone = [name for name in state.live() if name in state.leaving]
    turn.send(gone, Exit())
    for name in gone:
        turn.device(name, standing=Standing.PARKED, surplus=False, holds=-1)
    turn.set(leaving=frozenset(), considered=frozenset(), failures=0)
    turn.enter(Stage.PAUSE)
    turn.say(words(turn.state, decision))


def words(state: State, decision: Decision) -> str:
    """Why training waits."""
    batch, allowed = state.planner.job.num_sequences, sum(share for _, share in decision.shares)
    return (
        f"training pauses at step {state.committed}: replicas may do {allowed} of {batch} sequences (rule capped); it "
        f"goes on when a device is back"
    )


def is_over(turn: Turn) -> bool:
    """Whether those who are there now can do the batch; looked at once for each set of them."""
    state = turn.state
    if state.stage is not Stage.PAUSE or state.dying():
        return False
    fit = frozenset((*state.live(), *state.standby()))
    if fit == state.considered:
        return False
    turn.set(considered=fit)
    decision = choose(state)
    return not decision.paused and not decision.stop
