"""Workers that only talk: they follow the contract of `orders` and `messages` in simulated time, without torch.

They check what a real one would suffer from: they refuse to apply a step without complete gradients, or to take up a
plan from another step than the one that it names. `fake_launcher` starts them; `fake_world` joins them to the protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from runflat.elastic import messages, orders
from runflat.elastic.fake_group import RESULTS, SCALARS, Group
from runflat.plan.plan import Plan, ReplicaPlan

HEARTBEAT_S = 0.25
SAVE_EVERY = 5
"""Steps between checkpoints."""


class Surroundings(Protocol):
    """What a worker sees of the world: the clock, the wire, its peers, and what strikes it."""

    now: float
    num_steps: int
    workers: dict[str, FakeWorker]

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do `act` after `delay_s`."""

    def deliver(self, worker: FakeWorker, message: messages.Message) -> None:
        """Bring a message to the controller."""

    def committed(self) -> int:
        """Steps that the controller knows to be committed."""

    def compute_time_s(self, replica: ReplicaPlan, device: str | None = None) -> float:
        """Seconds that a step of `replica` takes on `device`, else on its slowest one, for which the others wait."""

    def read_plan(self, text: str) -> Plan:
        """The plan of an order."""

    def group(self, plan: Plan) -> Group:
        """The groups of a generation."""

    def used(self, device: str, step: int, plan: Plan) -> None:
        """A worker applies a step."""

    def strike(self, worker: FakeWorker, phase: str) -> bool:
        """Let the faults strike that wait for this moment; False when the work ends here."""

    def answers_with(self, worker: FakeWorker, kind: str, phase: str) -> bool:
        """Whether a fault of this kind, which is an answer, is due for the worker here."""


