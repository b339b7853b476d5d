"""The agent's socket: who is at the other end, one JSON line in, one out; no caller can hold up another.

One thread, nothing blocks: a caller that does not send, does not read, sends too much or comes too often is closed or
refused, and the agent's own clock goes on.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from runflat.power.agent import Agent, Caller
from runflat.power.wire import MAX_MESSAGE_BYTES, ErrorCode, Reply, parse_request, to_line

MAX_CLIENTS = 128
MAX_CLIENTS_OF_ONE_USER = 64
PATIENCE_S = 5.0
"""What a caller has to finish a message, or to take an answer."""
BACKLOG = 256
_CREDENTIALS = struct.Struct("3i")


def caller_of(connection: socket.socket) -> Caller:
    """The process at the other end of a Unix socket, as the kernel recorded it when it connected."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Caller(uid=uid, pid=pid)


def listen(path: Path, group_id: int | None) -> socket.socket:
    """A listening socket at `path`, open to its owner and to one group (mode 0660).

    The caller holds the agent's lock, so a socket that is there already is a dead agent's.
    """
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    before = os.umask(0o117)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    if group_id is not None:
        os.chown(path, -1, group_id)
    listener.listen(BACKLOG)
    return listener


@dataclass
class _Client:
    connection: socket.socket
    caller: Caller
    deadline_s: float
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytes = b""
    is_last: bool = False
    """Whether to hang up once the outbox is empty."""


class Server:
    """Serves an agent on a listening socket until `stop` can be read.

    Args:
        agent: The rules.
        listener: See `listen`.
        stop: Becomes readable when the agent shall end.
        clock: Seconds; the agent's.
        alive: Called in each round, for a watchdog.
    """

    def __init__(
        self,
        agent: Agent,
        listener: socket.socket,
        stop: socket.socket,
        clock: Callable[[], float],
        alive: Callable[[], None],
    ):
        self._agent = agent
        self._listener = listener
        self._stop = stop
        self._clock = clock
        self._alive = alive
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, _Client] = {}

    def run(self) -> None:
        """Serve. Leases are left as they are: whoever calls this ends them."""
        with self._selector, contextlib.ExitStack() as stack:
            stack.callback(self._close_all)
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._stop, selectors.EVENT_READ)
            while True:
                self._alive()
                due_s = self._agent.tick(self._clock())
                for key, _ in self._selector.select(self._sooner_s(due_s)):
                    if key.fileobj is self._stop:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    elif (client := self._clients.get(key.fd)) is not None:
                        self._serve(client)
                self._close_late()

    def _sooner_s(self, due_s: float) -> float:
        now = self._clock()
        return max(min([due_s, *(client.deadline_s - now for client in self._clients.values())]), 0.0)

    def _accept(self) -> None:
        for _ in range(BACKLOG):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # Out of descriptors: the one who has kept his longest gives it up.
                if not self._clients:
                    return
                self._close(min(self._clients.values(), key=lambda client: client.deadline_s))
                continue
            self._welcome(connection)

    def _welcome(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        client = _Client(connection, caller_of(connection), self._clock() + PATIENCE_S)
        users = Counter(other.caller.uid for other in self._clients.values())
        error: ErrorCode | None = None
        if not self._agent.may_talk(client.caller):
            error, text = "not-allowed", f"user {client.caller.uid} is not in allow_uids of the limits file"
        elif users.total() >= MAX_CLIENTS or users[client.caller.uid] >= MAX_CLIENTS_OF_ONE_USER:
            error, text = "busy", f"{users.total()} callers are connected, {users[client.caller.uid]} of them yours"
        if error is None:
            self._clients[connection.fileno()] = client
            self._selector.register(connection, selectors.EVENT_READ)
            return
        with contextlib.suppress(OSError), connection:
            connection.send(to_line(self._agent.refuse(client.caller, error, text)))

    def _serve(self, client: _Client) -> None:
        """Go on with one caller: at most one request is carried out."""
        try:
            if client.outbox:
                self._send(client)
            elif not self._receive(client):
                self._close(client)
        except BlockingIOError:
            return
        except OSError:
            self._close(client)

    def _receive(self, client: _Client) -> bool:
        """Read what is there and carry out the first whole line; returns whether the caller is still there."""
        if b"\n" not in client.inbox:
            chunk = client.connection.recv(MAX_MESSAGE_BYTES + 1 - len(client.inbox))
            if not chunk:
                return False
            client.inbox += chunk
        line, end, rest = client.inbox.partition(b"\n")
        if not end:
            if len(client.inbox) > MAX_MESSAGE_BYTES:
                text = f"a message is at most {MAX_MESSAGE_BYTES} bytes"
                self._answer(client, self._agent.refuse(client.caller, "oversized", text), is_last=True)
            return True
        client.inbox = rest
        try:
            request = parse_request(bytes(line))
        except ValueError:
            # What exactly is wrong is the caller's own text: it does not belong into the log.
            refusal = self._agent.refuse(client.caller, "malformed", "this is not a message that the agent knows")
            self._answer(client, refusal, is_last=True)
            return True
        self._answer(client, self._agent.handle(client.caller, request, self._clock()), is_last=False)
        return True

    def _answer(self, client: _Client, reply: Reply, *, is_last: bool) -> None:
        client.outbox, client.is_last = to_line(reply), is_last
        client.deadline_s = self._clock() + PATIENCE_S
        # Nothing more is read from this caller until the answer is out.
        self._selector.modify(client.connection, selectors.EVENT_WRITE)

    def _send(self, client: _Client) -> None:
        if client.outbox:
            sent = client.connection.send(client.outbox)
            client.outbox = client.outbox[sent:]
        if client.outbox:
            return
        if client.is_last:
            self._close(client)
            return
        client.deadline_s = self._clock() + PATIENCE_S
        # A line that has come with the last one is served in its turn: a writable socket calls again at once.
        waiting = b"\n" in client.inbox
        self._selector.modify(client.connection, selectors.EVENT_WRITE if waiting else selectors.EVENT_READ)

    def _close_late(self) -> None:
        now = self._clock()
        for client in [client for client in self._clients.values() if client.deadline_s <= now]:
            if client.outbox or client.inbox:
                what = "take its answer" if client.outbox else "finish its message"
                self._agent.refuse(client.caller, "timeout", f"it did not {what} within {PATIENCE_S:g} s")
            self._close(client)

    def _close(self, client: _Client) -> None:
        self._clients.pop(client.connection.fileno(), None)
        self._selector.unregister(client.connection)
        client.connection.close()

    def _close_all(self) -> None:
        for client in list(self._clients.values()):
            self._close(client)
