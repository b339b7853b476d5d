"""Two hosts on one machine: host A is where the test runs, host B a network namespace at the end of a virtual cable."""

from __future__ import annotations

import ctypes
import hmac
import json
import multiprocessing
import os
import queue
import secrets
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from runflat.elastic.launch_local import LocalWorkers
from runflat.elastic.messages import Exited, Message, parse_message
from runflat.elastic.orders import Order
from runflat.elastic.worker_process import worker_process
from runflat.train.job import Job

CLONE_NEWNET = 0x40000000
HELLO_S = 10.0
SILENCE_S = 4
"""A connection on which the other end says nothing for so long, not even that it is there, has ended."""
JOIN_S = 10.0
POLL_S = 0.02


def system(*command: str) -> str:
    """Runs a command; returns what it prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout


class Hosts:
    """Host B and the cable between the hosts; both are gone when `close` was called or this process has ended."""

    def __init__(self) -> None:
        # The namespace lasts as long as the process in it, which ends when this process lets go of its input.
        held = ["unshare", "--net", "sh", "-c", "echo up; exec cat"]
        self._holder = subprocess.Popen(held, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n"
        self.namespace = f"/proc/{self._holder.pid}/ns/net"
        self.joined = True
        taken = system("ip", "-o", "-4", "addr", "show")
        numbers = ((os.getpid() + offset) % 254 + 1 for offset in range(254))
        net = next(net for number in numbers if (net := f"10.201.{number}") + "." not in taken)
        self.a, self.b = f"{net}.1", f"{net}.2"
        self._ends = (f"rf{os.getpid()}a", f"rf{os.getpid()}b")
        near, far = self._ends
        system("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", str(self._holder.pid))
        system("ip", "addr", "add", f"{self.a}/30", "dev", near)
        system("ip", "link", "set", near, "up")
        self._on_b("addr", "add", f"{self.b}/30", "dev", far)
        self._on_b("link", "set", "lo", "up")
        self.join()

    def _on_b(self, *words: str) -> None:
        system("nsenter", f"--net={self.namespace}", shutil.which("ip") or "ip", *words)

    def cut(self) -> None:
        """Pull the plug: what is under way is lost, and nobody is told."""
        self.joined = False
        self._on_b("link", "set", self._ends[1], "down")

    def join(self) -> None:
        """Plug it in again."""
        self._on_b("link", "set", self._ends[1], "up")
        self.joined = True

    def close(self) -> None:
        """Take the cable and host B away."""
        subprocess.run(["ip", "link", "del", self._ends[0]], check=False, capture_output=True, timeout=10)
        self._holder.communicate(timeout=10)


def be_patient(connection: socket.socket) -> None:
    """Have both directions of a connection end soon after the other end is out of reach."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_S)
    connection.settimeout(None)


