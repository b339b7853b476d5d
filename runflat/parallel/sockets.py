"""Abort of a generation's gloo groups: shut the sockets that appeared while they formed, and nothing else.

gloo's own `abort()` does nothing, and only the neighbours of a dead rank notice its death. shutdown(2) on the connected
sockets makes pending collectives fail at once. The listening socket must be left alone: shutting it ends the process.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

LOOPBACK = "127.0.0.1"


def open_sockets() -> dict[int, int]:
    """Descriptor -> inode of every socket that this process has open."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue  # it was closed meanwhile
        if stat.S_ISSOCK(status.st_mode):
            found[int(name)] = status.st_ino
    return found


@contextmanager
def _copied(descriptor: int) -> Iterator[socket.socket]:
    """A socket that is open as `descriptor`, under a number of its own; OSError where it is none."""
    copy = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)  # the number was given to a file meanwhile
        raise
    with connection:
        yield connection


def _shut(descriptor: int, inode: int) -> None:
    """Shut a connected TCP socket if `descriptor` still is the socket `inode`."""
    # First a copy, then the check: the number may be reused at any moment.
    with suppress(OSError), _copied(descriptor) as connection:
        if os.fstat(connection.fileno()).st_ino == inode and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.getpeername()  # raises on a listening socket, which must not be shut
            connection.shutdown(socket.SHUT_RDWR)


class GroupSockets(Protocol):
    """Knows the sockets of the groups of each generation, so that leaving one can shut them."""

    host: str
    """Address at which other workers reach this one; what it opens besides its groups listens there."""
    exempt: set[int]

    def address(self, generation: int) -> str:
        """Address on which the groups of `generation` listen."""

    def recording(self, generation: int) -> AbstractContextManager[None]:
        """While it lasts the groups of `generation` form."""

    def made(self, generation: int, backend: Any) -> None:
        """A backend of `generation` is there, and will have connections."""

    def abort(self, generation: int) -> None:
        """Shut all sockets of `generation`, also while its groups are still forming."""

    def forget(self, generation: int) -> None:
        """The groups of `generation` are gone."""


@dataclass
class Sockets:
    """The sockets of one process by generation. Formations in one process are made one at a time.

    `host` is the address to listen on. `exempt` holds the inodes of long-lived sockets that may be opened while groups
    form (state transfer, stores).
    """

    host: str = LOOPBACK
    exempt: set[int] = field(default_factory=set)
    forming: threading.Lock = field(default_factory=threading.Lock)
    _known: set[int] = field(default_factory=set)
    _of_generation: dict[int, dict[int, int]] = field(default_factory=dict)

    def address(self, generation: int) -> str:
        """Address on which groups listen."""
        return self.host

    @contextmanager
    def recording(self, generation: int) -> Iterator[None]:
        """While it lasts the groups of `generation` form, and no others do."""
        with self.forming:
            self.begin(generation)
            try:
                yield
            finally:
                self.end(generation)

    def made(self, generation: int, backend: Any) -> None:
        """Its sockets are found by themselves."""

    def begin(self, generation: int) -> None:
        """Groups of `generation` are about to form; call with `forming` held."""
        self._known = set(open_sockets().values())
        self._of_generation[generation] = {}

    def end(self, generation: int) -> None:
        """They have formed, or failed to."""
        self._of_generation[generation] = self._new()

    def _new(self) -> dict[int, int]:
        return {
            descriptor: inode
            for descriptor, inode in open_sockets().items()
            if inode not in self._known and inode not in self.exempt
        }

    def abort(self, generation: int) -> None:
        """Shut all sockets of `generation`, also while its groups are still forming."""
        recorded = self._of_generation.get(generation)
        if recorded is None:
            return
        for descriptor, inode in (recorded or self._new()).items():
            _shut(descriptor, inode)

    def forget(self, generation: int) -> None:
        """Drop the record of `generation`."""
        self._of_generation.pop(generation, None)


class SharedSockets:
    """The sockets of many ranks of one process: each generation listens on a loopback address of its own.

    By that address its connections are told from all others, whichever rank opened them. An abort by one rank is felt
    by all of its generation at once.
    """

    def __init__(self, number: int) -> None:
        """`number` (up to 254) keeps apart those who use loopback addresses in one process at one time."""
        self.host = LOOPBACK
        self.exempt: set[int] = set()
        self._number = number
        self._forming: Counter[int] = Counter()
        self._changed = threading.Condition()
        self._scanning = threading.Lock()
        self._is_shut: set[int] = set()

    def address(self, generation: int) -> str:
        """Address on which the groups of `generation` listen."""
        return f"127.{1 + self._number % 254}.{generation // 250 % 250}.{1 + generation % 250}"

    @contextmanager
    def recording(self, generation: int) -> Iterator[None]:
        """While it lasts the groups of `generation` form."""
        with self._changed:
            self._forming[generation] += 1
            self._is_shut.discard(generation)
        try:
            yield
        finally:
            with self._changed:
                self._forming[generation] -= 1
                self._changed.notify_all()

    def made(self, generation: int, backend: Any) -> None:
        """Its sockets are known by their address."""

    def settle(self, timeout_s: float) -> None:
        """Wait until no group forms any more, at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._forming.total(), timeout_s)

    def abort(self, generation: int) -> None:
        """Shut all connections of `generation`.

        Where none of its groups forms any more, once is enough for all ranks: each would look through the sockets of
        all.
        """
        with self._scanning:
            with self._changed:
                if generation in self._is_shut:
                    return
                if not self._forming[generation]:
                    self._is_shut.add(generation)
            self._shut_all(self.address(generation))

    def _shut_all(self, address: str) -> None:
        for descriptor, inode in open_sockets().items():
            try:
                with _copied(descriptor) as connection:
                    tcp = connection.family == socket.AF_INET
                    ours = tcp and address in (connection.getsockname()[0], connection.getpeername()[0])
            except OSError:
                continue  # a listening socket, or closed meanwhile
            if ours:
                _shut(descriptor, inode)

    def forget(self, generation: int) -> None:
        """Nothing is kept of it but that it was shut."""


def cut_connections(pid: int) -> int:
    """Shut this process's TCP connections to the process `pid` of the same machine; returns how many.

    Used to inject a link that flakes: both ends stay alive.
    """
    theirs = _sockets_of(pid)
    remote_ports = {port for port, inode in _local_ports().items() if inode in theirs}
    count = 0
    for descriptor, inode in open_sockets().items():
        try:
            with _copied(descriptor) as connection:
                tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                cut = tcp and connection.getpeername()[1] in remote_ports
        except OSError:
            continue  # a listening socket, or closed meanwhile
        if cut:
            _shut(descriptor, inode)
            count += 1
    return count


def _sockets_of(pid: int) -> set[int]:
    found: set[int] = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(entry.path)
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(int(target[len("socket:[") : -1]))
    return found


def _local_ports() -> dict[int, int]:
    """Local port -> inode of the machine's established TCP connections."""
    found: dict[int, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                rows = file.read().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            if fields[3] == "01":
                found[int(fields[1].rpartition(":")[2], 16)] = int(fields[9])
    return found
