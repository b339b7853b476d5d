"""No wait without a deadline and a name: what is due when, what happens then, who is to blame. Parts of `decide`."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from runflat.cluster.events import Event, EventKind
from runflat.elastic import growth as changes
from runflat.elastic import heal, nodes
from runflat.elastic.actions import Note, Turn
from runflat.elastic.device import PRESENT, Device, Standing
from runflat.elastic.losses import initial, kill, lose, start
from runflat.elastic.messages import FormFail, Heartbeat, Mismatch, Suspect
from runflat.elastic.recovery import again, check_statuses, fail
from runflat.elastic.state import Distrust, Flake, Growth, GrowthStage, Stage, State, Suspicion

NUM_INTERVALS = 16
STUCK_FACTOR = 10.0
"""A step that nobody is to blame for may take this many times `timeout_s`."""
RECHECK_S = 1.0


class Due(StrEnum):
    """Kinds of deadlines; each is answered in one way."""

    HELLO = "hello"
    HEARTBEAT = "heartbeat"
    SELFTEST = "self-test"
    END = "end"
    STOP = "stop"
    BACK_OFF = "back-off"
    ANSWERS = "answers"
    SUSPICION = "suspicion"
    COMMIT = "commit"
    CHANGE = "change"
    DOMAIN = "domain"


@dataclass(frozen=True)
class Deadline:
    """Something must have happened by `at`; `name` says what, `who` owes it."""

    kind: Due
    name: str
    at: float
    who: tuple[str, ...]


def deadlines(state: State) -> list[Deadline]:
    """All that is waited for, the next first; empty only in the end."""
    if state.stage is Stage.FINISHED:
        return []
    due = [deadline for device in state.devices.values() for deadline in _of_device(state, device)]
    due += _of_job(state)
    return sorted(due, key=lambda deadline: deadline.at)


def _of_device(state: State, device: Device) -> Iterable[Deadline]:
    name, limits = device.name, state.limits
    if device.standing not in PRESENT:
        if device.restart_at is not None:
            yield Deadline(Due.BACK_OFF, f"back-off of {name}", device.restart_at, (name,))
    elif device.killed_at is not None:
        yield Deadline(Due.END, f"end of {name}", device.killed_at + limits.confirm_s, (name,))
    elif device.ending:
        yield Deadline(Due.STOP, f"stop of {name}", device.since + limits.progress_floor_s, (name,))
    elif not device.hello:
        yield Deadline(Due.HELLO, f"start of {name}", device.since + limits.start_s, (name,))
    else:
        yield Deadline(Due.HEARTBEAT, f"heartbeat of {name}", device.heard + heartbeat_limit_s(state, device), (name,))
        if device.standing is Standing.STARTING and state.stage is not Stage.START:
            yield Deadline(Due.SELFTEST, f"self-test of {name}", device.since + limits.start_s, (name,))


def heartbeat_limit_s(state: State, device: Device) -> float:
    """Silence after which a device counts as stopped."""
    usual = statistics.median(device.intervals) if device.intervals else 0.0
    return max(state.limits.heartbeat_floor_s, state.limits.heartbeat_factor * usual)


def _of_job(state: State) -> Iterable[Deadline]:
    limits, since = state.limits, state.stage_since
    owing = tuple(name for name in owed(state) if state.devices[name].killed_at is None)
    if state.suspicion is not None:
        yield Deadline(Due.SUSPICION, "an exit that explains it", state.suspicion.since + limits.suspicion_s, ())
    if not owing and state.stage is Stage.ABORT and (doubt := nodes.waited_for(state)) is not None:
        yield Deadline(Due.DOMAIN, f"the rest of the domain of {doubt[1][0]}", doubt[0], doubt[1])
    elif not owing:
        pass  # whose word is waited for is being killed, and that has a deadline of its own
    elif state.stage is Stage.ABORT:
        yield Deadline(Due.ANSWERS, "status", since + max(state.step_limit_s, limits.progress_floor_s), owing)
    elif state.stage is Stage.READY:
        wait = limits.start_s if state.loading else limits.timeout_s
        yield Deadline(Due.ANSWERS, "adopting the plan", since + wait, owing)
    elif state.stage is Stage.FORM:
        all_formed = state.all_in(state.formed)
        name, wait = ("transfers", limits.start_s) if all_formed else ("forming groups", limits.timeout_s)
        yield Deadline(Due.ANSWERS, name, since + wait, owing)
    elif state.stage is Stage.RUN and state.done:
        yield Deadline(Due.ANSWERS, "the end of training", state.progress_at + _patience_s(state), owing)
    elif state.stage is Stage.RUN:
        at = max(state.progress_at + _commit_limit_s(state), state.checked_at + RECHECK_S)
        yield Deadline(Due.COMMIT, "commit", at, owing)
    if state.growth is not None:
        growth = state.growth
        patience = {
            GrowthStage.LISTEN: limits.timeout_s,
            GrowthStage.FEED: STUCK_FACTOR * limits.timeout_s,
            GrowthStage.PREPARE: limits.timeout_s,
            GrowthStage.SWITCH: limits.timeout_s + state.step_limit_s,
        }[growth.stage]
        yield Deadline(Due.CHANGE, f"{growth.stage.value} of the change", growth.since + patience, _owed_change(growth))


def owed(state: State) -> tuple[str, ...]:
    """Devices whose word the stage waits for."""
    if state.stage is Stage.PAUSE:
        return ()  # whoever comes back
    if state.stage is Stage.START:
        return tuple(device.name for device in initial(state) if not device.hello)
    if state.stage is Stage.ABORT:
        return (*(name for name in state.live() if name not in state.statuses), *state.dying())
    if state.stage is Stage.FORM and not state.all_in(state.formed):
        return tuple(name for name in state.members() if name not in state.formed | state.answered)
    answered = state.done if state.stage is Stage.RUN else state.answered
    return tuple(name for name in state.members() if name not in answered)


def _owed_change(growth: Growth) -> tuple[str, ...]:
    if growth.stage is GrowthStage.LISTEN:
        return tuple(name for name in growth.joining if name not in growth.addresses)
    asked = growth.joining if growth.stage is GrowthStage.FEED else growth.everyone
    return tuple(name for name in asked if name not in growth.answered)


def _saving(state: State) -> bool:
    """Whether somebody waits for a disk."""
    return any(state.devices[name].phase == "checkpoint" for name in state.live())


def _patience_s(state: State) -> float:
    """How long a device may take beside a step: a disk writes what it writes, and killing its device helps nobody."""
    return state.limits.timeout_s * (STUCK_FACTOR if _saving(state) else 1.0)


def _commit_limit_s(state: State) -> float:
    """How long the next commit may take."""
    return _patience_s(state) if _saving(state) else state.step_limit_s


def on_tick(turn: Turn) -> None:
    """Answer each deadline that has passed."""
    state = turn.state
    asleep_s = turn.now - state.ticked
    if asleep_s > state.limits.asleep_s:
        # The controller itself did not run: whoever was silent meanwhile may have been heard by nobody.
        for device in state.devices.values():
            turn.device(device.name, heard=device.heard + asleep_s, since_when=device.since_when + asleep_s)
        turn.set(progress_at=state.progress_at + asleep_s)
    turn.set(ticked=turn.now)
    for _ in range(4 * len(state.devices) + 8):  # an answer may make another deadline due, but not for ever
        passed = [deadline for deadline in deadlines(turn.state) if deadline.at <= turn.now]
        if not passed:
            return
        _answer(turn, passed[0])


def _answer(turn: Turn, deadline: Deadline) -> None:
    """What happens when a deadline has passed."""
    state = turn.state
    if deadline.kind is Due.BACK_OFF:
        turn.device(deadline.who[0], restart_at=None)
        if not state.stop_asked:
            start(turn, deadline.who[0])
    elif deadline.kind is Due.END:
        turn.say(f"{deadline.who[0]} was killed, but its end is not confirmed: it is cut off")
        lose(turn, deadline.who[0], state.devices[deadline.who[0]].cause, gone=False)
    elif deadline.kind is Due.STOP:
        kill(turn, deadline.who[0], "did not stop for the restart")
    elif deadline.kind is Due.HEARTBEAT:
        device = state.devices[deadline.who[0]]
        kill(turn, device.name, f"no heartbeat for {turn.now - device.heard:.1f} s", device.heard)
    elif deadline.kind in (Due.HELLO, Due.SELFTEST):
        kill(turn, deadline.who[0], f"did not start within {state.limits.start_s:.0f} s")
    elif deadline.kind is Due.SUSPICION:
        _resolve(turn)
    elif deadline.kind is Due.COMMIT:
        _blame(turn)
    elif deadline.kind is Due.CHANGE:
        _change_late(turn, deadline)
    elif deadline.kind is Due.DOMAIN:
        check_statuses(turn)
    elif state.stage in (Stage.ABORT, Stage.READY):
        for name in deadline.who:  # each answers for itself here
            kill(turn, name, f"late with {deadline.name}")
    else:
        _blame_together(turn, deadline)


def _change_late(turn: Turn, deadline: Deadline) -> None:
    growth = turn.state.growth
    assert growth is not None
    if growth.stage is GrowthStage.SWITCH:
        turn.set(growth=replace(growth, since=turn.now))
        _blame_together(turn, deadline)
        return
    # Who trains already is watched as a member; here the newcomers answer for a change that does not come about.
    blamed = [name for name in deadline.who if name in growth.joining]
    changes.cancel(turn, f"late with {deadline.name}: {' and '.join(deadline.who)}")
    for name in blamed:
        kill(turn, name, f"late with {deadline.name}")


def _blame_together(turn: Turn, deadline: Deadline) -> None:
    """Something that all do together is late: whoever works while others wait is to blame, else the links are."""
    state = turn.state
    late = [state.devices[name] for name in deadline.who]
    working = [device for device in late if device.waits_for is None]
    if working and len(working) <= len(state.live()) / 2:
        for device in working:
            kill(turn, device.name, f"late with {deadline.name}, in {device.phase}")
        return
    forming = state.stage is Stage.FORM
    since = state.stage_since if forming else state.progress_at
    text = f"{deadline.name} took more than {turn.now - since:.0f} s"
    turn.set(suspicion=Suspicion(_generation(state), since, (), text, forming))
    _resolve(turn)


def _blame(turn: Turn) -> None:
    """No commit for too long: kill who works without end while others wait for it; if all wait, a link is broken."""
    state, now = turn.state, turn.now
    long_s = _commit_limit_s(state) / 2
    members = [state.devices[name] for name in state.live()]
    lasting = [device for device in members if now - device.since_when >= long_s]
    waiting = [device for device in lasting if device.waits_for is not None]
    working = [device for device in lasting if device.waits_for is None]
    late_s = now - state.progress_at
    turn.set(checked_at=now)
    if working and len(working) <= len(waiting):
        for device in working:
            kill(turn, device.name, f"no progress for {late_s:.1f} s in {device.phase}", state.progress_at)
    elif waiting and len(waiting) == len(members):
        text = f"no commit for {late_s:.1f} s, and everybody waits"
        turn.set(progress_at=now, suspicion=Suspicion(_generation(state), state.progress_at, (), text, False))
        _resolve(turn)
    elif late_s >= STUCK_FACTOR * state.limits.timeout_s:
        turn.finish(
            f"no step was committed for {late_s:.0f} s, and nobody is to blame: see who does what in events.jsonl"
        )


def _generation(state: State) -> int:
    assert state.plan is not None
    return state.plan.generation


def on_heartbeat(turn: Turn, name: str, beat: Heartbeat) -> None:
    """A sign of life."""
    device = turn.state.devices[name]
    changed = (beat.waits_for is None) != (device.waits_for is None)
    since_when = turn.now if changed else device.since_when
    if beat.waits_for is not None:
        since_when = turn.now - beat.since_s
    intervals = (*device.intervals, turn.now - device.heard)[-NUM_INTERVALS:]
    committed = max(beat.committed, device.committed)
    turn.device(
        name,
        phase=beat.phase,
        waits_for=beat.waits_for,
        since_when=since_when,
        intervals=intervals,
        heard=turn.now,
        committed=committed,
        fault_at=device.fault_at if device.killed_at is not None else None,
        waiting_s=0.9 * device.waiting_s + 0.1 * (beat.waited_s - device.waited_s),
        waited_s=beat.waited_s,
    )


def on_suspect(turn: Turn, name: str, message: Suspect | FormFail) -> None:
    """Something between devices failed: wait a moment for an exit that explains it."""
    state = turn.state
    growth = state.growth
    if growth is not None and message.generation == growth.generation and growth.stage is not GrowthStage.SWITCH:
        for newcomer in changes.did_not_form(turn, message.text):
            kill(turn, newcomer, f"groups with it do not form: {message.text}")
        return
    current = {growth.generation} if growth is not None else set()
    current |= {_generation(state)} if state.plan is not None else set()
    if state.stage not in (Stage.RUN, Stage.READY, Stage.FORM) or message.generation not in current:
        return
    before = state.suspicion
    if before is None:
        forming = state.stage is not Stage.RUN
        turn.set(suspicion=Suspicion(message.generation, turn.now, (name,), message.text, forming))
    elif name not in before.ends:
        turn.set(suspicion=replace(before, ends=(*before.ends, name)))


def on_mismatch(turn: Turn, message: Mismatch) -> None:
    """Holders differ: an incident of those that are wrong. What comes of it is decided when all have left the plan."""
    state = turn.state
    change = state.growth
    switching = change is not None and change.stage is GrowthStage.SWITCH and message.generation == change.generation
    current = state.plan is not None and message.generation == state.plan.generation
    if state.stage not in (Stage.FORM, Stage.RUN) or not (current or switching):
        return
    joining = change.joining if switching and change is not None else ()
    fresh = bool(message.wrong) and set(message.wrong) <= set(joining)
    turn.set(distrust=Distrust(message.wrong, message.unclear, fresh))
    units = heal.describe(message.units)
    for name in message.wrong:
        _count_heal(turn, name, units)
    fail(turn, heal.suspects(message), f"digest of {units} differs", turn.now)


def _count_heal(turn: Turn, name: str, units: str) -> None:
    """A device's bits were wrong; one that has them wrong again and again leaves."""
    device = turn.state.devices[name]
    turn.device(name, heals=device.heals + 1)
    turn.say(f"{name} has wrong bits: digest of {units} differs from the majority of holders")
    if device.heals + 1 >= turn.state.limits.max_heals and device.standing is Standing.ACTIVE:
        cause = f"unreliable: its bits were wrong {device.heals + 1} times"
        turn.device(name, standing=Standing.DRAINING, by_word=True, surplus=False)
        turn.do(Note(Event(event=EventKind.DRAIN, device=name, time_s=turn.now, cause=cause)))
        turn.say(f"{name} is {cause}; it leaves when it is healed")


