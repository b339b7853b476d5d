"""Workers that something else starts: Slurm, Kubernetes, ssh, or a person. They call the controller, and it seats them.

On each machine one `runflat worker` per device calls (`attend`), and starts the worker process when it is told to. One
that goes away takes its device with it until it, or another one of its rank, calls again; that is a return.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed import TCPStore

from runflat import __version__
from runflat.elastic.calls import OWN, PASSED, Caller, Ended, Later, Launch, Over, Signal, parse_caller, parse_word
from runflat.elastic.door import Came, Door, Heard, Noted, Said, Went
from runflat.elastic.messages import Back, Exited, Message, parse_message
from runflat.elastic.orders import Order, Wire
from runflat.elastic.seats import Seats
from runflat.errors import ConfigError, RunError
from runflat.train.job import Job

LEAVE_S = 10.0
"""How long those who were told that the run is over may take to hang up."""
SAY_EVERY_S = 15.0

Heading = tuple[str, int, Message]
"""Device, incarnation, message."""


@dataclass
class _Guest:
    """One `runflat worker` that has called; `running` is the incarnation of its worker process, if there is one."""

    caller: Caller
    device: str | None
    running: int | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"rank {self.caller.rank} on {self.caller.node}"


class ExternalWorkers:
    """The launcher of workers that are started elsewhere."""

    def __init__(
        self,
        job: Job,
        door: Door,
        store: tuple[TCPStore, int],
        seats: Seats,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """Nobody is there yet. `store` is where process groups meet, and its port; `say` writes a line for people."""
        self._job = job
        self._door = door
        self._store, self._store_port = store
        self._seats = seats
        self._say = say
        self._clock = clock
        self._guests: dict[int, _Guest] = {}
        self._seated: dict[str, int] = {}
        self._current: dict[str, int] = {}
        self._due: deque[Heading] = deque()
        self._said: dict[str, None] = {}

    def gather(self, wait_s: float) -> None:
        """Wait until all devices are there; after `wait_s` with those that are.

        Raises:
            ConfigError: a replica would span several domains.
            RunError: nobody has called.
        """
        began = said_at = self._clock()
        devices = self._seats.devices
        while len(self._seated) < len(devices):
            now = self._clock()
            if now - began >= wait_s:
                break
            for event in self._door.take(min(1.0, began + wait_s - now)):
                self._take(event, gathering=True)
            if now - said_at >= SAY_EVERY_S:
                said_at = now
                self._say(f"{len(self._seated)} of {len(devices)} workers are there")
        missing = [device for device in devices if device not in self._seated]
        if not self._seated:
            raise RunError(
                f"no worker has called {self._door.endpoint} within {wait_s:.0f} s (--wait-s). Start `runflat worker` "
                f"for each device, with the same token."
            )
        if missing:
            self._say(f"{len(self._seated)} of {len(devices)} workers are there; going on without {', '.join(missing)}")

    # ---- what the controller asks

    def start(self, device: str, incarnation: int) -> None:
        """Have the worker of `device` start a process; where there is none, say so."""
        self._current[device] = incarnation
        peer = self._seated.get(device)
        if peer is None:
            self._due.append((device, incarnation, Exited(incarnation=incarnation, code=None, absent=True)))
            return
        self._guests[peer].running = incarnation
        order = Launch(
            device=device,
            incarnation=incarnation,
            job=self._job.model_dump_json(),
            store_port=self._store_port,
        )
        self._tell(peer, order)

    def send(self, device: str, order: Order) -> None:
        """Give an order to the present process of `device`; nothing happens when it has ended."""
        peer = self._seated.get(device)
        if peer is not None and self._guests[peer].running is not None:
            self._door.send(peer, PASSED + order.encode())

    def messages(self, timeout_s: float) -> Iterator[Heading]:
        """(device, incarnation, message) of all that arrives within `timeout_s`."""
        for event in self._door.take(0.0 if self._due else timeout_s):
            self._take(event)
        while self._due:
            yield self._due.popleft()

    def kill(self, device: str) -> None:
        """SIGKILL to the present process of `device`, if its machine can be reached."""
        self.signal(device, signal.SIGKILL)

    def signal(self, device: str, number: signal.Signals) -> None:
        """Send a signal to the present process of `device`."""
        peer = self._seated.get(device)
        if peer is not None:
            self._tell(peer, Signal(number=int(number)))

    def pid(self, device: str) -> int | None:
        """No process of this machine."""
        return None

    def inject(self, event: Mapping[str, Any]) -> None:
        """Have processes that are started from now on suffer a fault, until it has struck."""
        self._job = self._job.with_fault(event)

    def forget(self, event: Mapping[str, Any]) -> None:
        """An injected event has struck: processes that are started from now on do not suffer it again."""
        self._job = self._job.without_fault(event)

    def close(self, grace_s: float = 0.0) -> None:
        """Tell all workers that the run is over, wait until they have gone, and close the door."""
        for peer in self._guests:
            self._tell(peer, Over())
        deadline = self._clock() + grace_s + LEAVE_S
        while self._guests and (left_s := deadline - self._clock()) > 0:
            for event in self._door.take(left_s):
                if isinstance(event, Went):
                    self._guests.pop(event.peer, None)
                elif isinstance(event, Came):
                    self._door.send(event.peer, OWN + Over().encode())
        self._door.close()

    # ---- what is heard

    def _tell(self, peer: int, word: Wire) -> None:
        self._door.send(peer, OWN + word.encode())

    def _take(self, event: Heard, *, gathering: bool = False) -> None:
        if isinstance(event, Noted):
            self._say(event.text)
        elif isinstance(event, Went):
            self._leave(event.peer)
        elif isinstance(event, Came):
            self._welcome(event, gathering)
        elif event.peer in self._guests:
            self._on_said(event, self._guests[event.peer])

    def _welcome(self, event: Came, gathering: bool) -> None:
        try:
            caller = parse_caller(event.words, event.address)
        except RunError as error:
            self._turn_away(event.peer, str(error))
            return
        device = self._seats.device(caller.rank)
        guest = _Guest(caller, device)
        if caller.version != __version__:
            self._turn_away(event.peer, f"{guest.name} is runflat {caller.version}, the controller {__version__}")
            return
        if device is None:  # which harms nobody: it waits beside the job (nvidia-resiliency-ext#348)
            self._guests[event.peer] = guest
            self._say(f"{guest.name} is one more than the {len(self._seats.devices)} devices of this run; it waits")
            return
        if device in self._seated:
            there = self._guests[self._seated[device]]
            self._turn_away(event.peer, f"{device}, for {guest.name}, is taken by {there.name}")
            return
        nodes = {name: self._guests[peer].caller.node for name, peer in self._seated.items()}
        problem = self._seats.problem(device, caller.node, nodes)
        if problem is not None and gathering:
            raise ConfigError(f"{problem}.")
        if problem is not None:
            self._turn_away(event.peer, problem)
            return
        self._guests[event.peer] = guest
        self._seated[device] = event.peer
        domain, may_span = self._seats.domain(caller.node), self._seats.may_span
        incarnation = self._current.get(device, 0)
        self._due.append((device, incarnation, Back(incarnation=incarnation, domain=domain, may_span=may_span)))
        self._say(f"{guest.name} ({event.address}) drives {device}")

    def _turn_away(self, peer: int, reason: str) -> None:
        """There is no place for this worker now; it may call again."""
        if reason not in self._said:
            self._said[reason] = None
            self._say(f"turned away: {reason}")
        self._tell(peer, Later(text=reason))
        self._door.shut(peer)

    def _on_said(self, event: Said, guest: _Guest) -> None:
        device = guest.device
        if device is None:
            return
        kind, text = event.payload[:1], event.payload[1:]
        try:
            if kind == PASSED:
                message = parse_message(device, text)
                self._due.append((device, message.incarnation, message))
                return
            word = parse_word(text, guest.name)
        except RunError as error:
            self._say(f"{guest.name} is cut off: {error}")
            self._door.shut(event.peer)
            return
        if isinstance(word, Ended):
            if word.incarnation == guest.running:
                guest.running = None
            self._due.append((device, word.incarnation, Exited(incarnation=word.incarnation, code=word.code)))

    def _leave(self, peer: int) -> None:
        guest = self._guests.pop(peer, None)
        if guest is None:
            return
        self._say(f"{guest.name} has gone")
        if guest.device is None or self._seated.get(guest.device) != peer:
            return
        del self._seated[guest.device]
        if guest.running is not None:
            gone = Exited(incarnation=guest.running, code=None, absent=True)
            self._due.append((guest.device, guest.running, gone))
