"""Workers as processes of this machine, started from a fork server that has torch loaded; JSON messages over pipes."""

from __future__ import annotations

import math
import multiprocessing
import os
import selectors
import signal
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed import TCPStore

from runflat.elastic.endpoint import listen
from runflat.elastic.messages import Exited, Message, parse_message
from runflat.elastic.orders import Order
from runflat.elastic.worker_process import worker_process
from runflat.parallel.sockets import LOOPBACK
from runflat.train.job import Job

STORE_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
"""Longest wait for a process whose channel has ended, or that was killed."""


def open_store(host: str = LOOPBACK, port: int = 0) -> tuple[TCPStore, int]:
    """The store at which workers meet, and its port (0: any free one); it listens at the address `host` only.

    It is the controller's: no rank hosts it, so that none is special (pytorch#182221, pytorch#67742).
    """
    listener = listen(host, port)
    port = listener.getsockname()[1]
    # The store takes over the listening socket: by itself it would listen on all interfaces.
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        master_listen_fd=listener.detach(),
    )
    return store, port


class LocalWorkers:
    """The worker processes of one run, and the store at which they meet (`address`); all listen on `host` only.

    Each start of a device is a new incarnation with a channel of its own. The fork server loads once
    what all workers need.
    """

    def __init__(self, job: Job, host: str = LOOPBACK):
        """Open the store; no worker is started yet."""
        self._store, port = open_store(host)
        self.address = (host, port)
        self._host = host
        self._context = multiprocessing.get_context("forkserver")
        model_type = job.hf_config["model_type"]
        modules = [worker_process.__module__, f"transformers.models.{model_type}.modeling_{model_type}"]
        self._context.set_forkserver_preload(modules)
        self._job = job
        self._channels: dict[Connection, tuple[str, int]] = {}
        self._selector = selectors.DefaultSelector()
        self._connections: dict[str, Connection] = {}
        self._processes: dict[tuple[str, int], BaseProcess] = {}
        self._ending: dict[tuple[str, int], float] = {}
        """Processes that have hung up, and until when they may take to end."""
        self._killed: set[tuple[str, int]] = set()
        """Those of them that were killed because they took longer."""
        self._current: dict[str, int] = {}

    def start(self, device: str, incarnation: int) -> None:
        """Start a process for `device`; what an older one of it still says is dropped by whoever listens."""
        ours, theirs = self._context.Pipe()
        args = (theirs, self._job.model_dump_json(), device, incarnation, self.address, self._host)
        name = f"runflat-{device}"
        process = self._context.Process(target=worker_process, args=args, name=name, daemon=True)
        process.start()
        theirs.close()
        self._channels[ours] = (device, incarnation)
        self._selector.register(ours, selectors.EVENT_READ)
        self._connections[device] = ours
        self._processes[device, incarnation] = process
        self._current[device] = incarnation

    def send(self, device: str, order: Order) -> None:
        """Give an order to the present process of `device`; nothing happens when it has ended."""
        connection = self._connections.get(device)
        if connection is not None:
            try:
                connection.send_bytes(order.encode())
            except OSError:
                return  # it has ended, which `messages` reports

    def messages(self, timeout_s: float) -> Iterator[tuple[str, int, Message]]:
        """(device, incarnation, message) of all that arrives within `timeout_s`; returns after the first that come.

        A process that has ended gives a last message `Exited` after all that it has sent.

        Raises:
            RunError: a message that is none of ours.
        """
        due_s = min(self._ending.values(), default=math.inf) - time.monotonic()
        for key, _ in self._selector.select(max(min(timeout_s, due_s), 0.0)):
            ready = key.fileobj
            if not isinstance(ready, Connection):  # the sentinel of a process that was still ending
                yield self._ended(*key.data)
                continue
            device, incarnation = self._channels[ready]
            try:
                # All that is there, not one each: a burst must not delay the exit notice behind it.
                while True:
                    yield device, incarnation, parse_message(device, ready.recv_bytes())
                    if not ready.poll():
                        break
            except (EOFError, OSError):
                self._hung_up(ready, device, incarnation)
                if self._processes[device, incarnation].exitcode is not None:
                    yield self._ended(device, incarnation)
        for device, incarnation in [one for one, until_s in self._ending.items() if until_s <= time.monotonic()]:
            yield from self._overdue(device, incarnation)

    def _hung_up(self, connection: Connection, device: str, incarnation: int) -> None:
        """A channel has ended. Its process is about to, for which the others' messages must not wait."""
        self._selector.unregister(connection)
        connection.close()
        del self._channels[connection]
        if self._connections.get(device) is connection:
            del self._connections[device]
        one = device, incarnation
        self._ending[one] = time.monotonic() + END_TIMEOUT_S
        self._selector.register(self._processes[one].sentinel, selectors.EVENT_READ, one)

    def _overdue(self, device: str, incarnation: int) -> Iterator[tuple[str, int, Message]]:
        """Kill a process that has hung up and does not end: nobody can reach it. One that outlives that is given up."""
        process = self._processes[device, incarnation]
        if (device, incarnation) in self._killed:
            yield self._ended(device, incarnation)
        else:
            self._killed.add((device, incarnation))
            process.kill()
            self._ending[device, incarnation] = time.monotonic() + END_TIMEOUT_S

    def _ended(self, device: str, incarnation: int) -> tuple[str, int, Message]:
        """The last message of a process."""
        del self._ending[device, incarnation]
        self._killed.discard((device, incarnation))
        process = self._processes.pop((device, incarnation))
        self._selector.unregister(process.sentinel)
        return device, incarnation, Exited(incarnation=incarnation, code=process.exitcode)

    def pid(self, device: str) -> int | None:
        """Process id of a device's present worker; None when it has ended."""
        process = self._processes.get((device, self._current.get(device, 0)))
        return process.pid if process is not None else None

    def kill(self, device: str) -> None:
        """SIGKILL to the present process of `device`."""
        self.signal(device, signal.SIGKILL)

    def signal(self, device: str, number: signal.Signals) -> None:
        """Send a signal to the present process of `device`, if there is one."""
        process = self._processes.get((device, self._current.get(device, 0)))
        if process is not None and process.is_alive() and process.pid is not None:
            os.kill(process.pid, number)

    def inject(self, event: Mapping[str, Any]) -> None:
        """Have processes that are started from now on suffer a fault, until it has struck."""
        self._job = self._job.with_fault(event)

    def forget(self, event: Mapping[str, Any]) -> None:
        """An injected event has struck: processes that are started from now on do not suffer it again."""
        self._job = self._job.without_fault(event)

    def close(self, grace_s: float = 0.0) -> None:
        """End all workers, at once or after `grace_s` in which those that were told to leave do so, and wait for it."""
        deadline = time.monotonic() + grace_s
        for process in self._processes.values():
            process.join(max(deadline - time.monotonic(), 0.0))
            if process.is_alive():
                process.kill()
        deadline = time.monotonic() + END_TIMEOUT_S
        for process in self._processes.values():
            process.join(max(deadline - time.monotonic(), 0.1))
        self._selector.close()
        for connection in self._channels:
            connection.close()
        self._channels.clear()
        self._connections.clear()
        self._processes.clear()
