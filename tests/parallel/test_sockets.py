"""The record of a process's sockets by generation."""

from __future__ import annotations

import socket

from runflat.parallel.sockets import Sockets


def connected() -> tuple[socket.socket, socket.socket]:
    """Returns both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), 5.0)
        far, _ = listener.accept()
    return near, far


def test_an_abort_shuts_the_sockets_of_its_generation_only() -> None:
    """Catches an abort that shuts a feed, a store client, or the groups of another generation."""
    sockets = Sockets()
    pairs = []
    for generation in (1, 2):
        sockets.begin(generation)
        pairs.append(connected())
        sockets.end(generation)
    sockets.abort(1)
    (gone, _), (kept, kept_far) = pairs
    assert gone.recv(1) == b""
    kept.sendall(b"x")
    assert kept_far.recv(1) == b"x"
    for pair in pairs:
        for end in pair:
            end.close()
