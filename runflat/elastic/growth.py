"""Changes at a step boundary, prepared while training goes on: devices join, one leaves. Parts of `decide`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from runflat.elastic.actions import Took, Turn
from runflat.elastic.choice import joiners
from runflat.elastic.device import Standing
from runflat.elastic.messages import Behind, Fed, Listening, LowMem, Prepared, Switched
from runflat.elastic.orders import Exit, Feed, Prepare, Receive, Switch, Unfeed, Unprepare
from runflat.elastic.recovery import again, describe, send_stop
from runflat.elastic.state import Growth, GrowthStage, Stage, State
from runflat.plan.plan import Plan
from runflat.plan.strategies import Strategy

PATIENCE_S = 30.0
"""How long a tested device waits for others that start, so that all join in one change."""


def token(state: State, generation: int, target: str) -> str:
    """What a feed must show to be let in."""
    return f"{state.secret}-{generation}-{target}"


def consider(turn: Turn) -> None:
    """Begin a change, if training goes on undisturbed and somebody wants to leave or could join."""
    state = turn.state
    if state.stage is not Stage.RUN or state.growth or state.suspicion or state.stop_asked or state.done:
        return
    if state.dying():
        return
    if state.standing(Standing.DRAINING):
        _begin_leave(turn)
        return
    standby = state.standby()
    if not standby:
        _consider_shares(turn)
        return
    fit = frozenset((*state.live(), *standby))
    if fit == state.considered:
        return
    waited = turn.now - min(state.devices[name].since for name in standby)
    if state.standing(Standing.STARTING) and waited < PATIENCE_S:
        return
    _, growth = _change_to(state, fit, turn.now)
    if growth is None or not growth.joining:
        turn.set(considered=fit)
        return
    _open(turn, growth)


def _change_to(state: State, fit: Collection[str], now: float) -> tuple[str | None, Growth | None]:
    """The change after which exactly `fit` can work; else why there can be none."""
    decision = state.planner.decide(fit, state.decision, state.too_low, state.slow)
    if decision.stop:
        return "without it no device is left that can work", None
    if decision.paused:
        return "without it the replicas' caps do not add up to the batch, and training would pause", None
    generation = state.generation + 1
    plan = state.planner.plan(decision, generation, state.plan)
    moves = state.planner.moves(_holdings(state), plan)
    if moves.lost:
        return f"no other device holds {moves.lost[0]}, so it cannot leave without loss", None
    members = set(plan.devices)
    gone = tuple(name for name in state.members() if name not in members)
    joining = joiners(state, decision)
    # Sharded optimizer state is not fed: all that a newcomer needs moves at the boundary.
    stage = GrowthStage.LISTEN if joining and moves.origins is None else GrowthStage.PREPARE
    return None, Growth(generation, plan, decision, stage, now, now, joining, gone, moves.transfers, moves.origins)


def _open(turn: Turn, growth: Growth) -> None:
    """Begin a change: who joins is fed first; where nobody joins the groups form at once."""
    turn.set(generation=growth.generation, growth=growth)
    plan = growth.plan.to_wire()
    if growth.stage is GrowthStage.PREPARE:
        turn.send(growth.everyone, Prepare(generation=growth.generation, plan=plan))
    for name in growth.joining if growth.stage is GrowthStage.LISTEN else ():
        secret = token(turn.state, growth.generation, name)
        turn.send((name,), Receive(generation=growth.generation, plan=plan, token=secret))


def _consider_shares(turn: Turn) -> None:
    """Share the batch anew, if a replica has become slow, or is so no more, or power can do less or more for it."""
    state = turn.state
    if state.plan is None or (state.slow == state.shared_for and not state.shares_due):
        return
    turn.set(shared_for=state.slow, shares_due=False)
    decision = state.planner.decide(state.live(), state.decision, state.too_low, state.slow)
    shares = tuple((replica.replica, replica.num_sequences) for replica in state.plan.replicas)
    if decision.paused or decision.shares == shares or [r for r, _ in decision.shares] != [r for r, _ in shares]:
        return
    generation = state.generation + 1
    plan = state.planner.plan(decision, generation, state.plan)
    origins = state.planner.moves(_holdings(state), plan).origins
    _open(turn, Growth(generation, plan, decision, GrowthStage.PREPARE, turn.now, turn.now, origins=origins))


def _begin_leave(turn: Turn) -> None:
    """Prepare the plan without the devices that want to leave; refuse if nobody else holds what they hold."""
    state = turn.state
    problem, growth = _change_to(state, _staying(state, state.standing(Standing.DRAINING)), turn.now)
    if growth is None:
        for name in state.standing(Standing.DRAINING):
            turn.device(name, standing=Standing.ACTIVE, by_word=False)
            turn.say(f"{name} stays: {problem}")
        return
    _open(turn, growth)


def why_not_leave(state: State, device: str) -> str | None:
    """Why `device` cannot leave without loss, or None if it can."""
    leaving = {*state.standing(Standing.DRAINING), device}
    return _change_to(state, _staying(state, leaving), 0.0)[0]


def _staying(state: State, leaving: Collection[str]) -> tuple[str, ...]:
    """Who works when these have left: where the chain has spares, those that stand by too."""
    standby = state.standby() if Strategy.SPARE in state.planner.chain else ()
    return tuple(name for name in (*state.live(), *standby) if name not in leaving)


def _holdings(state: State) -> dict[str, Plan]:
    return {name: state.plans[state.devices[name].holds] for name in state.members()}


def _next(turn: Turn, growth: Growth, stage: GrowthStage) -> Growth:
    """`growth` in its next stage, with the seconds of the last one noted."""
    marks = (*growth.marks, (growth.stage.value, turn.now - growth.since))
    following = replace(growth, stage=stage, since=turn.now, answered=frozenset(), marks=marks)
    turn.set(growth=following)
    return following


def on_listening(turn: Turn, device: str, message: Listening) -> None:
    """A newcomer takes feeds; when all do, the sources stream."""
    growth = turn.state.growth
    if growth is None or growth.stage is not GrowthStage.LISTEN or device not in growth.joining:
        return
    if message.generation != growth.generation:
        return  # said of a change that was given up meanwhile: nobody listens there any more
    growth = replace(growth, addresses={**growth.addresses, device: message.address})
    turn.set(growth=growth)
    if set(growth.joining) <= growth.addresses.keys():
        growth = _next(turn, growth, GrowthStage.FEED)
        for source, target in _feeds(growth):
            moves = tuple(m for m in growth.moves if (m.source, m.target) == (source, target))
            order = Feed(
                generation=growth.generation,
                target=target,
                address=growth.addresses[target],
                token=token(turn.state, growth.generation, target),
                transfers=moves,
                replicated=source == _feeds_of(growth, target)[0],
            )
            turn.send((source,), order)


def _feeds(growth: Growth) -> list[tuple[str, str]]:
    """(source, newcomer) pairs."""
    return sorted({(move.source, move.target) for move in growth.moves if move.target in growth.joining})


def _feeds_of(growth: Growth, target: str) -> list[str]:
    return [source for source, fed in _feeds(growth) if fed == target]


def on_fed(turn: Turn, device: str, fed: Fed) -> None:
    """A newcomer has all its units; when all have, everybody forms the next groups on the side."""
    growth = turn.state.growth
    if growth is None or fed.generation != growth.generation or device not in growth.joining:
        return
    growth = replace(growth, fed_bytes={**growth.fed_bytes, device: fed.bytes})
    if growth.stage is GrowthStage.FEED:
        growth = replace(growth, answered=growth.answered | {device})
    turn.set(growth=growth)
    _prepare_when_fed(turn, growth)


def on_behind(turn: Turn, message: Behind) -> None:
    """A newcomer's link is too slow ever to catch up under training: what is left moves at the boundary."""
    growth = turn.state.growth
    if growth is None or growth.stage is not GrowthStage.FEED or message.generation != growth.generation:
        return
    if message.target not in growth.answered:
        turn.say(
            f"the link to {message.target} is slower than gradients come: training stands for the rest of its units"
        )
    growth = replace(growth, answered=growth.answered | {message.target})
    turn.set(growth=growth)
    _prepare_when_fed(turn, growth)