def _resolve(turn: Turn) -> None:
    """No exit explains the failed collectives: form again with the same members; if that was tried, one leaves."""
    state = turn.state
    suspicion = state.suspicion
    assert suspicion is not None
    turn.set(suspicion=None)
    if suspicion.forming:
        _form_again(turn, suspicion, "groups did not form")
        return
    ends = " and ".join(suspicion.ends) or "all devices"
    related = [f for f in state.flakes if suspicion.generation in (f.generation, f.successor)]
    if not related:
        turn.say(f"collectives failed at {ends}, but all devices live: the same members form again")
        again(turn, suspicion.ends, "link flake", suspicion.since)
        flake = Flake(suspicion.generation, turn.state.generation, suspicion.ends)
        turn.set(flakes=(*state.flakes[-3:], flake))
        return
    counts = Counter(end for ends in (suspicion.ends, *(f.ends for f in related)) for end in ends)
    live = state.live()
    worst = max(live, key=lambda name: (counts[name], _rank(name)))
    if changes.why_not_leave(state, worst) is not None:  # better a bad link than a device without which all is lost
        _form_again(turn, suspicion, "link flake")
        return
    turn.set(flakes=())
    turn.say(f"collectives failed again at {ends}: {worst} is in most failed pairs and leaves")
    kill(turn, worst, "link flaked twice", suspicion.since)


