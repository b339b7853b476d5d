"""A launcher whose processes only talk, under a clock of its own: what `workers.Workers` asks for, in no time."""

from __future__ import annotations

import heapq
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from runflat.elastic.fake_group import Group
from runflat.elastic.fakes import FakeWorker
from runflat.elastic.messages import Failed, Message, Suspect
from runflat.elastic.orders import Inject, Order
from runflat.plan.plan import Plan, ReplicaPlan, plan_from_wire

LATENCY_S = 0.001
START_S = 0.3
KILL_S = 0.01
USUAL_SEQUENCES = 4
IN_RECOVERY = ("detect", "abort", "barrier", "form", "transfer", "digest")
AS_ANSWER = ("formfail", "lowmem")


@dataclass(frozen=True)
class Fault:
    """When `device` reaches `phase` (for the `nth` time) at or after `step`, it suffers `kind`.

    Kinds: kill, stop (silent, as after SIGSTOP), hang (works for ever, with a heartbeat), flake (its collectives fail),
    raise (a Python error), and as answers formfail and lowmem.
    """

    kind: str
    device: str
    phase: str
    step: int = 0
    nth: int = 1


class FakeLauncher:
    """Starts, reaches and ends workers that only talk. `now` is its clock: it moves while somebody listens."""

    def __init__(self, num_steps: int, faults: tuple[Fault, ...] = (), compute_s: float = 0.1):
        """`faults` strike when their device comes to their phase; four sequences take `compute_s`."""
        self.num_steps = num_steps
        self.compute_s = compute_s
        self.now = 0.0
        self.workers: dict[str, FakeWorker] = {}
        self.uses: dict[int, dict[int, set[str]]] = {}
        """Per step and generation: who applied it."""
        self.struck: list[Fault] = []
        self.can_kill = True
        self.slow: dict[str, float] = {}
        """Devices that compute slowly, and how many times as long."""
        self.faults = list(faults)
        self._groups: dict[int, Group] = {}
        self._plans: dict[str, Plan] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self._inbox: deque[tuple[str, int, Message]] = deque()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    # what a controller asks of a launcher

    def start(self, device: str, incarnation: int) -> None:
        """Start a process for a device."""
        self.workers[device] = FakeWorker(self, device, incarnation)
        self.later(START_S, self.workers[device].begin)

    def send(self, device: str, order: Order) -> None:
        """Give an order to a device's present process; a fault that is injected is one more of its faults."""
        if isinstance(order, Inject):
            event = order.event
            self.faults.append(Fault(event["event"], device, event.get("phase", "forward"), event.get("step", 0)))
            return
        worker = self.workers.get(device)
        if worker is not None:
            self.later(LATENCY_S, partial(worker.obey, order))

    def messages(self, timeout_s: float) -> Iterator[tuple[str, int, Message]]:
        """All that arrives within `timeout_s` of the fake clock; returns after the first that come."""
        until = self.now + timeout_s
        while not self._inbox and self._heap and self._heap[0][0] <= until:
            self.advance()
        if not self._inbox:
            self.now = until
        while self._inbox:
            yield self._inbox.popleft()

    def kill(self, device: str) -> None:
        """End a process, if this launcher can."""
        worker = self.workers.get(device)
        if worker is not None and self.can_kill:
            self.later(KILL_S, partial(worker.die, -9))

    def signal(self, device: str, number: signal.Signals) -> None:
        """SIGSTOP silences a process; other signals do nothing."""
        if number is signal.SIGSTOP:
            self.workers[device].stopped = True

    def pid(self, device: str) -> int | None:
        """All live in this process."""
        worker = self.workers.get(device)
        return os.getpid() if worker is not None and worker.alive else None

    def inject(self, event: Mapping[str, Any]) -> None:
        """Nobody imports or tests itself here."""

    def forget(self, event: Mapping[str, Any]) -> None:
        """Faults strike once as it is."""

    def close(self, grace_s: float = 0.0) -> None:
        """End all processes."""
        for worker in self.workers.values():
            worker.alive = False

    # what a worker sees

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do `act` after `delay_s`."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._count, act))

    def advance(self) -> None:
        """Move the clock to the next thing that happens, and let it happen."""
        self.now, _, act = heapq.heappop(self._heap)
        act()

    def deliver(self, worker: FakeWorker, message: Message) -> None:
        """Bring a message to whoever listens."""
        self.later(LATENCY_S, partial(self._inbox.append, (worker.name, worker.incarnation, message)))

    def compute_time_s(self, replica: ReplicaPlan, device: str | None = None) -> float:
        """Seconds that a step of `replica` takes on `device`, else on the slowest; at a lower degree each does more."""
        devices = (device,) if device else tuple(name for name in replica.devices if name is not None)
        slowest = max(self.slow.get(name, 1.0) for name in devices)
        return self.compute_s / USUAL_SEQUENCES * replica.num_sequences * slowest * len(replica.devices) / replica.tp

    def read_plan(self, text: str) -> Plan:
        """The plan of an order; the same object for all who get it."""
        if text not in self._plans:
            self._plans[text] = plan_from_wire(text)
        return self._plans[text]

    def group(self, plan: Plan) -> Group:
        """The groups of a generation."""
        return self._groups.setdefault(plan.generation, Group(plan))

    def committed(self) -> int:
        """Steps that somebody has committed."""
        return max((worker.committed for worker in self.workers.values() if worker.alive), default=0)

    def used(self, device: str, step: int, plan: Plan) -> None:
        """A worker applies a step under a plan."""
        self.uses.setdefault(step, {}).setdefault(plan.generation, set()).add(device)

    def strike(self, worker: FakeWorker, phase: str) -> bool:
        """Let the faults strike that wait for this moment; False when the work ends here."""
        key = (worker.name, phase)
        self._seen[key] = self._seen.get(key, 0) + 1
        for fault in list(self.faults):
            if (fault.device, fault.phase) != key or fault.kind in AS_ANSWER or fault.nth > self._seen[key]:
                continue
            if self.committed() < fault.step and phase not in IN_RECOVERY:
                continue
            self.faults.remove(fault)
            self.struck.append(fault)
            self._suffer(worker, fault.kind)
            return False
        return True

    def answers_with(self, worker: FakeWorker, kind: str, phase: str) -> bool:
        """Whether a fault of this kind is due for the worker here."""
        for fault in self.faults:
            if (fault.kind, fault.device, fault.phase) == (kind, worker.name, phase):
                self.faults.remove(fault)
                self.struck.append(fault)
                return True
        return False

    def _suffer(self, worker: FakeWorker, kind: str) -> None:
        if kind == "kill":
            worker.die(-9)
            self._peers_suspect(worker)
        elif kind == "stop":
            worker.stopped = True
        elif kind == "flake":
            generation = worker.plan.generation if worker.plan else 0
            worker.say(Suspect, generation=generation, phase="sync", text="connection closed by peer")
            worker.wait("an order")
        elif kind == "raise":
            text = "ValueError: bad sample"
            worker.say(Failed, cause="other", class_name="ValueError", text=text, traceback=f"... {text}")
            worker.die(1)

    def _peers_suspect(self, worker: FakeWorker) -> None:
        """Some peers of a dead device see their connections close."""
        plan = worker.plan
        if plan is None or worker.holds != plan.generation:
            return
        for peer in list(self.workers.values())[:2]:
            if peer is not worker and peer.alive and peer.holds == plan.generation:
                text = "connection closed by peer"
                say = partial(peer.say, Suspect, generation=plan.generation, phase="sync", text=text)
                self.later(LATENCY_S / 2, say)
