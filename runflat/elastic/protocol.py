"""What the controller does about what happens: one pure function of state, event and time.

    decide(state, happening, now) -> (state, actions)

No clock, no randomness, no input or output: the executor (`controller`) feeds it and carries out the actions. Times are
seconds since the start of the run. A run goes through the stages of `state.Stage`:

    START -> READY -> FORM -> RUN -> FINISHED
    any of them, at a fault -> ABORT -> READY -> FORM -> RUN

Joining and leaving at a step boundary (`growth`) happens beside RUN. Each wait has a deadline with a name (`watch`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from runflat.elastic import growth, losses, messages, pace, pausing, recovery, watch
from runflat.elastic.actions import (
    Action,
    Asked,
    Begin,
    Happening,
    Heard,
    Powered,
    Published,
    Start,
    StopAsked,
    Tick,
    Turn,
)
from runflat.elastic.device import PRESENT, Device, Standing
from runflat.elastic.orders import Exit
from runflat.elastic.planning import Planner
from runflat.elastic.roster import Roster
from runflat.elastic.state import GrowthStage, Limits, Stage, State


def first_state(
    planner: Planner,
    limits: Limits,
    *,
    secret: str,
    dead: Collection[str] = (),
    generation: int = 0,
    start_step: int = 0,
    checkpoint: str | None = None,
    scripted: Collection[str] = (),
    network: Mapping[str, Any] | None = None,
) -> State:
    """The state before anything has happened; feed it `Begin`.

    Args:
        planner: the job.
        limits: times and counts.
        secret: random text, by which feeds prove that they are ours.
        dead: devices that are not there from the start.
        generation: number of the first plan.
        start_step: step at which the run starts.
        checkpoint: folder from which it starts, None for fresh weights.
        scripted: devices that a script strikes: they come back when it says so.
        network: passed to the workers with each plan.
    """
    devices = {}
    for name in planner.devices:
        standing = Standing.LOST if name in dead else Standing.STARTING
        cause = "dead from the start" if name in dead else ""
        gone, spare = name in dead, name in planner.spares
        device = Device(name, standing, 0.0, by_word=gone, scripted=name in scripted, cause=cause, present=not gone)
        devices[name] = replace(device, healthy=spare, awaited=not spare and not gone)
    return State(
        planner=planner,
        limits=limits,
        start_step=start_step,
        generation=generation,
        secret=secret,
        network=network,
        devices=Roster(devices),
        committed=start_step,
        clean=start_step,
        checkpoint=(start_step, checkpoint) if checkpoint else None,
        start_checkpoint=checkpoint,
    )


def decide(state: State, happening: Happening, now: float) -> tuple[State, tuple[Action, ...]]:
    """The next state, and what is to be done, in order."""
    if state.stage is Stage.FINISHED:
        return state, ()
    turn = Turn(state, now)
    if isinstance(happening, Heard):
        _on_message(turn, happening.device, happening.message)
    elif isinstance(happening, Tick):
        watch.on_tick(turn)
    elif isinstance(happening, Begin):
        turn.set(ticked=now)
        turn.do(*(Start(name, 0) for name in state.standing(Standing.STARTING)))
    elif isinstance(happening, Asked):
        losses.on_asked(turn, happening)
    elif isinstance(happening, StopAsked):
        _on_stop(turn)
    elif isinstance(happening, Powered):
        turn.set(planner=replace(state.planner, speeds=happening.speeds), shares_due=True)
    elif isinstance(happening, Published):
        turn.set(checkpoint=(happening.step, happening.folder))
    if pausing.is_over(turn):
        turn.lap("pause")
        recovery.replan(turn)
    growth.consider(turn)
    losses.wake(turn)
    if turn.state.stage is Stage.FINISHED:
        recovery.close_incident(turn, ended=True)
    return turn.state, tuple(turn.actions)


def _on_message(turn: Turn, name: str, message: messages.Message) -> None:
    device = turn.state.devices[name]
    if isinstance(message, messages.Exited):
        losses.on_exit(turn, name, message)
        return
    if isinstance(message, messages.Back):
        losses.on_back(turn, name, message)
        return
    if device.standing not in PRESENT:
        if device.present and not isinstance(message, messages.Failed):
            turn.send((name,), Exit())  # it woke up in a generation that has passed
        return
    if not isinstance(message, messages.Heartbeat):
        turn.device(name, heard=turn.now)
    if device.killed_at is not None and not isinstance(message, messages.Commit):
        return  # only what it has committed counts still
    _from_present(turn, name, message)


def _from_present(turn: Turn, name: str, message: messages.Message) -> None:
    match message:
        case messages.Hello():
            losses.on_hello(turn, name)
        case messages.Heartbeat():
            watch.on_heartbeat(turn, name, message)
        case messages.Status():
            recovery.on_status(turn, name, message)
        case messages.Ready():
            recovery.on_ready(turn, name, message)
        case messages.Formed():
            recovery.on_formed(turn, name, message)
        case messages.Running():
            recovery.on_running(turn, name, message)
        case messages.LowMem():
            recovery.on_lowmem(turn, name, message)
            growth.on_lowmem(turn, name, message)
        case messages.Suspect() | messages.FormFail():
            watch.on_suspect(turn, name, message)
        case messages.Mismatch():
            watch.on_mismatch(turn, message)
        case messages.Commit():
            _on_commit(turn, name, message)
        case messages.SelfTested():
            losses.on_selftested(turn, name, message)
        case messages.Listening():
            growth.on_listening(turn, name, message)
        case messages.Fed():
            growth.on_fed(turn, name, message)
        case messages.Behind():
            growth.on_behind(turn, message)
        case messages.Prepared():
            growth.on_prepared(turn, name, message)
        case messages.Switched():
            growth.on_switched(turn, name, message)
        case messages.Failed():
            losses.on_failed(turn, name, message)
        case messages.Done():
            _on_done(turn, name, message)
        case messages.Struck():
            losses.on_struck(turn, name, message)
        case messages.Remark():
            turn.say(f"{name}: {message.text}")
        case messages.StepReport():
            turn.set(progress_at=turn.now)
            pace.on_step(turn, message)
        case messages.Shard() | messages.Holdout():
            turn.set(progress_at=turn.now)  # the books take what is in it


def _on_commit(turn: Turn, name: str, message: messages.Commit) -> None:
    change = turn.state.growth
    if change is not None and change.stage is GrowthStage.SWITCH and message.generation == change.generation:
        growth.complete(turn)  # whoever passes a barrier of the new plan proves that all have gone over
    recovery.on_commit(turn, name, message)


def _on_done(turn: Turn, name: str, message: messages.Done) -> None:
    state = turn.state
    if state.stage is not Stage.RUN:
        return
    turn.set(done=state.done | {name}, stopped=state.stopped or message.stopped, progress_at=turn.now)
    if state.growth is not None and state.growth.stage is not GrowthStage.SWITCH:
        growth.cancel(turn, "the run is ending")
    if state.all_in(turn.state.done):
        turn.finish()


def _on_stop(turn: Turn) -> None:
    if turn.state.stop_asked:
        return
    turn.set(stop_asked=True)
    change = turn.state.growth
    if change is not None and change.stage is not GrowthStage.SWITCH:
        growth.cancel(turn, "the run is ending")
    if turn.state.stage is Stage.PAUSE:
        turn.lap("pause")
        recovery.replan(turn)
    elif turn.state.stage is Stage.RUN and turn.state.growth is None:  # else when all have gone over
        recovery.send_stop(turn)
