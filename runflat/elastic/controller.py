"""The executor: hears the workers, lets `protocol` decide, carries the actions out, keeps books, journal and ledger."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from runflat.cluster.events import Event, EventKind, event_from_json
from runflat.elastic.actions import (
    Action,
    Asked,
    Begin,
    Closed,
    Finish,
    Grew,
    Happening,
    Heard,
    Kill,
    Planned,
    Powered,
    Published,
    Reply,
    Say,
    Send,
    Start,
    StopAsked,
    Tick,
    Took,
)
from runflat.elastic.books import Books, View
from runflat.elastic.boost import Boost, Effects
from runflat.elastic.device import Standing
from runflat.elastic.inject import START_PHASES, Script, check_events
from runflat.elastic.journal import Journal, change_line, change_to_json, closed_line, incident_to_json, ledger_table
from runflat.elastic.messages import Commit, Message, Shard, StepReport, Struck
from runflat.elastic.meter import Meter
from runflat.elastic.orders import Inject
from runflat.elastic.power_spent import PowerBooks
from runflat.elastic.protocol import decide
from runflat.elastic.requests import Inbox, Request
from runflat.elastic.state import Stage, State
from runflat.elastic.watch import waits
from runflat.elastic.workers import Workers
from runflat.errors import ConfigError, RunError, TraceError, UserError

TICK_S = 0.25
SUSPICIOUS_TICK_S = 0.02
"""Between ticks while an exit is awaited that would explain a failed collective."""
LEAST_WAIT_S = 0.001
DEVICES_EVERY_S = 0.5
"""Least time between two versions of devices.json, except at a change."""
LEDGER_EVERY_S = 30.0
SCORE_EVERY_S = 1.0
GRACE_S = 2.0
"""At the end: how long workers that were told to leave may take."""
BY_SCRIPT = "script"


@dataclass(frozen=True)
class Setting:
    """What the controller needs besides the books: the first state, the script, why goodput is not given (if so).

    `declared_step_s`: seconds of a step in health, where they are declared.
    """

    run: Path
    state: State
    events: tuple[Event, ...] = ()
    no_goodput: str | None = None
    declared_step_s: float | None = None
    boost: Boost | None = None


class Controller:
    """One run, from the first process to the last."""

    def __init__(self, setting: Setting, books: Books, view: View, clock: Callable[[], float] = time.monotonic):
        """Nothing is started before `supervise`. `clock` gives seconds."""
        self.setting = setting
        self.state = setting.state
        self.books = books
        self.view = view
        self.journal = Journal(setting.run)
        self.meter = Meter(len(setting.state.devices))
        self.incidents: list[dict[str, Any]] = []
        self.changes: list[dict[str, Any]] = []
        self.finished: Finish | None = None
        self._clock = clock
        self._began = clock()
        self._wall_s = 0.0
        self._inbox = Inbox(setting.run)
        self._script = Script(setting.events)
        self._wake: dict[str, float] = {}
        """Stopped devices, and when they are to be woken."""
        self._interrupts = 0
        self._waiting: str | None = None
        self._last = {"tick": 0.0, "devices": -1.0, "ledger": 0.0, "score": 0.0}
        self._score: dict[str, Any] = {}

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._began

    @property
    def stopped(self) -> bool:
        """Whether the run ended before its last step because it was asked to."""
        return self.state.stopped

    def supervise(self, workers: Workers) -> None:
        """Run until the end; a first Ctrl-C ends it after the step in flight, a second at once.

        Raises:
            UserError: a worker found the input unusable, or a checkpoint could not be written.
            RunError: the run cannot go on; the message says why, and what to do.
        """
        previous = signal.signal(signal.SIGINT, self._on_interrupt)
        grace_s = 0.0
        try:
            self._happen(workers, Begin())
            while self.finished is None:
                self._turn(workers)
            grace_s = GRACE_S
        finally:
            signal.signal(signal.SIGINT, previous)
            workers.close(grace_s)
            if self.setting.boost is not None:
                self.setting.boost.close()
            self._wall_s = self.now
            self.meter.advance(self.state, self._wall_s)
            self.journal.devices(self.state, {}, self._wall_s, self._standing(self._wall_s))
            self.journal.ledger(self.meter.ledger, self._wall_s, self._power_books)
            if self.books.plans:
                self.books.settle(self.state.committed, self.state.scalars, max(self.books.plans), self._wall_s)
            self.books.close()
        self._conclude(self.finished)

    def _on_interrupt(self, _: int, __: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            raise KeyboardInterrupt

    def _turn(self, workers: Workers) -> None:
        """Hear what there is, then do what is due."""
        due = self._last["tick"] + (SUSPICIOUS_TICK_S if self.state.suspicion else TICK_S)
        for device, incarnation, message in workers.messages(max(due - self.now, LEAST_WAIT_S)):
            if incarnation == self.state.devices[device].incarnation:
                self._hear(workers, device, message)
        if self._interrupts and not self.state.stop_asked:
            self.view.say("stopping after this step and saving a checkpoint; press Ctrl-C again to stop at once")
            self._happen(workers, StopAsked())
        if self.now >= due:
            self._last["tick"] = self.now
            self._tick(workers)

    def _hear(self, workers: Workers, device: str, message: Message) -> None:
        if isinstance(message, Struck):
            workers.forget(message.event)
            self._wake_later(event_from_json(message.event))
        published = self.books.take(device, message, self.now)
        if isinstance(message, StepReport):
            if self.books.waited_s:  # which the last report of a step brings about
                degrees = {replica.replica: replica.tp for replica in self._plan_of(message)}
                self.meter.imbalance(self.books.waited_s, degrees)
            self.books.waited_s = {}
        elif isinstance(message, Shard):
            self.meter.saved(message.seconds)
        before = self.state.committed
        self._happen(workers, Heard(device, message))
        if isinstance(message, Commit) and self.state.committed > before:
            self.meter.committed(message.step)
        if published is not None:
            self._happen(workers, Published(*published))
        if self.setting.boost is not None and isinstance(message, StepReport):
            self._power(workers, self.setting.boost.on_report(self.state, message, self.now))

    def _power(self, workers: Workers, effects: Effects | None) -> None:
        """Carry out what the boost wants."""
        if effects is None:
            return
        for text in effects.words:
            self.view.say(text)
        for device, order in effects.orders:
            workers.send(device, order)
        if effects.speeds is not None:
            self._happen(workers, Powered(effects.speeds))
        if effects.done and not self.state.stop_asked:
            self._happen(workers, StopAsked())

    def _plan_of(self, message: StepReport) -> Sequence[Any]:
        plan = self.books.plans.get(message.generation)
        return plan.replicas if plan else ()

    def _happen(self, workers: Workers, happening: Happening) -> None:
        """Let the protocol decide, and carry out what it says."""
        before = self.state
        self.meter.advance(before, self.now)
        self.state, actions = decide(before, happening, self.now)
        if self.setting.boost is not None:
            self._power(workers, self.setting.boost.before(self.state, actions, self.now))
        for action in actions:
            self.meter.learn(self.state, action)
            self.journal.write(action, self.now)
            self._act(workers, before, action)
        changed = before.devices.standings is not self.state.devices.standings
        if changed or before.stage is not self.state.stage:
            self._last["devices"] = -1.0

    def _act(self, workers: Workers, before: State, action: Action) -> None:
        if isinstance(action, Send):
            workers.send(action.device, action.order)
        elif isinstance(action, Kill):
            workers.kill(action.device)
        elif isinstance(action, Start):
            workers.start(action.device, action.incarnation)
        elif isinstance(action, Say):
            self.view.say(action.text)
        elif isinstance(action, Reply):
            if action.request == BY_SCRIPT:
                self.view.say(f"injected: {action.text}")
            else:
                self._inbox.reply(action.request, ok=action.ok, text=action.text)
        elif isinstance(action, Planned):
            generation = before.plan.generation if before.plan else action.plan.generation
            self.books.adopt(action.plan)
            self.books.settle(action.resume.committed, action.scalars, generation, self.now)
            self.books.go_back(action.resume, action.plan.generation)
        elif isinstance(action, Took):
            self.books.adopt(action.plan)
        elif isinstance(action, Closed):
            self.incidents.append(incident_to_json(action))
            self.view.say(closed_line(action))
        elif isinstance(action, Grew):
            self.changes.append(change_to_json(action))
            self.view.say(change_line(action))
        elif isinstance(action, Finish):
            self.finished = action

    def _tick(self, workers: Workers) -> None:
        """What is done four times a second, whether anything is heard or not."""
        now = self.now
        self._happen(workers, Tick())
        if self.setting.boost is not None:
            self._power(workers, self.setting.boost.look(self.state, now))
        for request, wish in self._inbox.take():
            if wish.action == "inject":
                self._inject(workers, request, wish)
            else:
                self._happen(workers, Asked(wish.action, wish.device, request))
        for device in [name for name, at in self._wake.items() if at <= now]:
            del self._wake[device]
            workers.signal(device, signal.SIGCONT)
        for event in self._script.due(now, self.state.committed):
            self._perform(workers, event)
        text = waits(self.state, now)
        if text != self._waiting:
            self._waiting = text
            self.view.waiting(text)
        if now - self._last["devices"] >= DEVICES_EVERY_S or self._last["devices"] < 0:
            self._last["devices"] = now
            pids = {name: workers.pid(name) for name in self.state.devices}
            self.journal.devices(self.state, pids, now, self._standing(now))
        if now - self._last["ledger"] >= LEDGER_EVERY_S:
            self._last["ledger"] = now
            self.journal.ledger(self.meter.ledger, now, self._power_books)

    def _inject(self, workers: Workers, request: str, wish: Request) -> None:
        """Pass a fault on to the worker that is to suffer it, now or when it starts again."""
        row = dict(wish.event or {})
        try:
            event = event_from_json(row, source=f"request {request}")
            check_events([event], tuple(self.state.devices))
        except TraceError as error:
            self._inbox.reply(request, ok=False, text=str(error))
            return
        if event.phase in START_PHASES:
            workers.inject(row)
        else:
            workers.send(event.place, Inject(event=row))
        self._inbox.reply(request, ok=True, text=f"{event.event.value} of {event.place} is to come")

    def _perform(self, workers: Workers, event: Event) -> None:
        """Carry out an event of the script; one that cannot be carried out yet stays due."""
        device = event.place
        standing = self.state.devices[device].standing
        if event.event is EventKind.RETURN:
            if standing not in (Standing.LOST, Standing.OUT, Standing.PARKED) or self.state.stage is Stage.START:
                return
            self._happen(workers, Asked("return", device, BY_SCRIPT))
        elif event.event is EventKind.DRAIN:
            if self.state.stage is not Stage.RUN:
                return
            self._happen(workers, Asked("drain", device, BY_SCRIPT))
        elif event.event is EventKind.STOP:
            workers.signal(device, signal.SIGSTOP)
            self._wake_later(event)
        else:
            workers.kill(device)
        self._script.done(event)

    def _wake_later(self, event: Event) -> None:
        """A device that was stopped for a time is woken after it, whoever has stopped it."""
        if event.event is EventKind.STOP and event.duration_s is not None:
            self._wake[event.place] = self.now + event.duration_s

    def _conclude(self, finish: Finish) -> None:
        """Turn the end of the run into an error, if it was one."""
        if finish.text is None:
            self.view.say(self.table())
            return
        if finish.user_error is not None:
            known = {cls.__name__: cls for cls in UserError.__subclasses__()}
            raise known.get(finish.user_error, ConfigError)(finish.text)
        if finish.traceback is not None:
            path = self.setting.run / "error.txt"
            path.write_text(finish.traceback)
            raise RunError(f"{finish.text} (its traceback is in {path}).")
        raise RunError(finish.text)

    def summary(self) -> dict[str, Any]:
        """What summary.json says of the run."""
        plan = self.state.plan
        goodput, reason = self.goodput()
        return self.books.summary() | {
            "stopped": self.stopped,
            "wall_s": self._wall_s,
            "generation": plan.generation if plan else None,
            "replicas": [
                {"replica": r.replica, "tp": r.tp, "sequences": r.num_sequences}
                for r in (plan.replicas if plan else ())
            ],
            "incidents": [self._with_power(incident) for incident in self.incidents],
            "changes": self.changes,
            "goodput": goodput,
            "goodput_reason": reason,
            "healthy_step_s": self.healthy_step_s()[0],
            "device_s": self.meter.ledger.to_json(),
            "power": self._power_books.summary() if self._power_books else None,
        }

    @property
    def _power_books(self) -> PowerBooks | None:
        """What power took; None where nobody steers it."""
        return self.setting.boost.books if self.setting.boost else None

    def _with_power(self, incident: dict[str, Any]) -> dict[str, Any]:
        """An incident, and what power it took until the next one."""
        spent = self._power_books.by_incident.get(incident["number"]) if self._power_books else None
        return incident if spent is None else {**incident, "power": dict(vars(spent))}

    def goodput(self) -> tuple[float | None, str | None]:
        """Committed tokens over those of a healthy job in the same time, or None; what the healthy rate comes from."""
        if self.setting.no_goodput is not None:
            return None, self.setting.no_goodput
        step_s, source = self.healthy_step_s()
        wall_s = self._wall_s or self.now
        if step_s is None or not wall_s:
            return None, source
        planner = self.setting.state.planner
        batch = planner.job.num_sequences * len(planner.devices) / len(planner.placement)
        steps = (self.books.num_samples - self.books.first_sample) / batch
        return steps * step_s / wall_s, source

    def _standing(self, now: float) -> Mapping[str, Any]:
        """How the job stands, for devices.json; goodput is taken anew every `SCORE_EVERY_S`, for it costs a sort."""
        if now - self._last["score"] >= SCORE_EVERY_S:
            self._last["score"] = now
            goodput, reason = self.goodput()
            self._score = {"goodput": goodput, "goodput_reason": reason, "healthy_step_s": self.healthy_step_s()[0]}
        return {"waiting": self._waiting, **self._score, "device_s": self.meter.ledger.to_json()}

    def healthy_step_s(self) -> tuple[float | None, str | None]:
        """Seconds of a step under the full plan, and where they come from if this run did not show them."""
        books, planner = self.books, self.setting.state.planner
        if books.healthy_step_s is not None:
            return books.healthy_step_s, None
        if self.setting.declared_step_s is not None:
            return self.setting.declared_step_s, "no step was done under the full plan: its declared time is taken"
        estimated_s = books.estimated_step_s(planner.full_plan())
        if estimated_s is None:
            return None, "no step was timed, so the healthy rate is not known"
        return estimated_s, "no step was done under the full plan: steps of this run are scaled by their plans' work"

    def table(self) -> str:
        """Where the time of all devices went, for people."""
        return ledger_table(self.meter.ledger, *self.goodput())
