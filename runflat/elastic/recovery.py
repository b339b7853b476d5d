"""From a fault to training again: abort, statuses, plan, ready, go, running. Every function is a part of `decide`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from runflat.cluster.ledger import Incident
from runflat.elastic import heal, nodes, pausing, restart
from runflat.elastic.actions import Closed, Grew, Opened, Planned, Took, Turn
from runflat.elastic.choice import choose, note, partial
from runflat.elastic.device import Standing
from runflat.elastic.messages import Commit, Formed, LowMem, Ready, Running, Status
from runflat.elastic.orders import Abort, Exit, Go, PlanOrder, Resume, Stop
from runflat.elastic.state import Disturbance, GrowthStage, Stage, State, all_among
from runflat.errors import PlanError
from runflat.plan.batch import BatchRule
from runflat.plan.plan import Plan
from runflat.plan.strategies import Strategy

KEPT_PLANS = 32
"""How many generations back a copy in memory may be."""
KEPT_COMPARED = 1024
"""How many steps with a good digest are remembered."""
_PHASE_OF_STAGE = {
    Stage.START: "restart",
    Stage.ABORT: "abort",
    Stage.READY: "barrier",
    Stage.FORM: "transfer",
    Stage.PAUSE: "pause",
}


def fail(turn: Turn, devices: tuple[str, ...], cause: str, started: float) -> None:
    """Devices of the job failed, or links between them: count it, open an incident, leave the generation."""
    state = turn.state
    if state.stage is Stage.ABORT:
        _disturb(turn, devices, cause, started)
        check_statuses(turn)
        return
    same = not state.tried and turn.now - state.failed_at <= state.limits.batch_s
    if not same:
        turn.set(failures=state.failures + 1, failed_at=turn.now, tried=False)
    _disturb(turn, devices, cause, started)
    if turn.state.failures >= state.limits.max_failures:
        turn.finish(
            f"{turn.state.failures} failures at step {state.committed} without a commit in between, the last one: "
            f"{' and '.join(devices)}: {cause}. A failure that comes again is not a device's: the job stops"
        )
        return
    begin_abort(turn)


def _disturb(turn: Turn, devices: Iterable[str], cause: str, started: float) -> None:
    """Open an incident, or add to the one that is under way."""
    state, now = turn.state, turn.now
    under_way = state.disturbance
    if under_way is not None:
        phase = "replay" if state.stage is Stage.RUN else _PHASE_OF_STAGE.get(state.stage, "abort")
        names = tuple(dict.fromkeys((*under_way.devices, *devices)))
        cause = under_way.cause if cause in under_way.cause else f"{under_way.cause}; {cause}"
        turn.set(disturbance=replace(under_way.lap(phase, now), devices=names, cause=cause))
        return
    since = state.committed_at if state.committed_at is not None else state.stage_since
    in_flight_s = max(started - since, 0.0) if state.stage is Stage.RUN else 0.0
    number = state.num_incidents + 1
    opened = Disturbance(number, tuple(devices), cause, started, started, state.committed, in_flight_s)
    opened = opened.lap("detect", now)
    turn.set(disturbance=opened, num_incidents=number)
    turn.do(Opened(opened))


def again(turn: Turn, devices: Iterable[str], cause: str, started: float) -> None:
    """The same members form again: links failed, or groups did not form. Not counted as a failure."""
    _disturb(turn, devices, cause, started)
    begin_abort(turn)


def begin_abort(turn: Turn) -> None:
    """Take the next number and have everybody leave the generations before it."""
    state = turn.state
    growth = state.growth
    newcomers: tuple[str, ...] = ()
    if growth is not None:
        turn.set(plans={**state.plans, growth.generation: growth.plan}, leaving=frozenset(growth.leaving))
        if growth.stage is not GrowthStage.SWITCH:  # after that they are members like all others
            newcomers = tuple(name for name in growth.joining if state.devices[name].standing is Standing.STANDBY)
    turn.set(generation=state.generation + 1, growth=None, suspicion=None, statuses={}, formed=frozenset())
    turn.set(done=frozenset(), worker_phases_s={}, committed_at=None, grown=None)
    turn.enter(Stage.ABORT)
    turn.send((*turn.state.live(), *newcomers), Abort(generation=turn.state.generation))
    check_statuses(turn)


def on_status(turn: Turn, device: str, status: Status) -> None:
    """A device has left the old generation and says where it stands."""
    state = turn.state
    if state.stage is not Stage.ABORT or status.generation != state.generation or device not in state.live():
        return
    turn.set(statuses={**state.statuses, device: status})
    turn.device(device, holds=status.holds, committed=status.committed)
    if status.committed > state.committed:
        turn.set(committed=status.committed, scalars=status.scalars)
    elif status.committed == state.committed and state.scalars is None:
        turn.set(scalars=status.scalars)
    check_statuses(turn)


def check_statuses(turn: Turn) -> None:
    """Plan, if all that live have said where they stand and all that were killed are gone."""
    state = turn.state
    if state.stage is not Stage.ABORT or state.dying() or not all_among(state.live(), state.statuses):
        return
    doubt = nodes.waited_for(state)
    if doubt is None or turn.now >= doubt[0]:
        nodes.name_lost(turn)
        turn.lap("abort")
        replan(turn)


def replan(turn: Turn) -> None:
    """Decide who goes on and from where, and give out the plan; or stop the run with the reason."""
    state = turn.state
    decision = choose(state)
    if decision.stop:
        reasons = f" ({'; '.join(decision.words)})" if decision.words else ""
        turn.finish(f"no device is left that can work{reasons}. {_way_on(state)}")
        return
    if decision.paused:
        pausing.enter(turn, decision)
        note(turn, decision, "discard")
        return
    try:
        plan = state.planner.plan(decision, state.generation, state.plan)
    except PlanError as error:
        turn.finish(f"no plan is left: {error} {_way_on(state)}")
        return
    restarts = decision.strategy is Strategy.RESTART
    resume, reason = _resume(state, plan, restarts=restarts)
    if resume is None:
        turn.finish(f"{reason}. {_way_on(state)}")
        return
    if state.stop_asked and state.planner.job.rule is BatchRule.CAPPED:
        resume = resume.model_copy(update={"stop": True})  # a last step might be below the target
    if restart.begin(turn, decision, anew=restarts and resume.action != "memory"):
        return
    _adopt(turn, plan, resume, reason)
    note(turn, decision, "heal" if resume.healed else resume.action)
    if turn.state.distrust is not None:
        turn.say(reason)


def _adopt(turn: Turn, plan: Plan, resume: Resume, reason: str) -> None:
    """Send the plan to its members; whoever is left over goes."""
    state = turn.state
    members = plan.devices
    over = [name for name in state.live() if name not in members]
    turn.send(over, Exit())
    for name in over:
        turn.device(name, standing=Standing.PARKED, surplus=name not in state.leaving, holds=-1)
    if waiting := [name for name in over if name not in state.leaving]:
        turn.say(f"without work until their replica is whole: {', '.join(waiting)}")
    for name in members:
        if state.devices[name].standing is Standing.STANDBY:
            turn.device(name, standing=Standing.ACTIVE)
    plans = {**state.plans, plan.generation: plan}
    kept = sorted(plans)[-KEPT_PLANS:]
    turn.set(
        plan=plan,
        plans={generation: plans[generation] for generation in kept},
        committed=resume.committed,
        scalars=None if resume.back else state.scalars,
        valid_from=plan.generation if resume.back else state.valid_from,
        loading=resume.back,
        compared=frozenset(step for step in state.compared if step <= resume.committed - bool(resume.healed)),
        leaving=frozenset(),
    )
    turn.enter(Stage.READY)
    network = dict(state.network) if state.network is not None else None
    order = PlanOrder(generation=plan.generation, plan=plan.to_wire(), resume=resume, network=network)
    turn.send(members, order)
    turn.do(Planned(plan, resume, reason, None if resume.back else state.scalars))


def _resume(state: State, plan: Plan, *, restarts: bool) -> tuple[Resume | None, str]:
    """Where the members of `plan` go on from, and why; None if there is no place left to go on from."""
    members = plan.devices
    statuses = {name: state.statuses[name] for name in members if name in state.statuses}
    holdings = {n: state.plans[s.holds] for n, s in statuses.items() if s.holds in state.plans}
    wrong = state.distrust.wrong if state.distrust else {}
    moves = state.planner.moves(holdings, plan, wrong, partial(state))
    healed = tuple(name for name in holdings if name in wrong)
    lagging = [name for name in holdings if statuses[name].committed < state.committed]
    stuck = [n for n in lagging if not (statuses[n].complete and statuses[n].committed == state.committed - 1)]
    reason = ""
    if restarts:
        reason = "all start again"
    elif moves.lost:
        reason = f"no live device holds {', '.join(moves.lost[:3])}{' and more' if moves.lost[3:] else ''}"
    elif stuck or (lagging and state.scalars is None):
        reason = f"{', '.join(stuck or lagging)} cannot apply step {state.committed - 1}, which others have committed"
    onward = Resume(
        action="forward" if lagging else "discard",
        committed=state.committed,
        scalars=state.scalars if lagging else None,
        transfers=moves.transfers,
        healed=healed,
        origins=moves.origins,
        wrong=dict(wrong) if moves.origins else {},
    )
    doubt = heal.doubt(state)
    if not reason and not doubt:
        text = f"{', '.join(lagging)} apply step {state.committed - 1} too" if lagging else "the step runs again"
        return onward, heal.in_words(healed) or text
    if state.committed == state.start_step:
        text = "start" if state.distrust is None else f"{reason or doubt}: the run starts again"
        return Resume(action="start", committed=state.start_step, checkpoint=state.start_checkpoint), text
    older, text = _older(state, plan, members, reason or doubt)
    if older is not None or state.distrust is None:
        return older, text
    doubt = f"{reason or doubt}, and no older state is known to be good"
    if not reason and not state.distrust.unclear:
        return onward, f"{doubt}: {heal.in_words(healed)}, and the run goes on"
    return _on_disk(state.checkpoint, doubt)


def _older(state: State, plan: Plan, members: Collection[str], reason: str) -> tuple[Resume | None, str]:
    """The newest whole copy of all units that can be relied on: in memory, else on disk."""
    on_disk = heal.good_checkpoint(state)
    copies = {n: heal.good_copies(state, c) for n, c in state.copies().items() if n in members}
    steps = {copy.step for entries in copies.values() for copy in entries if copy.step <= state.committed}
    for step in sorted(steps, reverse=True):
        if on_disk is not None and on_disk[0] > step:
            break
        moves = state.planner.moves_from_copies(copies, step, state.plans, plan)
        if not moves.lost:
            return (
                Resume(action="memory", committed=step, transfers=moves.transfers, origins=moves.origins),
                f"{reason}: back to the copies in memory of step {step}",
            )
    return _on_disk(on_disk, reason)


def _on_disk(on_disk: tuple[int, str] | None, reason: str) -> tuple[Resume | None, str]:
    if on_disk is None:
        return None, f"{reason}, and neither copies in memory nor a checkpoint are whole"
    step, folder = on_disk
    return Resume(action="checkpoint", committed=step, checkpoint=folder), f"{reason}: back to checkpoint {folder}"


def _way_on(state: State) -> str:
    if state.checkpoint is None:
        return "There is no checkpoint to go on from."
    return f"The newest checkpoint is {state.checkpoint[1]}: go on from it with --resume."


def on_ready(turn: Turn, device: str, ready: Ready) -> None:
    """A member has adopted the plan; when all have, the groups form."""
    state = turn.state
    if state.stage is not Stage.READY or state.plan is None or ready.generation != state.plan.generation:
        return
    turn.set(answered=state.answered | {device})
    if state.all_in(turn.state.answered):
        opened = state.disturbance
        loads = state.loading and opened is not None and opened.strategy == Strategy.RESTART.value
        turn.lap("restart" if loads else "barrier")
        turn.enter(Stage.FORM)
        turn.set(formed=frozenset())
        turn.send(state.members(), Go(generation=state.plan.generation))


def on_lowmem(turn: Turn, device: str, message: LowMem) -> None:
    """A member cannot hold what the plan asks: its degree is too low for the job, so the chain's next link is tried."""
    state = turn.state
    if state.stage is not Stage.READY or state.plan is None or message.generation != state.plan.generation:
        return
    place = state.plan.place(device)
    assert place is not None
    degree = state.plan.replica(place[0]).tp
    turn.say(
        f"{device} has {message.free_bytes / 1e6:.0f} MB free and would need {message.need_bytes / 1e6:.0f} MB: "
        f"TP {degree} does not fit in memory, replica {place[0]} does not go on with it"
    )
    turn.set(too_low=max(state.too_low, degree))
    turn.lap("barrier")
    begin_abort(turn)


