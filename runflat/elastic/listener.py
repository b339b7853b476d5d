"""Take in connections of other workers: whoever shows the token is served, in a thread of its own, until it ends."""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
from collections.abc import Callable

from runflat.cluster.refusals import RefusalLog
from runflat.elastic.endpoint import Endpoint, listen
from runflat.elastic.frames import MAX_HELLO_BYTES, Connection, FeedError, Hello, Refused, Welcome, inode
from runflat.elastic.side_thread import start_thread
from runflat.errors import RunError

JOIN_S = 5.0
MAX_SERVED = 256
"""Connections at a time; further ones are closed at once."""
MAX_STRANGERS = 32
"""Connections of which nothing is known yet, so that strangers cannot use up threads and descriptors."""
TOO_MANY = "too many calls at once"
MAX_REASON = 200
"""Characters of the reason in a line of the log."""
_POLL_S = 1.0  # where shutting a listening socket does not wake its thread


class Listener:
    """A free port of `host`. Each connection that shows the token is handed to `serve`, and closed when that returns.

    Strangers cost little: at most `MAX_STRANGERS` are heard at a time, each for `hello_s`; then the oldest has to go.
    """

    def __init__(
        self,
        name: str,
        token: str,
        serve: Callable[[Connection, str], object],
        *,
        hello_s: float,
        timeout_s: float,
        host: str = "127.0.0.1",
        exempt: Callable[[int], object] = lambda number: None,
        log: Callable[[str], object] = lambda text: None,
    ):
        """Listen at `address`.

        Args:
            name: of the threads, and in lines of the log.
            token: what a caller must show.
            serve: takes (connection, who calls); it must end when the connection is shut.
            hello_s: seconds that a stranger has to prove itself.
            timeout_s: seconds that each frame may take from then on.
            host: address to listen on.
            exempt: called with the inode of each socket that is opened.
            log: takes lines for people, of those who were refused.
        """
        self._name = name
        self._token = token
        self._serve = serve
        self._hello_s = hello_s
        self._timeout_s = timeout_s
        self._exempt = exempt
        self._lock = threading.Lock()
        self._refusals = RefusalLog(name, log)
        self._served: dict[threading.Thread, Connection] = {}
        self._strangers: dict[threading.Thread, Connection] = {}
        """Those of `_served` who have proved nothing yet, the oldest first."""
        self._closed = False
        self._listener = listen(host)
        self._listener.settimeout(_POLL_S)
        exempt(inode(self._listener))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = start_thread(name, self._listen)

    def _listen(self) -> None:
        with self._listener:
            while not self._closed:
                self._refusals.note()
                try:
                    connected, peer = self._listener.accept()
                except (TimeoutError, ConnectionAbortedError):
                    continue
                except OSError:
                    return  # it was shut
                self._exempt(inode(connected))
                self._begin(Connection(connected, str(Endpoint(*peer[:2])), self._hello_s), str(peer[0]))

    def _begin(self, connection: Connection, address: str) -> None:
        """Hear somebody who has called, in a thread of its own."""
        self._make_room()
        with self._lock:
            if self._closed or len(self._served) >= MAX_SERVED:
                self._refusals.add(address, TOO_MANY)
                connection.close()
                return
            thread = threading.Thread(target=self._take, args=(connection, address), name=self._name, daemon=True)
            self._served[thread] = self._strangers[thread] = connection
            thread.start()

    def _make_room(self) -> None:
        """Where too many strangers are heard, end the oldest one."""
        with self._lock:
            if len(self._strangers) < MAX_STRANGERS:
                return
            thread, connection = next(iter(self._strangers.items()))
        connection.shut()
        thread.join(JOIN_S)

    def _take(self, connection: Connection, address: str) -> None:
        thread = threading.current_thread()
        try:
            source = admit(connection, self._token, self._timeout_s)
        except RunError as error:
            # A stranger may have written part of it: nothing of that steers a terminal or fills a log.
            reason = "".join(letter if letter.isprintable() else "?" for letter in str(error))[:MAX_REASON]
            self._refusals.add(address, reason)
        else:
            with self._lock:
                self._strangers.pop(thread, None)
            self._serve(connection, source)
        finally:
            connection.close()
            with self._lock:
                self._strangers.pop(thread, None)
                self._served.pop(thread, None)

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
        self._refusals.note(all_of_them=True)


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
