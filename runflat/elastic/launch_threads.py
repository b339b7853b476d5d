"""Workers as threads of this process, for tests and for jobs with many small devices: real groups, no processes.

Each device is a `Session` with process groups of its own. A kill drops a device's groups and silences it, a stop
silences it until it is woken; a link flake shuts all connections of the generation. What needs a process of its own
(memory limits, real signals, the loop of a user) is for `launch_local`.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from runflat.cluster.events import Event, EventKind
from runflat.elastic.formation import await_buried
from runflat.elastic.launch_local import open_store
from runflat.elastic.messages import Exited, Message, parse_message
from runflat.elastic.orders import Exit, Order, parse_order
from runflat.elastic.session import Session
from runflat.elastic.side_thread import start_thread
from runflat.elastic.strike import suffer
from runflat.elastic.worker_process import FAILED, error_message
from runflat.parallel.comms import Network
from runflat.parallel.sockets import LOOPBACK, SharedSockets
from runflat.train.engine import Engine
from runflat.train.job import Job

PATIENCE = Network(meet_timeout_s=5.0, form_timeout_s=5.0)
"""Threads come at once, and a rank that waits for one that has ended holds up the end of the run."""
JOIN_S = 10.0
"""How long the threads of a device may take to end when it has been told to."""


class Killed(BaseException):
    """Ends the thread of a device that was killed."""


class ThreadChannel:
    """A worker's end of the connection to the controller, and the hold that a launcher has on it."""

    def __init__(self, deliver: Callable[[Message], object], device: str, incarnation: int):
        """`deliver` takes each message that the worker sends, and at last that it has ended."""
        self._deliver = deliver
        self._device = device
        self._incarnation = incarnation
        self._orders: queue.Queue[bytes | None] = queue.Queue()
        self._lock = threading.Lock()
        self.running = threading.Event()
        self.running.set()
        self.ended = False

    def send(self, message: Mapping[str, Any]) -> None:
        """Deliver one message, when the worker is not stopped; nothing happens when it has ended."""
        text = json.dumps({**message, "incarnation": self._incarnation}).encode()
        self.running.wait()
        with self._lock:
            if not self.ended:
                self._deliver(parse_message(self._device, text))

    def receive(self) -> Order | None:
        """The next order, when the worker is not stopped; None when it has ended."""
        text = self._orders.get()
        self.running.wait()
        return None if text is None else parse_order(text)

    def give(self, order: Order) -> None:
        """Put an order before the worker."""
        self._orders.put(order.encode())

    def end(self, code: int) -> None:
        """The worker has ended, or ends now: what it still says is dropped, and its threads are woken to leave."""
        with self._lock:
            if self.ended:
                return
            self.ended = True
            self._deliver(Exited(incarnation=self._incarnation, code=code))
        self._orders.put(Exit().encode())
        self._orders.put(None)
        self.running.set()

    def hold(self) -> None:
        """Wait here while the worker is stopped.

        Raises:
            Killed: it was killed meanwhile.
        """
        self.running.wait()
        if self.ended:
            raise Killed


class ThreadWorkers:
    """The workers of one run as threads, and the store at which they meet; listens on loopback only."""

    def __init__(self, job: Job, network: Network = PATIENCE):
        """Open the store; no worker is started yet. `network` has the time-outs of forming."""
        self._network = network
        self._store, self._port = open_store()
        self._sockets = SharedSockets(self._port)
        self._job = job
        self._messages: queue.Queue[tuple[str, int, Message]] = queue.Queue()
        self._channels: dict[str, ThreadChannel] = {}
        self._threads: list[threading.Thread] = []
        self.sessions: dict[str, Session] = {}
        """The newest session of each device, once it is made."""

    def start(self, device: str, incarnation: int) -> None:
        """Start a thread for `device`."""

        def deliver(message: Message) -> None:
            self._messages.put((device, incarnation, message))

        channel = ThreadChannel(deliver, device, incarnation)
        self._channels[device] = channel
        job = self._job
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        work = start_thread(f"worker {device}", lambda: self._work(job, device, incarnation, channel))
        self._threads.append(work)

    def _work(self, job: Job, device: str, incarnation: int, channel: ThreadChannel) -> None:
        def strike(event: Event, run: Path, engine: Engine) -> None:
            self._strike(event, run, engine, channel, device)

        code = 0
        session: Session | None = None
        try:
            session = Session(
                job,
                device,
                channel,
                (LOOPBACK, self._port),
                0,
                incarnation > 0,
                sockets=self._sockets,
                suffer=strike,
                network=self._network,
            )
            if self._channels[device] is channel:  # one that was given up while it started may come after its successor
                self.sessions[device] = session
            session.run()
        except Killed:
            code = -signal.SIGKILL
        except BaseException as error:  # whatever it is, the controller must hear of it: it decides what the job does
            channel.send(error_message(error))
            code = FAILED
        channel.end(code)
        if session is not None:
            session.close()

    def _strike(self, event: Event, run: Path, engine: Engine, channel: ThreadChannel, device: str) -> None:
        if event.event is EventKind.KILL:
            channel.end(-signal.SIGKILL)
            raise Killed
        if event.event is EventKind.STOP:
            channel.running.clear()
            channel.hold()
        elif event.event is EventKind.FLAKE:
            self._sockets.abort(self.sessions[device].presence.generation)
        else:
            suffer(event, run, engine)

    def send(self, device: str, order: Order) -> None:
        """Give an order to the present worker of `device`; nothing happens when it has ended."""
        self._channels[device].give(order)

    def messages(self, timeout_s: float) -> Iterator[tuple[str, int, Message]]:
        """(device, incarnation, message) of all that arrives within `timeout_s`; returns after the first that come."""
        try:
            yield self._messages.get(timeout=timeout_s)
            while True:
                yield self._messages.get_nowait()
        except queue.Empty:
            return

    def pid(self, device: str) -> int | None:
        """All workers live in this process."""
        channel = self._channels.get(device)
        return None if channel is None or channel.ended else os.getpid()

    def kill(self, device: str) -> None:
        """End the present worker of `device`."""
        self._channels[device].end(-signal.SIGKILL)

    def signal(self, device: str, number: signal.Signals) -> None:
        """SIGSTOP silences a worker, SIGCONT lets it speak again, SIGKILL ends it; other signals do nothing."""
        if number is signal.SIGSTOP:
            self._channels[device].running.clear()
        elif number is signal.SIGCONT:
            self._channels[device].running.set()
        elif number is signal.SIGKILL:
            self.kill(device)

    def inject(self, event: Mapping[str, Any]) -> None:
        """Have workers that are started from now on suffer a fault, until it has struck."""
        self._job = self._job.with_fault(event)

    def forget(self, event: Mapping[str, Any]) -> None:
        """An injected event has struck: workers that are started from now on do not suffer it again."""
        self._job = self._job.without_fault(event)

    def close(self, grace_s: float = 0.0) -> None:
        """End all workers, at once or after `grace_s` in which those that were told to leave do so."""
        for thread in self._threads:
            thread.join(grace_s / max(len(self._threads), 1))
        for channel in self._channels.values():
            channel.end(-signal.SIGKILL)
        for thread in self._threads:
            thread.join(JOIN_S)
        self._sockets.settle(2 * self._network.meet_timeout_s)
        # A collective that gloo never signals ends by its time-out, and a destructor that waits for it right after. The
        # process must not end before: Python would end that thread inside of C++, which then aborts the process.
        await_buried(self._job.train.timeout_s + JOIN_S)