def far_worker(
    namespace: str,
    door: tuple[str, int],
    hello: dict[str, Any],
    job: str,
    store: tuple[str, int],
    host: str,
) -> None:
    """Main function of a worker on host B: go there, call the controller, work."""
    descriptor = os.open(namespace, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns failed")
    os.close(descriptor)
    called = socket.create_connection(door, HELLO_S)
    be_patient(called)
    connection = Connection(called.detach())
    connection.send_bytes(json.dumps(hello).encode())
    worker_process(connection, job, hello["device"], hello["incarnation"], store, host)


class FarWorkers:
    """The workers on host B. They call the controller at its address and show a token; then JSON goes to and fro."""

    def __init__(self, job: Job, hosts: Hosts, store: tuple[str, int]):
        self._job, self._hosts, self._store = job, hosts, store
        self._token = secrets.token_hex(16)
        self._door = socket.create_server((hosts.a, 0))
        self._context = multiprocessing.get_context("forkserver")
        self._connections: dict[str, Connection] = {}
        self._processes: dict[str, list[BaseProcess]] = {}
        self.heard: queue.SimpleQueue[tuple[str, int, Message]] = queue.SimpleQueue()
        threading.Thread(target=self._accept, daemon=True).start()

    def start(self, device: str, incarnation: int) -> None:
        """Start a process for a device."""
        hello = {"token": self._token, "device": device, "incarnation": incarnation}
        job = self._job.model_dump_json()
        args = (self._hosts.namespace, self._door.getsockname(), hello, job, self._store, self._hosts.b)
        process = self._context.Process(target=far_worker, args=args, daemon=True)
        process.start()
        self._processes.setdefault(device, []).append(process)

    def _accept(self) -> None:
        while True:
            try:
                called, _ = self._door.accept()
            except OSError:
                return  # it was shut
            be_patient(called)
            threading.Thread(target=self._listen, args=(Connection(called.detach()),), daemon=True).start()

    def _listen(self, connection: Connection) -> None:
        """Pass on what a worker says, and at last that it is heard no more; its process may still be there."""
        hello = json.loads(connection.recv_bytes())
        if not hmac.compare_digest(hello["token"], self._token):
            connection.close()
            return
        device, incarnation = hello["device"], hello["incarnation"]
        self._connections[device] = connection
        try:
            while True:
                self.heard.put((device, incarnation, parse_message(device, connection.recv_bytes())))
        except (EOFError, OSError):
            self.heard.put((device, incarnation, Exited(incarnation=incarnation, code=None)))

    def send(self, device: str, order: Order) -> None:
        """Give an order to a device's present process."""
        try:
            self._connections[device].send_bytes(order.encode())
        except OSError:
            return  # which the listening thread notices too

    def signal(self, device: str, number: signal.Signals) -> None:
        """Send a signal to a device's present process, if its host can be reached."""
        process = self._processes[device][-1]
        if self._hosts.joined and process.is_alive() and process.pid is not None:
            os.kill(process.pid, number)

    def inject(self, event: Mapping[str, Any]) -> None:
        """Have processes that are started from now on suffer a fault, until it has struck."""
        self._job = self._job.with_fault(event)

    def forget(self, event: Mapping[str, Any]) -> None:
        """An injected event has struck."""
        self._job = self._job.without_fault(event)

    def close(self, grace_s: float) -> None:
        """End all processes, whether their host can be reached or not."""
        for process in [process for started in self._processes.values() for process in started]:
            process.join(grace_s)
            process.kill()
            process.join(JOIN_S)
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()


class TwoHosts:
    """A launcher: replica 1 works on host B, all others and the controller on host A."""

    def __init__(self, job: Job, hosts: Hosts):
        self._near = LocalWorkers(job, hosts.a)
        self._far = FarWorkers(job, hosts, self._near.address)

    def _of(self, device: str) -> LocalWorkers | FarWorkers:
        return self._far if device.startswith("1:") else self._near

    def start(self, device: str, incarnation: int) -> None:
        self._of(device).start(device, incarnation)

    def send(self, device: str, order: Order) -> None:
        self._of(device).send(device, order)

    def messages(self, timeout_s: float) -> Iterator[tuple[str, int, Message]]:
        yield from self._near.messages(min(timeout_s, POLL_S))
        for _ in range(self._far.heard.qsize()):
            yield self._far.heard.get()

    def kill(self, device: str) -> None:
        self.signal(device, signal.SIGKILL)

    def signal(self, device: str, number: signal.Signals) -> None:
        self._of(device).signal(device, number)

    def pid(self, device: str) -> int | None:
        return None if device.startswith("1:") else self._near.pid(device)

    def inject(self, event: Mapping[str, Any]) -> None:
        self._of(event["device"]).inject(event)

    def forget(self, event: Mapping[str, Any]) -> None:
        self._of(event["device"]).forget(event)

    def close(self, grace_s: float = 0.0) -> None:
        self._far.close(grace_s)
        self._near.close(grace_s)
