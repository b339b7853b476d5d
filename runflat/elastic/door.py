"""The door of the controller: one thread that takes calls, lets in whoever knows the token, and passes frames.

Strangers cost little: at most `DoorLimits.max_waiting` of them are heard at a time, each for `hello_s` and a few
kilobytes, in no thread of their own. Whoever is turned away is counted by address and logged in few lines.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from runflat.cluster.refusals import Refusals
from runflat.elastic.endpoint import Endpoint, listen
from runflat.elastic.proof import Doorkeeper, Frames, StrangerError, be_patient, framed
from runflat.elastic.side_thread import start_thread

READ_BYTES = 1 << 16
JOIN_S = 5.0
LONGEST_WAIT_S = 1.0
FEW_DESCRIPTORS_S = 0.05
"""Pause where this process may open no further descriptor."""


@dataclass(frozen=True)
class Came:
    """Somebody who knows the token has called; from now on it is `peer`."""

    peer: int
    address: str
    words: bytes


@dataclass(frozen=True)
class Said:
    """A payload of `peer`."""

    peer: int
    payload: bytes


@dataclass(frozen=True)
class Went:
    """The connection of `peer` has ended; nothing more comes of it."""

    peer: int


@dataclass(frozen=True)
class Noted:
    """A line for the log."""

    text: str


Heard = Came | Said | Went | Noted


@dataclass(frozen=True)
class DoorLimits:
    """What a stranger may cost, and how much may wait for a peer that does not read."""

    hello_s: float = 5.0
    max_waiting: int = 64
    max_unsent_bytes: int = 1 << 28


@dataclass(eq=False)
class _Line:
    """One connection: a stranger's while `keeper` is set, else that of `peer`."""

    connection: socket.socket
    address: str
    since: float
    keeper: Doorkeeper | None
    peer: int = -1
    frames: Frames = field(default_factory=Frames)
    unsent: deque[bytes] = field(default_factory=deque)
    num_unsent: int = 0

    @property
    def ended(self) -> bool:
        """Whether the connection was closed."""
        return self.connection.fileno() < 0