def _form_again(turn: Turn, suspicion: Suspicion, cause: str) -> None:
    """The same members once more, unless that was tried too often without a commit in between."""
    turn.set(formfails=turn.state.formfails + 1)
    if turn.state.formfails >= turn.state.limits.max_failures:
        turn.finish(f"{cause} {turn.state.formfails} times in a row without a commit: {suspicion.text}")
    else:
        again(turn, suspicion.ends, cause, suspicion.since)


def _rank(name: str) -> tuple[int, ...]:
    """Order of ids: numbers by value; spares after the rest."""
    parts = name.lstrip("s").split(":")
    return tuple(int(part) for part in parts) if len(parts) == 2 else (1 << 30, int(parts[0]))


def waits(state: State, now: float) -> str | None:
    """What has been waited for longer than a second, and whose it is; None while nothing is."""
    if state.stage is Stage.PAUSE:
        return f"paused at step {state.committed} until a device is back ({now - state.stage_since:.0f} s)"
    if state.stage is not Stage.RUN:
        names = owed(state)
        what = {Stage.START: "start", Stage.ABORT: "status", Stage.READY: "adopting the plan", Stage.FORM: "running"}
        if not names or now - state.stage_since < RECHECK_S or state.stage not in what:
            return None
        return f"waiting for {what[state.stage]} of {', '.join(names)} ({now - state.stage_since:.0f} s)"
    waiting = [d for name in state.live() if (d := state.devices[name]).waits_for and now - d.since_when > RECHECK_S]
    if not waiting:
        return None
    longest = min(waiting, key=lambda device: device.since_when)
    return f"{longest.name} waits for {longest.waits_for} ({now - longest.since_when:.0f} s)"