def _prepare_when_fed(turn: Turn, growth: Growth) -> None:
    if growth.stage is GrowthStage.FEED and set(growth.joining) <= growth.answered:
        growth = _next(turn, growth, GrowthStage.PREPARE)
        turn.send(growth.everyone, Prepare(generation=growth.generation, plan=growth.plan.to_wire()))


def on_prepared(turn: Turn, device: str, message: Prepared) -> None:
    """A device has the next groups; when all have, they go over to them at the next boundary."""
    growth = turn.state.growth
    if growth is None or growth.stage is not GrowthStage.PREPARE or message.generation != growth.generation:
        return
    growth = replace(growth, answered=growth.answered | {device})
    turn.set(growth=growth)
    if growth.all_answered:
        growth = _next(turn, growth, GrowthStage.SWITCH)
        turn.set(plans={**turn.state.plans, growth.generation: growth.plan})
        for name in growth.joining:
            turn.device(name, standing=Standing.ACTIVE)
        turn.send(growth.everyone, _switch(growth))


def _switch(growth: Growth) -> Switch:
    """The order to go over, with the moves between devices that train already."""
    moves = tuple(move for move in growth.moves if move.target not in growth.joining)
    return Switch(generation=growth.generation, transfers=moves, origins=growth.origins)


def on_switched(turn: Turn, device: str, message: Switched) -> None:
    """A device works under the new plan; when all do, it is in force."""
    growth = turn.state.growth
    if growth is None or growth.stage is not GrowthStage.SWITCH or message.generation != growth.generation:
        return
    turn.device(device, holds=growth.generation, committed=message.committed)
    moved = {**growth.fed_bytes, device: growth.fed_bytes.get(device, 0) + message.bytes_moved}
    growth = replace(growth, answered=growth.answered | {device}, fed_bytes=moved)
    turn.set(growth=growth)
    if growth.all_answered:
        complete(turn)


