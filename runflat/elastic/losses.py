"""What becomes of a device that ends, fails, comes back, or is asked to do one of these. Parts of `decide`."""

from __future__ import annotations

import signal
from dataclasses import replace

from runflat.cluster.events import Event, EventKind, event_from_json
from runflat.elastic import growth as changes
from runflat.elastic.actions import Asked, Kill, Note, Reply, Turn
from runflat.elastic.device import LIVE, PRESENT, Device, Standing
from runflat.elastic.messages import Back, Exited, Failed, SelfTested, Struck
from runflat.elastic.orders import Exit
from runflat.elastic.recovery import fail, replan
from runflat.elastic.restart import launch
from runflat.elastic.state import GrowthStage, Stage, State


def kill(turn: Turn, name: str, cause: str, fault_at: float | None = None) -> None:
    """Kill a device's process; it counts as lost when its end is confirmed, or overdue."""
    device = turn.state.devices[name]
    if device.killed_at is None:
        turn.device(name, killed_at=turn.now, cause=cause, fault_at=turn.now if fault_at is None else fault_at)
        turn.do(Kill(name))
        growth = turn.state.growth
        if growth is not None and growth.stage is not GrowthStage.SWITCH and name in growth.joining:
            changes.cancel(turn, f"{name}: {cause}", (name,))


def lose(turn: Turn, name: str, cause: str, *, gone: bool, absent: bool = False) -> None:
    """The device is lost: `gone` says that its process has certainly ended, `absent` that none can be started."""
    state, now = turn.state, turn.now
    device = state.devices[name]
    failures = device.failures + 1
    out = failures >= state.limits.max_losses
    stays = out or absent or _waits_for_a_word(state, device)
    turn.device(
        name,
        standing=Standing.OUT if out else Standing.LOST,
        failures=failures,
        num_losses=device.num_losses + 1,
        restart_at=None if stays else now + _back_off_s(state, failures),
        present=not gone,
        killed_at=None,
        awaited=False,
        ending=False,
        holds=-1,
        cause=cause,
    )
    generation = state.plan.generation if state.plan else None
    detail = f"step {state.committed}"
    turn.do(
        Note(Event(event=EventKind.FAIL, device=name, time_s=now, cause=cause, generation=generation, detail=detail))
    )
    turn.say(f"{name} lost at step {state.committed}: {cause}" + (" (it stays out: failed too often)" if out else ""))
    if device.standing in LIVE:
        fault_at = device.fault_at
        if fault_at is None:
            fault_at = state.suspicion.since if state.suspicion else now
        fail(turn, (name,), cause, min(fault_at, now))
    elif state.stage is Stage.START:
        check_started(turn)
    elif state.growth is not None and name in state.growth.joining:
        changes.cancel(turn, f"{name}: {cause}", (name,))


def _waits_for_a_word(state: State, device: Device) -> bool:
    """Whether a device that is lost comes back only when a person or a script says so."""
    return device.by_word or device.scripted or not state.limits.auto_return or state.stop_asked


def _back_off_s(state: State, failures: int) -> float:
    return state.limits.back_off_s * 2.0 ** (failures - 1)


def on_back(turn: Turn, name: str, message: Back) -> None:
    """Processes of a device can be started now: one that was lost for want of that starts, after its back-off."""
    state = turn.state
    if message.domain is not None:
        domains = {**state.planner.domains, name: message.domain}
        turn.set(planner=replace(state.planner, domains=domains, may_span=message.may_span))
    device = state.devices[name]
    if device.standing is Standing.LOST and device.restart_at is None and not _waits_for_a_word(state, device):
        turn.device(name, restart_at=device.since + _back_off_s(state, device.failures))


def on_exit(turn: Turn, name: str, message: Exited) -> None:
    """A process has ended, and all that it sent has been heard."""
    code = message.code
    device = turn.state.devices[name]
    turn.device(name, present=False)
    if device.standing not in PRESENT:
        return
    if device.ending:
        launch(turn, name, awaited=True)
        return
    if name in turn.state.done and code == 0:
        turn.device(name, standing=Standing.PARKED, holds=-1)
        return
    lose(turn, name, device.cause or _words(code), gone=True, absent=message.absent)


def _words(code: int | None) -> str:
    if code is None:
        return "its process is gone"
    if code >= 0:
        return f"its process ended with code {code}"
    known = {int(number): number.name for number in signal.Signals}
    return f"killed by signal {-code} ({known.get(-code, 'unknown')})"


def on_failed(turn: Turn, name: str, message: Failed) -> None:
    """A worker ends by an error. One of a member would come again on the next device, so the job stops with it."""
    state = turn.state
    device = state.devices[name]
    member = device.standing in LIVE or (state.stage is Stage.START and device in initial(state))
    if message.cause in ("comms", "device") or not member:
        turn.device(name, cause=message.text)
    elif message.cause == "user":
        turn.finish(message.text, user_error=message.class_name)
    else:
        turn.finish(f"worker {name} failed: {message.text}", traceback=f"worker {name}\n{message.traceback}")


def on_struck(turn: Turn, name: str, message: Struck) -> None:
    """The injector strikes: from this moment the device is at fault, whenever somebody notices."""
    event = event_from_json(message.event)
    if event.event in (EventKind.KILL, EventKind.STOP):
        turn.device(name, fault_at=turn.now)
    time_s = None if event.step is not None else turn.now
    generation = turn.state.plan.generation if turn.state.plan else None
    turn.do(Note(replace(event, generation=generation, time_s=time_s, detail=f"injected at {turn.now:.3f} s")))