@dataclass
class FakeWorker:
    """One process: what a real worker holds, as numbers."""

    world: Surroundings
    name: str
    incarnation: int
    alive: bool = True
    stopped: bool = False
    floor: int = 0
    """Generations below are left."""
    holds: int = -1
    committed: int = 0
    complete: bool = False
    final_of: Plan | None = None
    """Plan under which the last complete gradients were made."""
    scalars: tuple[float, ...] | None = None
    plan: Plan | None = None
    prepared: Plan | None = None
    switch: orders.Switch | None = None
    stop_asked: bool = False
    stop_at: int | None = None
    idle: bool = True
    phase: str = "import"
    waits_for: str | None = None
    waits_since: float = 0.0
    waited_s: float = 0.0
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
        if self.waits_for is not None:
            self.waited_s += self.world.now - self.waits_since
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
            if len(group.met[key]) == len(group.members):
                then()
            else:
                self.after(0.01, check, generation)

        self.after(0.005, check, generation)

    def beat(self) -> None:
        """Send heartbeats for ever."""
        generation = self.plan.generation if self.plan else -1
        since_s = self.world.now - self.waits_since if self.waits_for else 0.0
        fields = {"generation": generation, "committed": self.committed, "phase": self.phase}
        waits = {"waits_for": self.waits_for, "since_s": since_s, "waited_s": self.waited_s + since_s}
        self.say(messages.Heartbeat, **waits, **fields)
        if self.alive:
            self.world.later(HEARTBEAT_S, self.beat)

    def begin(self) -> None:
        """The process is up."""
        if not self.at("import"):
            return
        self.say(messages.Hello, pid=1)
        self.wait("an order")
        self.beat()
        if self.at("selftest"):
            self.after(0.5, lambda: self.say(messages.SelfTested, ok=True))

    def obey(self, order: orders.Order) -> None:
        """Carry out an order."""
        if not self.alive or self.stopped:
            return  # a stopped process would find the order when it wakes; the fakes do not wake
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
                self.prepared = self.switch = self.receiving = None
            case orders.Switch():
                self.switch = order
            case orders.Receive():
                self.receiving = self.world.read_plan(order.plan)
                self.feeders = set()
                if self.at("copy"):
                    self.say(messages.Listening, generation=order.generation, address=("", order.generation))
            case orders.Feed():
                self._feed(order)
            case orders.Stop():
                self.stop_asked = True
            case orders.Exit():
                self.die(0)

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
        if not self.at("detect") or not self.at("abort"):
            return
        self.wait("an order")
        fields = {"committed": self.committed, "complete": self.complete, "holds": self.holds}
        self.after(
            0.005, lambda: self.say(messages.Status, generation=order.generation, scalars=self.scalars, **fields)
        )

    def _take(self, order: orders.PlanOrder) -> None:
        self.plan, resume = self.world.read_plan(order.plan), order.resume
        self.stop_at = resume.committed if resume.stop else None
        if not self.at("barrier"):
            return
        if self.world.answers_with(self, "lowmem", "barrier"):
            fields = {"need_bytes": 2, "free_bytes": 1}
            self.say(messages.LowMem, generation=order.generation, **fields)
            return
        if resume.action in ("start", "memory", "checkpoint"):
            self.committed, self.holds = resume.committed, order.generation
        elif self.holds < 0:
            self.committed = resume.committed  # a newcomer takes what the transfers bring
        elif resume.action == "forward" and self.committed == resume.committed - 1:
            assert self.complete, f"{self.name} is to apply step {self.committed} without its gradients"
            assert self.final_of is not None
            self.world.used(self.name, self.committed, self.final_of)
            self.committed += 1
        assert self.committed == resume.committed, f"{self.name} is at {self.committed}, not {resume.committed}"
        self.complete = False
        self.wait("an order")
        self.after(0.005, lambda: self.say(messages.Ready, generation=order.generation), order.generation)

    def _go(self, generation: int) -> None:
        if generation < self.floor or self.plan is None or not self.at("form") or self._refuses(generation, "form"):
            return
        group = self.world.group(self.plan)
        self.meet("form", group, lambda: self._formed(group))

    def _refuses(self, generation: int, phase: str) -> bool:
        """Whether the groups do not form here, which is then reported."""
        refuses = self.world.answers_with(self, "formfail", phase)
        if refuses:
            self.say(messages.FormFail, generation=generation, text="connection refused")
        return refuses

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
        if self.committed in (world.num_steps, self.stop_at):
            self._end(group, stopped=self.committed < world.num_steps)
        elif (self.committed % SAVE_EVERY or self.at("checkpoint")) and self.at("forward"):
            place = group.plan.place(self.name)
            assert place is not None
            replica = group.plan.replica(place[0])
            own_s, all_s = world.compute_time_s(replica, self.name), world.compute_time_s(replica)
            self.after(own_s / 3, lambda: self._backward(group, own_s * 2 / 3, all_s - own_s / 3), generation)

    def _backward(self, group: Group, own_s: float, all_s: float) -> None:
        if self.at("backward"):
            self.after(own_s, lambda: self.wait("its replica"), group.plan.generation)
            self.after(all_s, lambda: self._sync(group), group.plan.generation)

    def _sync(self, group: Group) -> None:
        if self.at("sync"):
            self.meet("sync", group, lambda: self._barrier(group))

    def _barrier(self, group: Group) -> None:
        self.complete, self.final_of = True, group.plan
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
        fields = {"generation": group.plan.generation, "step": self.committed}
        if place[1] == group.plan.replica(place[0]).live_slots[0]:
            self.say(messages.Commit, **fields, scalars=SCALARS)
        if self.at("update"):
            self.after(0.002, lambda: self._apply(group, flags), group.plan.generation)

    def _report(self, plan: Plan) -> None:
        """The step report of a replica, from its lowest live slot."""
        place = plan.place(self.name)
        assert place is not None
        replica = plan.replica(place[0])
        if place[1] != replica.live_slots[0]:
            return
        seconds = self.world.compute_time_s(replica)
        before = sum(r.num_sequences for r in plan.replicas if r.replica < place[0])
        self.say(
            messages.StepReport,
            generation=plan.generation,
            step=self.committed,
            replica=place[0],
            first_sample=self.committed * plan.num_sequences + before,
            num_samples=replica.num_sequences,
            compute_s=seconds,
            step_s=seconds,
            **RESULTS,
        )

    def _apply(self, group: Group, flags: set[str]) -> None:
        self._report(group.plan)
        self.world.used(self.name, self.committed, group.plan)
        self.committed, self.complete, self.scalars = self.committed + 1, False, SCALARS
        if self.switch is not None and not any(flag.startswith("not ") for flag in flags):
            self._go_over()
            return
        self._end(group, stopped=True) if "stop" in flags else self._step(group)

    def _end(self, group: Group, *, stopped: bool) -> None:
        if self.at("checkpoint"):
            self.meet("end", group, lambda: self._done(stopped))

    def _done(self, stopped: bool) -> None:
        self.say(messages.Done, step=self.committed, stopped=stopped)
        self.wait("an order")

    # changes at a boundary

    def _feed(self, order: orders.Feed) -> None:
        target = self.world.workers.get(order.target)
        self.after(0.3, lambda: target.fed_by(self.name, order.address[1]) if target else None)

    def fed_by(self, source: str, port: int) -> None:
        """A source has sent all, to where this device listened for generation `port`."""
        if self.alive and not self.stopped and self.receiving is not None and self.receiving.generation == port:
            self.feeders.add(source)
            self.say(messages.Fed, generation=port, committed=self.world.committed(), bytes=1)

    def _prepare(self, order: orders.Prepare) -> None:
        plan = self.world.read_plan(order.plan)
        before = self.phase, self.waits_for
        if not self.at("join"):
            return
        self.phase, self.waits_for = before  # it trains on beside this
        if self._refuses(order.generation, "join"):
            return
        if plan.place(self.name) is None:
            self.say(messages.Prepared, generation=order.generation)
            return
        self.prepared = plan
        group = self.world.group(plan)
        newcomer = self.receiving is not None

        def check() -> None:
            group.met.setdefault(("prepare", 0), set()).add(self.name)
            if self.prepared is not plan:
                return
            if len(group.met["prepare", 0]) == len(group.members):
                self.say(messages.Prepared, generation=order.generation)
                if newcomer:
                    self._join(plan)
            else:
                self.after(0.01, check)

        self.after(0.02, check)

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