def complete(turn: Turn) -> None:
    """Everybody has gone over: the new plan is in force, who was to leave leaves."""
    state = turn.state
    growth = state.growth
    assert growth is not None
    growth = _next(turn, growth, growth.stage)
    for place in growth.plan.places:
        turn.device(growth.plan.device(place), holds=growth.generation)
    turn.send(growth.leaving, Exit())
    for name in growth.leaving:
        surplus = state.devices[name].standing is Standing.ACTIVE
        turn.device(name, standing=Standing.PARKED, surplus=surplus, holds=-1)
    turn.set(plan=growth.plan, decision=growth.decision, growth=None, grown=growth, growth_fails=0)
    turn.set(stage_since=turn.now, progress_at=turn.now, considered=frozenset(), paces={})
    turn.do(Took(growth.plan, turn.state.committed))
    turn.say(f"generation {growth.generation}: {describe(growth.plan)}, from step {turn.state.committed}")
    if state.stop_asked:
        send_stop(turn)


def on_lowmem(turn: Turn, device: str, message: LowMem) -> None:
    """A device cannot hold what the change asks of it: no replica goes to that degree."""
    growth = turn.state.growth
    if growth is None or message.generation != growth.generation or growth.stage is GrowthStage.SWITCH:
        return
    place = growth.plan.place(device)
    if place is not None:
        degree = growth.plan.replica(place[0]).tp
        turn.set(too_low=max(turn.state.too_low, degree))
        cancel(turn, f"TP {degree} does not fit in the memory of {device}")


def did_not_form(turn: Turn, text: str) -> list[str]:
    """The next groups did not form. Returns the newcomers that have had their chances."""
    growth = turn.state.growth
    assert growth is not None
    turn.set(growth_fails=turn.state.growth_fails + 1)
    cancel(turn, text)
    return list(growth.joining) if turn.state.growth_fails >= turn.state.limits.max_failures else []


def cancel(turn: Turn, reason: str, without: Collection[str] = ()) -> None:
    """Give up the change that is being prepared: newcomers stand by, training has not noticed.

    Who was to leave does so by way of an abort instead. `without`: devices that are not there any more.
    """
    growth = turn.state.growth
    assert growth is not None
    assert growth.stage is not GrowthStage.SWITCH
    turn.set(growth=None, considered=frozenset(), leaving=frozenset(growth.leaving))
    if growth.stage is not GrowthStage.LISTEN:
        for source, target in _feeds(growth):
            turn.send((source,), Unfeed(target=target))
    told = growth.everyone if growth.stage is GrowthStage.PREPARE else growth.joining
    turn.send((name for name in told if name not in without), Unprepare(generation=growth.generation))
    names = " and ".join(growth.joining or growth.leaving)
    if growth.joining:
        turn.set(leaving=frozenset())  # whoever was to leave for them tries again
        turn.say(f"{names} not taken in yet: {reason}")
    elif growth.leaving:
        turn.say(f"{names} leaves by way of an abort: {reason}")
        again(turn, growth.leaving, "drain", turn.now)