def on_formed(turn: Turn, device: str, formed: Formed) -> None:
    """A member's groups stand; when all do, units move."""
    state = turn.state
    if state.stage is Stage.FORM and state.plan is not None and formed.generation == state.plan.generation:
        before = state.all_in(state.formed)
        turn.set(formed=state.formed | {device})
        if not before and state.all_in(turn.state.formed):
            turn.lap("form")


def on_running(turn: Turn, device: str, running: Running) -> None:
    """A member is about to run its first step; when all are, the plan is in force."""
    state = turn.state
    if state.stage is not Stage.FORM or state.plan is None or running.generation != state.plan.generation:
        return
    slowest = dict(state.worker_phases_s)
    for phase, seconds in running.phases_s.items():
        slowest[phase] = max(seconds, slowest.get(phase, 0.0))
    turn.set(answered=state.answered | {device}, worker_phases_s=slowest)
    turn.device(device, holds=state.plan.generation, committed=state.committed)
    if state.disturbance is not None:
        moved = state.disturbance.bytes_moved + running.bytes_moved
        turn.set(disturbance=replace(state.disturbance, bytes_moved=moved))
    if state.all_in(turn.state.answered):
        take_force(turn)


def take_force(turn: Turn) -> None:
    """All members run: the plan is in force."""
    state = turn.state
    assert state.plan is not None
    for name in state.members():
        turn.device(name, holds=state.plan.generation)
    if state.disturbance is not None:
        opened = state.disturbance.lap("transfer", turn.now)
        digest_s = min(state.worker_phases_s.get("digest", 0.0), dict(opened.phases_s)["transfer"])
        turn.set(disturbance=opened.add("transfer", -digest_s).add("digest", digest_s))
    if state.suspicion is not None and state.suspicion.forming:
        turn.set(suspicion=None)  # they have formed after all
    turn.set(tried=True, progress_at=turn.now, committed_at=None, distrust=None, considered=frozenset(), paces={})
    turn.set(clean=state.committed)  # digests of the new plan were good
    turn.enter(Stage.RUN)
    turn.do(Took(state.plan, state.committed))
    turn.say(f"generation {state.plan.generation}: {describe(state.plan)}, from step {state.committed}")
    if state.stop_asked:
        send_stop(turn)