def initial(state: State) -> list[Device]:
    """Devices whose processes start and are awaited before a plan is made."""
    starting = (state.devices[name] for name in state.standing(Standing.STARTING))
    return [device for device in starting if device.awaited]


def check_started(turn: Turn) -> None:
    """Make the first plan when every process that still starts is up."""
    state = turn.state
    # From the last one on: processes come up about in the order in which they were started, and this is asked often.
    coming = (state.devices[name] for name in reversed(state.standing(Standing.STARTING)))
    if state.stage is not Stage.START or any(device.awaited and not device.hello for device in coming):
        return
    starting = initial(state)
    if any(device.killed_at is not None for device in starting):
        return
    for device in starting:
        turn.device(device.name, standing=Standing.ACTIVE)
    turn.lap("restart")
    replan(turn)


def on_hello(turn: Turn, name: str) -> None:
    """A process is up."""
    turn.device(name, hello=True)
    check_started(turn)


def on_selftested(turn: Turn, name: str, message: SelfTested) -> None:
    """A newcomer has tested itself."""
    device = turn.state.devices[name]
    if device.standing is not Standing.STARTING:
        return
    if not message.ok:
        kill(turn, name, f"self-test failed: {message.text}")
    elif not device.awaited or turn.state.stage is not Stage.START:
        turn.device(name, standing=Standing.STANDBY)
        turn.do(Note(Event(event=EventKind.RETURN, device=name, time_s=turn.now)))
        back = "ready" if name in turn.state.planner.spares and not device.incarnation else "back"
        turn.say(f"{name} is {back}: tested, waits to join")


def start(turn: Turn, name: str) -> None:
    """Start a device's process again, and with it those of a replica that can work again now."""
    for device in (name, *_companions(turn.state, (name,))):
        launch(turn, device)
        turn.say(f"{device} starts")


def wake(turn: Turn) -> None:
    """Start parked devices that have work together with those that stand by, as where a spare was late."""
    state = turn.state
    if state.stage is not Stage.RUN or state.growth or state.stop_asked or not state.standby():
        return
    standby = frozenset(state.standby())
    if standby == state.woken:
        return
    turn.set(woken=standby)
    for device in _companions(state)[:1]:
        start(turn, device)  # and with it the others


def _companions(state: State, names: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Parked devices of replicas that left, which would have work if `names` were there."""
    surplus = {d.name for d in state.devices.values() if d.standing is Standing.PARKED and d.surplus}
    if not surplus:
        return ()
    fit = {*state.live(), *state.standing(Standing.STANDBY, Standing.STARTING), *surplus, *names}
    decision = state.planner.decide(fit, state.decision, state.too_low, state.slow)
    return tuple(device for _, device in decision.devices if device in surplus and device not in names)


def on_asked(turn: Turn, asked: Asked) -> None:
    """A person or a script wants something of a device; the answer says what becomes of it."""
    device = turn.state.devices.get(asked.device)
    if device is None:
        known = ", ".join(turn.state.devices)
        turn.do(Reply(asked.request, False, f"there is no device {asked.device}: the devices are {known}"))
    elif asked.action == "kill":
        _asked_kill(turn, asked, device)
    elif asked.action == "drain":
        _asked_drain(turn, asked, device)
    else:
        _asked_return(turn, asked, device)


def _asked_kill(turn: Turn, asked: Asked, device: Device) -> None:
    if device.standing not in PRESENT:
        turn.do(Reply(asked.request, False, f"{device.name} is {device.standing.value}: there is nothing to kill"))
        return
    turn.device(device.name, by_word=True)
    turn.do(Reply(asked.request, True, f"{device.name} is killed; it stays away until it is asked to return"))
    kill(turn, device.name, "killed on request")


def _asked_drain(turn: Turn, asked: Asked, device: Device) -> None:
    name = device.name
    if device.standing in (Standing.STANDBY, Standing.STARTING) and turn.state.stage is not Stage.START:
        growth = turn.state.growth
        if growth is not None and name in growth.joining:
            changes.cancel(turn, f"{name} is asked to leave", (name,))
        turn.send((name,), Exit())
        turn.device(name, standing=Standing.PARKED, by_word=True, surplus=False)
        turn.do(Reply(asked.request, True, f"{name} leaves; it had no work"))
    elif device.standing not in LIVE:
        turn.do(Reply(asked.request, False, f"{name} is {device.standing.value}: it cannot be drained"))
    elif turn.state.stage is Stage.RUN and (problem := changes.why_not_leave(turn.state, name)):
        turn.do(Reply(asked.request, False, f"{name} stays: {problem}"))
    else:
        turn.device(name, standing=Standing.DRAINING, by_word=True, surplus=False)
        turn.do(Note(Event(event=EventKind.DRAIN, device=name, time_s=turn.now)))
        turn.do(Reply(asked.request, True, f"{name} leaves at the next step boundary"))


def _asked_return(turn: Turn, asked: Asked, device: Device) -> None:
    if turn.state.stop_asked:
        turn.do(Reply(asked.request, False, "the run is ending"))
    elif device.standing not in (Standing.LOST, Standing.OUT, Standing.PARKED):
        turn.do(Reply(asked.request, False, f"{device.name} is {device.standing.value}: it is there already"))
    else:
        turn.device(device.name, failures=0, heals=0)
        turn.do(Reply(asked.request, True, f"{device.name} starts and joins when it is tested"))
        start(turn, device.name)
