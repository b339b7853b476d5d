"""A connection that carries frames both ways and never makes anybody wait; one thread uses it."""

from __future__ import annotations

import socket

from runflat.elastic.proof import Frames, StrangerError, framed

READ_BYTES = 1 << 16


class Stream:
    """One end of a connection. `multiprocessing.connection.Connection` speaks the same frames (up to 2 GiB)."""

    def __init__(self, connection: socket.socket):
        """Take the connection over."""
        connection.setblocking(False)
        self._connection = connection
        self._frames = Frames()
        self._unsent = bytearray()
        self.ended = False

    def fileno(self) -> int:
        """Descriptor, for a selector."""
        return self._connection.fileno()

    @property
    def is_full(self) -> bool:
        """Whether something waits to be sent: call `flush` when the connection takes more."""
        return bool(self._unsent) and not self.ended

    def send(self, payload: bytes) -> None:
        """Send a payload as soon as the other end takes it; nothing happens when that is gone."""
        self._unsent += framed(payload)
        self.flush()

    def flush(self) -> None:
        """Send what the other end takes now."""
        try:
            while self._unsent and not self.ended:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()  # what it has sent may still be read

    def receive(self) -> list[bytes]:
        """Payloads that have come, at most as much as is there now; sets `ended` at the end."""
        try:
            data = self._connection.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.ended = True
            return []
        try:
            return self._frames.feed(data)
        except StrangerError:
            self.ended = True
            return []

    def close(self) -> None:
        """End the connection."""
        self.ended = True
        self._connection.close()