def send_stop(turn: Turn) -> None:
    """Have all members end after the step in flight."""
    turn.send(turn.state.members(), Stop())


def describe(plan: Plan) -> str:
    """A plan in words: degree and sequences of each replica."""
    return ", ".join(f"replica {r.replica} at TP {r.tp} with {r.num_sequences} sequences" for r in plan.replicas)


def on_commit(turn: Turn, device: str, commit: Commit) -> None:
    """A step is committed: all devices entered its barrier, so all can apply it."""
    state = turn.state
    if commit.generation < state.valid_from or commit.step + 1 <= state.committed:
        return
    if state.stage is Stage.FORM and state.plan is not None and commit.generation == state.plan.generation:
        take_force(turn)  # whoever passes a barrier proves that all run; their own word may be read later
    state = turn.state
    if state.stage not in (Stage.RUN, Stage.ABORT):
        return
    turn.set(committed=commit.step + 1, scalars=commit.scalars)
    if commit.compared:
        compared = sorted({*state.compared, commit.step})[-KEPT_COMPARED:]
        turn.set(clean=commit.step + 1, compared=frozenset(compared))
    if state.stage is not Stage.RUN:
        return
    if state.committed_at is not None:
        recent = (*state.step_seconds, turn.now - state.committed_at)[-32:]
        turn.set(step_seconds=recent)
    gap_s = turn.now - state.committed_at if state.committed_at is not None else 0.0
    turn.set(committed_at=turn.now, progress_at=turn.now, failures=0, formfails=0)
    if state.grown is not None and commit.generation == state.grown.generation:
        turn.do(Grew(state.grown, commit.step, max(gap_s - (state.median_step_s or 0.0), 0.0)))
        turn.set(grown=None)
    close_incident(turn)


def close_incident(turn: Turn, *, ended: bool = False) -> None:
    """Report the incident that is under way, if one is: the first step after it is committed, or the run has ended."""
    opened = turn.state.disturbance
    if opened is None:
        return
    turn.set(disturbance=None)
    phases = dict(opened.phases_s)
    replayed_s = phases.pop("replay", 0.0) + (opened.in_flight_s if opened.action in ("discard", "heal") else 0.0)
    median = turn.state.median_step_s
    back = opened.step - turn.state.committed + 1 if opened.action in ("memory", "checkpoint") else 0
    incident = Incident(
        number=opened.number,
        device=" ".join(opened.devices),
        cause=opened.cause,
        started_s=opened.started,
        strategy=opened.strategy,
        phases_s=phases,
        bytes_moved=opened.bytes_moved,
        replayed_steps=back + (replayed_s / median if median else 0.0),
        generation=turn.state.plan.generation if turn.state.plan else None,
        words=opened.words,
    )
    first_commit_s = None if ended else turn.now - opened.mark
    turn.do(Closed(incident, opened.devices, opened.step, first_commit_s, opened.action))