class Door:
    """Listens at `endpoint`. What comes in is taken with `take`; `send` and `shut` may be called by any thread."""

    def __init__(
        self,
        token: str,
        host: str,
        port: int = 0,
        limits: DoorLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Open the door.

        Raises:
            OSError: the address is not ours, or the port is taken.
        """
        self._token = token
        self._limits = limits or DoorLimits()
        self._clock = clock
        self._listener = listen(host, port)
        self._listener.setblocking(False)
        self.endpoint = Endpoint(*self._listener.getsockname()[:2])
        self._heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._lines: dict[int, _Line] = {}
        self._to_shut: set[int] = set()
        self._waiting: dict[_Line, None] = {}
        """Strangers, the oldest first."""
        self._refusals = Refusals()
        self._num_peers = 0
        self._closing = False
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wakes, selectors.EVENT_READ, self._woken)
        self._thread = start_thread("door", self._run)

    # ---- for whoever has the door

    def take(self, timeout_s: float) -> list[Heard]:
        """All that has been heard; waits at most `timeout_s` for the first."""
        found: list[Heard] = []
        try:
            found.append(self._heard.get(timeout=timeout_s) if timeout_s > 0 else self._heard.get_nowait())
            while True:
                found.append(self._heard.get_nowait())
        except queue.Empty:
            return found

    def send(self, peer: int, payload: bytes) -> None:
        """Send a payload to a peer, in the background; nothing happens when it is gone."""
        with self._lock:
            line = self._lines.get(peer)
            if line is None:
                return
            line.unsent.append(framed(payload))
            line.num_unsent += len(line.unsent[-1])
            if line.num_unsent > self._limits.max_unsent_bytes:
                self._to_shut.add(peer)
        self._wake()

    def shut(self, peer: int) -> None:
        """End the connection of a peer after what is to be sent to it; `Went` follows."""
        with self._lock:
            if peer in self._lines:
                self._to_shut.add(peer)
        self._wake()

    def close(self) -> None:
        """Listen no more and end all connections."""
        self._closing = True
        self._wake()
        self._thread.join(JOIN_S)

    # ---- the thread

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it is awake, or the door is closed
            self._waker.send(b"w")

    def _woken(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wakes.recv(READ_BYTES):
                pass

    def _run(self) -> None:
        while not self._closing:
            for key, mask in self._selector.select(LONGEST_WAIT_S):
                key.data(mask)
            self._send_what_waits()
            now = self._clock()
            for line in [line for line in self._waiting if now - line.since >= self._limits.hello_s]:
                self._refuse(line, f"it did not prove itself within {self._limits.hello_s:g} s")
            self._note(self._refusals.due(now))
        self._note(self._refusals.due(self._clock(), all_of_them=True))
        self._send_what_waits()
        with self._lock:
            lines = [*self._lines.values(), *self._waiting]
        for line in lines:
            line.connection.close()
        self._selector.close()
        for end in (self._listener, self._wakes, self._waker):
            end.close()

    def _note(self, lines: list[str]) -> None:
        for text in lines:
            self._heard.put(Noted(text))

    def _accept(self, _: int) -> None:
        try:
            connection, peer = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # nobody calls any more
            return
        except OSError:  # no descriptor is left: somebody has to make room
            if self._waiting:
                self._refuse(next(iter(self._waiting)), "too many calls at once")
            else:
                threading.Event().wait(FEW_DESCRIPTORS_S)
            return
        connection.setblocking(False)
        keeper = Doorkeeper(self._token)
        line = _Line(connection, str(peer[0]), self._clock(), keeper)
        if len(self._waiting) >= self._limits.max_waiting:
            self._refuse(next(iter(self._waiting)), "too many calls at once")
        self._waiting[line] = None
        self._selector.register(connection, selectors.EVENT_READ, lambda mask: self._on_line(line, mask))
        self._put(line, keeper.greeting)

    def _put(self, line: _Line, data: bytes) -> None:
        with self._lock:
            line.unsent.append(data)
            line.num_unsent += len(data)
        self._write(line)

    def _on_line(self, line: _Line, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._write(line)
        if not mask & selectors.EVENT_READ or line.ended:
            return
        try:
            data = line.connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost(line)
            return
        try:
            self._take_in(line, data)
        except StrangerError as error:
            if line.keeper is not None:
                self._refuse(line, str(error))
            else:
                self._note([f"{line.address} sends {error}: its connection is ended"])
                self._lost(line)

    def _take_in(self, line: _Line, data: bytes) -> None:
        if line.keeper is not None:
            proved = line.keeper.feed(data)
            if proved is None:
                return
            words, proof, data = proved
            line.keeper = None
            del self._waiting[line]
            be_patient(line.connection)
            self._num_peers += 1
            line.peer = self._num_peers
            with self._lock:
                self._lines[line.peer] = line
            self._heard.put(Came(line.peer, line.address, words))
            self._put(line, proof)
        for payload in line.frames.feed(data):
            self._heard.put(Said(line.peer, payload))

    def _send_what_waits(self) -> None:
        with self._lock:
            lines = [line for line in self._lines.values() if line.unsent]
            ending = [self._lines[peer] for peer in self._to_shut if peer in self._lines]
            self._to_shut.clear()
        for line in lines:
            self._write(line)
        for line in ending:
            self._lost(line)

    def _write(self, line: _Line) -> None:
        """Send what the connection takes, and be told when it takes more."""
        if line.ended:
            return
        try:
            while line.unsent:
                num_sent = line.connection.send(line.unsent[0])
                with self._lock:
                    line.num_unsent -= num_sent
                    rest = line.unsent.popleft()[num_sent:]
                    if rest:
                        line.unsent.appendleft(rest)
        except BlockingIOError:
            pass
        except OSError:
            self._lost(line)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.unsent else 0)
        key = self._selector.get_key(line.connection)
        if key.events != events:
            self._selector.modify(line.connection, events, key.data)

    def _refuse(self, line: _Line, reason: str) -> None:
        self._refusals.add(line.address, reason)
        self._end(line)

    def _lost(self, line: _Line) -> None:
        """The other end has closed, or is to be closed."""
        if line.keeper is not None:
            self._refuse(line, "it hung up without proving itself")
            return
        self._end(line)
        with self._lock:
            known = self._lines.pop(line.peer, None)
        if known is not None:
            self._heard.put(Went(line.peer))

    def _end(self, line: _Line) -> None:
        self._waiting.pop(line, None)
        if not line.ended:
            self._selector.unregister(line.connection)
            line.connection.close()
