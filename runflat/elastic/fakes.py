"""Workers that only talk: they follow the contract of `orders` and `messages` in simulated time, without torch.

A `World` joins them to `protocol.decide` under a fake clock, so that a fault in any phase can be tried in milliseconds.
The workers check what a real one would suffer from: they refuse to apply a step without complete gradients, to run a
step twice, or to train beside a device that stands elsewhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from runflat.elastic import messages, orders
from runflat.elastic.actions import Action, Asked, Begin, Finish, Happening, Heard, Kill, Send, Start, StopAsked, Tick
from runflat.elastic.protocol import decide
from runflat.elastic.state import Stage, State
from runflat.elastic.watch import deadlines
from runflat.plan.plan import Plan, plan_from_json

LATENCY_S = 0.001
COMPUTE_S = 0.1
TICK_S = 0.25


@dataclass(frozen=True)
class Fault:
    """When `device` reaches `phase` (for the `nth` time) at or after `step`, it suffers `kind`.

    Kinds: kill, stop (silent, as after SIGSTOP), hang (works for ever, with a heartbeat), flake (its collectives fail),
    raise (a Python error), formfail, lowmem.
    """

    kind: str
    device: str
    phase: str
    step: int = 0
    nth: int = 1


@dataclass
class Group:
    """The process groups of one generation: who is in them, and how many have come to each meeting point."""

    plan: Plan
    met: dict[tuple[str, int], set[str]] = field(default_factory=dict)

    @property
    def members(self) -> set[str]:
        """Devices of the plan."""
        return {self.plan.device(place) for place in self.plan.places}


@dataclass
class FakeWorker:
    """One process: what a real worker holds, as numbers."""

    world: World
    name: str
    incarnation: int
    alive: bool = True
    stopped: bool = False
    floor: int = 0
    """Generations below are left."""
    holds: int = -1
    committed: int = 0
    complete: bool = False
    scalars: tuple[float, ...] | None = None
    plan: Plan | None = None
    prepared: Plan | None = None
    switch: orders.Switch | None = None
    stop_asked: bool = False
    idle: bool = True
    phase: str = "import"
    waits_for: str | None = None
    waits_since: float = 0.0
    receiving: Plan | None = None
    feeders: set[str] = field(default_factory=set)

    def say(self, message: Callable[..., messages.Message], **fields: Any) -> None:
        """Send a message, if the process runs."""
        if self.alive and not self.stopped:
            self.world.deliver(self, message(incarnation=self.incarnation, **fields))

    def after(self, delay_s: float, act: Callable[[], None], generation: int | None = None) -> None:
        """Do `act` later, unless the process is gone or has left `generation` by then."""

        def later() -> None:
            if self.alive and not self.stopped and (generation is None or generation >= self.floor):
                act()

        self.world.later(delay_s, later)

    def at(self, phase: str) -> bool:
        """Come to `phase`; False when a fault ends the work here."""
        self.phase, self.waits_for = phase, None
        return self.world.strike(self, phase)

    def wait(self, what: str) -> None:
        """Say in heartbeats that it waits."""
        self.waits_for, self.waits_since = what, self.world.now

    def meet(self, point: str, group: Group, then: Callable[[], None]) -> None:
        """Wait until all members of `group` are at `point`, then go on."""
        key = (point, self.committed)
        group.met.setdefault(key, set()).add(self.name)
        self.wait(f"{point} of generation {group.plan.generation}")
        generation = group.plan.generation

        def check() -> None:
            if group.met[key] >= group.members:
                then()
            else:
                self.after(0.01, check, generation)

        self.after(0.005, check, generation)

    def beat(self) -> None:
        """Send heartbeats for ever."""
        generation = self.plan.generation if self.plan else -1
        since_s = self.world.now - self.waits_since if self.waits_for else 0.0
        fields = {"generation": generation, "committed": self.committed, "phase": self.phase}
        self.say(messages.Heartbeat, waits_for=self.waits_for, since_s=since_s, **fields)
        if self.alive:
            self.world.later(TICK_S, self.beat)

    def begin(self) -> None:
        """The process is up."""
        self.say(messages.Hello, pid=1)
        self.wait("an order")
        self.beat()
        if self.at("selftest"):
            self.after(0.5, lambda: self.say(messages.SelfTested, ok=True))

    def obey(self, order: orders.Order) -> None:
        """Carry out an order."""
        if not self.alive or self.stopped:
            if self.alive:
                self.world.missed.setdefault(self.name, []).append(order)
            return
        match order:
            case orders.Abort():
                self._abort(order)
            case orders.PlanOrder():
                self._take(order)
            case orders.Go():
                self._go(order.generation)
            case orders.Prepare():
                self._prepare(order)
            case orders.Unprepare():
                if self.prepared is not None:
                    self.floor = max(self.floor, 0)
                self.prepared = self.switch = self.receiving = None
            case orders.Switch():
                self.switch = order
            case orders.Receive():
                self.receiving = plan_from_json(order.plan)
                self.feeders = set()
                if self.at("copy"):
                    self.say(messages.Listening, address=("127.0.0.1", 1))
            case orders.Feed():
                self._feed(order)
            case orders.Stop():
                self.stop_asked = True
            case orders.Exit():
                self.die(0)
            case orders.Unfeed():
                pass

    def die(self, code: int) -> None:
        """The process ends; what it has sent arrives first."""
        if self.alive:
            self.alive = False
            self.world.deliver(self, messages.Exited(incarnation=self.incarnation, code=code))

    # recovery

    def _abort(self, order: orders.Abort) -> None:
        self.floor = order.generation
        self.prepared = self.switch = self.receiving = None
        self.idle = True
        if not self.at("abort"):
            return
        self.wait("an order")
        fields = {"committed": self.committed, "complete": self.complete, "holds": self.holds}
        self.after(
            0.005, lambda: self.say(messages.Status, generation=order.generation, scalars=self.scalars, **fields)
        )

    def _take(self, order: orders.PlanOrder) -> None:
        self.plan, resume = plan_from_json(order.plan), order.resume
        if not self.at("barrier"):
            return
        if self.world.strike_kind(self, "lowmem", "barrier"):
            fields = {"need_bytes": 2, "free_bytes": 1}
            self.say(messages.LowMem, generation=order.generation, **fields)
            return
        if resume.action in ("start", "memory", "checkpoint"):
            self.committed, self.holds = resume.committed, order.generation
        elif self.holds < 0:
            self.committed = resume.committed  # a newcomer takes what the transfers bring
        elif resume.action == "forward" and self.committed == resume.committed - 1:
            assert self.complete, f"{self.name} is to apply step {self.committed} without its gradients"
            self.committed += 1
        assert self.committed == resume.committed, f"{self.name} is at {self.committed}, not {resume.committed}"
        self.complete = False
        self.wait("an order")
        self.after(0.005, lambda: self.say(messages.Ready, generation=order.generation), order.generation)

    def _go(self, generation: int) -> None:
        if generation < self.floor or self.plan is None or not self.at("form"):
            return
        if self.world.strike_kind(self, "formfail", "form"):
            self.say(messages.FormFail, generation=generation, text="connection refused")
            return
        group = self.world.group(self.plan)
        self.meet("form", group, lambda: self._formed(group))

    def _formed(self, group: Group) -> None:
        generation = group.plan.generation
        self.say(messages.Formed, generation=generation)
        if self.at("transfer"):
            self.meet("transfer", group, lambda: self._digest(group))

    def _digest(self, group: Group) -> None:
        if self.at("digest"):
            self.meet("digest", group, lambda: self._run(group))

    def _run(self, group: Group) -> None:
        generation = group.plan.generation
        self.holds, self.idle = generation, False
        self.say(messages.Running, generation=generation)
        self._step(group)

    # training

    def _step(self, group: Group) -> None:
        world, generation = self.world, group.plan.generation
        if self.committed >= world.num_steps:
            self._end(group, stopped=False)
        elif self.at("forward"):
            self.after(COMPUTE_S, lambda: self._sync(group), generation)

    def _sync(self, group: Group) -> None:
        if self.at("sync"):
            self.meet("sync", group, lambda: self._barrier(group))

    def _barrier(self, group: Group) -> None:
        self.complete = True
        if not self.at("commit"):
            return
        flags = group.met.setdefault(("flags", self.committed), set())
        flags |= {"stop"} if self.stop_asked else set()
        # All must have the order to switch before any goes over, as the least of the flags says.
        if self.switch is None:
            flags.add(f"not {self.name}")
        self.meet("commit", group, lambda: self._commit(group, flags))

    def _commit(self, group: Group, flags: set[str]) -> None:
        place = group.plan.place(self.name)
        assert place is not None
        generation = group.plan.generation
        if place[1] == group.plan.replica(place[0]).live_slots[0]:
            self.say(messages.Commit, generation=generation, step=self.committed, scalars=(1.0,))
        if self.at("update"):
            self.after(0.002, lambda: self._apply(group, flags), generation)

    def _apply(self, group: Group, flags: set[str]) -> None:
        self.world.used(self, group.plan)
        self.committed, self.complete, self.scalars = self.committed + 1, False, (1.0,)
        if self.receiving is None and any(f.startswith("not ") for f in flags) is False and self.switch:
            self._go_over()
        elif "stop" in flags:
            self._end(group, stopped=True)
        else:
            self._step(group)

    def _end(self, group: Group, *, stopped: bool) -> None:
        if self.at("checkpoint"):
            self.meet("end", group, lambda: self._done(stopped))

    def _done(self, stopped: bool) -> None:
        self.say(messages.Done, step=self.committed, stopped=stopped)
        self.wait("an order")

    # changes at a boundary

    def _feed(self, order: orders.Feed) -> None:
        target = self.world.workers.get(order.target)
        self.after(0.3, lambda: target.fed_by(self.name) if target else None)

    def fed_by(self, source: str) -> None:
        """A source has sent all."""
        if self.alive and not self.stopped and self.receiving is not None:
            self.feeders.add(source)
            self.say(messages.Fed, committed=self.world.state.committed, bytes=1)

    def _prepare(self, order: orders.Prepare) -> None:
        plan = plan_from_json(order.plan)
        if not self.at("join"):
            return
        if self.world.strike_kind(self, "formfail", "join"):
            self.say(messages.FormFail, generation=order.generation, text="connection refused")
            return
        if plan.place(self.name) is None:
            self.say(messages.Prepared, generation=order.generation)
            return
        self.prepared = plan
        group = self.world.group(plan)
        newcomer = self.receiving is not None
        before = self.phase, self.waits_for

        def check() -> None:
            group.met.setdefault(("prepare", 0), set()).add(self.name)
            if self.prepared is not plan:
                return
            if group.met["prepare", 0] >= group.members:
                self.say(messages.Prepared, generation=order.generation)
                if newcomer:
                    self._join(plan)
            else:
                self.after(0.01, check)

        self.after(0.02, check)
        self.phase, self.waits_for = before

    def _join(self, plan: Plan) -> None:
        """A newcomer waits until somebody of the old plan has gone over, and goes over at the same step."""
        self.wait("the switch")

        def check() -> None:
            if self.prepared is not plan:
                return
            over = [w for w in self.world.workers.values() if w.alive and w.holds == plan.generation]
            if self.switch is not None and over:
                self.committed = over[0].committed
                self.receiving = None
                self._go_over()
            else:
                self.after(0.01, check)

        check()

    def _go_over(self) -> None:
        assert self.switch is not None
        generation, self.switch = self.switch.generation, None
        if not self.at("switch"):
            return
        self.say(messages.Switched, generation=generation, committed=self.committed)
        if self.prepared is None:
            self.wait("an order")
            return
        self.plan, self.prepared, self.holds = self.prepared, None, generation
        self._step(self.world.group(self.plan))


class World:
    """The protocol and its workers under a fake clock."""

    def __init__(self, state: State, num_steps: int, faults: tuple[Fault, ...] = ()):
        """`faults` strike when their device comes to their phase."""
        self.state = state
        self.num_steps = num_steps
        self.faults = list(faults)
        self.now = 0.0
        self.workers: dict[str, FakeWorker] = {}
        self.missed: dict[str, list[orders.Order]] = {}
        self.groups: dict[int, Group] = {}
        self.actions: list[tuple[float, Action]] = []
        self.finished: Finish | None = None
        self.uses: dict[int, dict[int, set[int]]] = {}
        self.struck: list[Fault] = []
        self.can_kill = True
        self._seen: dict[tuple[str, str], int] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do `act` after `delay_s`."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._count, act))

    def deliver(self, worker: FakeWorker, message: messages.Message) -> None:
        """Bring a message to the controller, unless the device has been started again since."""

        def arrive() -> None:
            if self.workers.get(worker.name) is worker:
                self.happen(Heard(worker.name, message))

        self.later(LATENCY_S, arrive)

    def happen(self, happening: Happening) -> None:
        """Let the protocol decide, and do what it says."""
        if self.finished is not None:
            return
        self.state, actions = decide(self.state, happening, self.now)
        for action in actions:
            self.actions.append((self.now, action))
            self._act(action)
        if self.state.stage is not Stage.FINISHED:
            due = deadlines(self.state)
            assert due, f"nothing is waited for in {self.state.stage}"
            assert all(deadline.name for deadline in due)

    def _act(self, action: Action) -> None:
        if isinstance(action, Send):
            self._send(action)
        elif isinstance(action, Kill):
            worker = self.workers.get(action.device)
            if worker is not None and self.can_kill:
                self.later(0.01, lambda: worker.die(-9))
        elif isinstance(action, Start):
            self.workers[action.device] = FakeWorker(self, action.device, action.incarnation)
            self.later(0.3, self.workers[action.device].begin)
        elif isinstance(action, Finish):
            self.finished = action

    def _send(self, action: Send) -> None:
        worker = self.workers.get(action.device)
        if worker is not None:
            self.later(LATENCY_S, partial(worker.obey, action.order))

    def group(self, plan: Plan) -> Group:
        """The groups of a generation."""
        return self.groups.setdefault(plan.generation, Group(plan))

    def used(self, worker: FakeWorker, plan: Plan) -> None:
        """A worker applies a step: no step may be applied under two plans."""
        place = plan.place(worker.name)
        assert place is not None
        by = self.uses.setdefault(worker.committed, {})
        by.setdefault(plan.generation, set()).add(place[0])

    def strike(self, worker: FakeWorker, phase: str) -> bool:
        """Let the faults strike that wait for this moment; False when the work ends here."""
        key = (worker.name, phase)
        self._seen[key] = self._seen.get(key, 0) + 1
        for fault in list(self.faults):
            due = self.state.committed >= fault.step or phase in ("abort", "barrier", "form", "transfer", "digest")
            if (fault.device, fault.phase) != key or not due or fault.kind in ("formfail", "lowmem"):
                continue
            if fault.nth > self._seen[key] and fault.nth > 1:
                continue
            self.faults.remove(fault)
            self.struck.append(fault)
            return self._suffer(worker, fault.kind)
        return True

    def strike_kind(self, worker: FakeWorker, kind: str, phase: str) -> bool:
        """Whether a fault of this kind is due for the worker here."""
        for fault in self.faults:
            if (fault.kind, fault.device, fault.phase) == (kind, worker.name, phase):
                self.faults.remove(fault)
                self.struck.append(fault)
                return True
        return False

    def _suffer(self, worker: FakeWorker, kind: str) -> bool:
        if kind == "kill":
            worker.die(-9)
            self._peers_suspect(worker)
        elif kind == "stop":
            worker.stopped = True
        elif kind == "flake":
            generation = worker.plan.generation if worker.plan else 0
            worker.say(messages.Suspect, generation=generation, phase="sync", text="connection closed by peer")
            worker.wait("an order")
        elif kind == "raise":
            fields = {"cause": "other", "class_name": "ValueError", "text": "ValueError: bad sample"}
            worker.say(messages.Failed, traceback="Traceback: bad sample", **fields)
            worker.die(1)
        return False

    def _peers_suspect(self, worker: FakeWorker) -> None:
        """The neighbours of a dead device see their connections close, a little later."""
        plan = worker.plan
        if plan is None or worker.holds != plan.generation:
            return
        for peer in list(self.workers.values())[:2]:
            if peer is not worker and peer.alive and peer.holds == plan.generation:
                text = "connection closed by peer"
                say = partial(peer.say, messages.Suspect, generation=plan.generation, phase="sync", text=text)
                self.later(0.0005, say)

    def ask(self, at_s: float, action: Any, device: str) -> None:
        """Have a person ask for something at a time."""
        self.later(at_s - self.now, lambda: self.happen(Asked(action, device, "request")))

    def stop(self, at_s: float) -> None:
        """Have a person end the run at a time."""
        self.later(at_s - self.now, lambda: self.happen(StopAsked()))

    def run(self, limit_s: float = 4000.0) -> Finish:
        """Run until the protocol is finished.

        Raises:
            AssertionError: it is not after `limit_s`, or a worker was told something that it must not do.
        """
        self.happen(Begin())

        def tick() -> None:
            self.happen(Tick())
            if self.finished is None:
                self.later(TICK_S, tick)

        self.later(TICK_S, tick)
        while self.finished is None:
            assert self.now < limit_s, f"silence in {self.state.stage}, waiting for {deadlines(self.state)[:3]}"
            self.now, _, act = heapq.heappop(self._heap)
            act()
        return self.finished
