"""The protocol and workers that only talk, joined under a fake clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from typing import Any

from runflat.elastic import messages
from runflat.elastic.actions import (
    Action,
    Asked,
    Begin,
    Finish,
    Happening,
    Heard,
    Kill,
    Published,
    Send,
    Start,
    StopAsked,
    Tick,
)
from runflat.elastic.fakes import FakeWorker, Fault, Group
from runflat.elastic.protocol import decide
from runflat.elastic.state import Stage, State
from runflat.elastic.watch import deadlines
from runflat.plan.plan import Plan

LATENCY_S = 0.001
TICK_S = 0.25
IN_RECOVERY = ("abort", "barrier", "form", "transfer", "digest")
AS_ANSWER = ("formfail", "lowmem")


class World:
    """The protocol and its workers under a fake clock: a fault in any phase is tried in milliseconds.

    It makes sure that every wait has a deadline with a name, and that the workers' clock-work agrees with the plan.
    """

    def __init__(self, state: State, num_steps: int, faults: tuple[Fault, ...] = (), compute_s: float = 0.1):
        """`faults` strike when their device comes to their phase."""
        self.state = state
        self.num_steps = num_steps
        self.compute_s = compute_s
        self.faults = list(faults)
        self.now = 0.0
        self.workers: dict[str, FakeWorker] = {}
        self.groups: dict[int, Group] = {}
        self.actions: list[tuple[float, Action]] = []
        self.finished: Finish | None = None
        self.uses: dict[int, dict[int, set[int]]] = {}
        self.struck: list[Fault] = []
        self.can_kill = True
        self._seen: dict[tuple[str, str], int] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._begun = False

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

    def committed(self) -> int:
        """Steps that the controller knows to be committed."""
        return self.state.committed

    def used(self, device: str, step: int, plan: Plan) -> None:
        """A worker applies a step under a plan."""
        place = plan.place(device)
        assert place is not None
        self.uses.setdefault(step, {}).setdefault(plan.generation, set()).add(place[0])

    def strike(self, worker: FakeWorker, phase: str) -> bool:
        """Let the faults strike that wait for this moment; False when the work ends here."""
        key = (worker.name, phase)
        self._seen[key] = self._seen.get(key, 0) + 1
        for fault in list(self.faults):
            due = self.state.committed >= fault.step or phase in IN_RECOVERY
            if (fault.device, fault.phase) != key or not due or fault.kind in AS_ANSWER or fault.nth > self._seen[key]:
                continue
            self.faults.remove(fault)
            self.struck.append(fault)
            return self._suffer(worker, fault.kind)
        return True

    def answers_with(self, worker: FakeWorker, kind: str, phase: str) -> bool:
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
            text = "ValueError: bad sample"
            worker.say(messages.Failed, cause="other", class_name="ValueError", text=text, traceback=f"... {text}")
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

    def publish(self, step: int, folder: str) -> None:
        """Let a checkpoint be published."""
        self.happen(Published(step, folder))

    def stop(self, at_s: float) -> None:
        """Have a person end the run at a time."""
        self.later(at_s - self.now, lambda: self.happen(StopAsked()))

    def run(self, limit_s: float = 4000.0) -> Finish:
        """Run until the protocol is finished.

        Raises:
            AssertionError: it is not after `limit_s`, or a worker was told something that it must not do.
        """
        self.run_until(lambda: False, limit_s)
        assert self.finished is not None
        return self.finished

    def run_until(self, condition: Callable[[], bool], limit_s: float = 4000.0) -> State:
        """Run until `condition` holds, or the protocol is finished; returns its state."""
        if not self._begun:
            self._begun = True
            self.happen(Begin())
            self.later(TICK_S, self._tick)
        while self.finished is None and not condition():
            assert self.now < limit_s, f"silence in {self.state.stage}, waiting for {deadlines(self.state)[:3]}"
            self.now, _, act = heapq.heappop(self._heap)
            act()
        return self.state

    def _tick(self) -> None:
        self.happen(Tick())
        if self.finished is None:
            self.later(TICK_S, self._tick)
