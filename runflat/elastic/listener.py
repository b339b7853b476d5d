"""Take in connections of other workers: whoever shows the token is served, in a thread of its own, until it ends."""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
from collections.abc import Callable

from runflat.elastic.endpoint import listen
from runflat.elastic.frames import MAX_HELLO_BYTES, Connection, FeedError, Hello, Refused, Welcome, inode
from runflat.elastic.side_thread import start_thread

JOIN_S = 5.0
MAX_SERVED = 256
"""Connections at a time; further ones are closed at once, so that strangers cannot use up threads and descriptors."""
_POLL_S = 1.0  # where shutting a listening socket does not wake its thread


class Listener:
    """A free port of `host`. Each connection is handed to `serve`, and closed when that returns."""

    def __init__(
        self,
        name: str,
        serve: Callable[[Connection], object],
        hello_s: float,
        *,
        host: str = "127.0.0.1",
        exempt: Callable[[int], object] = lambda number: None,
    ):
        """Listen at `address`.

        Args:
            name: of the threads.
            serve: takes what comes; it must end when the connection is shut.
            hello_s: seconds that a stranger has to prove itself.
            host: address to listen on.
            exempt: called with the inode of each socket that is opened.
        """
        self._name = name
        self._serve = serve
        self._hello_s = hello_s
        self._exempt = exempt
        self._lock = threading.Lock()
        self._served: dict[threading.Thread, Connection] = {}
        self._closed = False
        self._listener = listen(host)
        self._listener.settimeout(_POLL_S)
        exempt(inode(self._listener))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = start_thread(name, self._listen)

    def _listen(self) -> None:
        with self._listener:
            while not self._closed:
                try:
                    connected, peer = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError:
                    return  # it was shut
                self._exempt(inode(connected))
                connection = Connection(connected, f"{peer[0]}:{peer[1]}", self._hello_s)
                thread = threading.Thread(target=self._take, args=(connection,), name=self._name, daemon=True)
                with self._lock:
                    self._served = {serving: kept for serving, kept in self._served.items() if serving.is_alive()}
                    if len(self._served) >= MAX_SERVED:
                        connection.close()
                        continue
                    self._served[thread] = connection
                    thread.start()

    def _take(self, connection: Connection) -> None:
        try:
            self._serve(connection)
        finally:
            connection.close()

    def close(self) -> None:
        """Listen no more, end all connections, and wait for their threads. Again is allowed."""
        self._closed = True
        with contextlib.suppress(OSError):  # on some systems a listening socket cannot be shut; it polls
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(JOIN_S)
        with self._lock:
            served = dict(self._served)
        for connection in served.values():
            connection.shut()
        for thread in served:
            if thread is not threading.current_thread():
                thread.join(JOIN_S)


def admit(connection: Connection, token: str, timeout_s: float) -> str:
    """Who is at the other end; from now on each of its frames may take `timeout_s`.

    Raises:
        FeedError: it is not one of ours.
    """
    hello, _ = connection.receive(MAX_HELLO_BYTES, 0)
    if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token.encode(), token.encode()):
        connection.send(Refused(text="it does not know the token."))
        raise FeedError(f"{connection.peer} does not know the token.")
    connection.peer = hello.source
    connection.send(Welcome())
    connection.timeout_s = timeout_s
    return hello.source


def introduce(connection: Connection, hello: Hello, timeout_s: float) -> None:
    """Be let in by `admit` at the other end; from now on each frame may take `timeout_s`.

    Raises:
        FeedError: we may not be there, or it is no listener of ours.
    """
    connection.send(hello)
    answer, _ = connection.receive(MAX_HELLO_BYTES, 0)
    if not isinstance(answer, Welcome):
        raise FeedError(answer.text if isinstance(answer, Refused) else f"it answered {answer.type}.")
    connection.timeout_s = timeout_s
