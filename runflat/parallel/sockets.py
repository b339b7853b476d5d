"""Abort of a generation's gloo groups: shut the sockets that appeared while they formed, and nothing else.

gloo's own `abort()` does nothing, and only the neighbours of a dead rank notice its death. shutdown(2) on the connected
sockets makes pending collectives fail at once. The listening socket must be left alone: shutting it ends the process.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from dataclasses import dataclass, field


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


def _shut(descriptor: int, inode: int) -> None:
    """Shut a connected TCP socket if `descriptor` still is the socket `inode`."""
    try:
        copy = os.dup(descriptor)  # first a copy, then the check: the number may be reused at any moment
    except OSError:
        return
    try:
        if os.fstat(copy).st_ino != inode:
            return
        with socket.socket(fileno=os.dup(copy)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.getpeername()  # raises on a listening socket, which must not be shut
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
    finally:
        os.close(copy)


@dataclass
class Sockets:
    """The sockets of one process by generation. Formations in one process are made one at a time.

    `exempt` holds the inodes of long-lived sockets that may be opened while groups form (state transfer, stores).
    """

    exempt: set[int] = field(default_factory=set)
    forming: threading.Lock = field(default_factory=threading.Lock)
    _known: set[int] = field(default_factory=set)
    _of_generation: dict[int, dict[int, int]] = field(default_factory=dict)

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
