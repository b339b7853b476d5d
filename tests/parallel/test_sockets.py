"""The record of a process's sockets by generation."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from runflat.parallel.sockets import SharedSockets, Sockets


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


def test_a_number_that_became_a_file_costs_no_descriptor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a descriptor lost with each abort in which another thread closes a socket and opens a file."""
    with open(tmp_path / "file", "w") as file:
        monkeypatch.setattr("runflat.parallel.sockets.open_sockets", lambda: {file.fileno(): 1})
        before = os.listdir("/proc/self/fd")
        SharedSockets(1).abort(0)
        assert os.listdir("/proc/self/fd") == before


def test_ranks_that_share_sockets_look_through_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a loss among n ranks of a process that costs n looks, and one that misses what formed meanwhile."""
    looks: list[int] = []
    monkeypatch.setattr("runflat.parallel.sockets.open_sockets", lambda: looks.append(1) or {})
    sockets = SharedSockets(1)
    for _ in range(3):
        sockets.abort(4)
    assert len(looks) == 1
    with sockets.recording(4):
        sockets.abort(4)
        sockets.abort(4)
    assert len(looks) == 3
    for _ in range(2):
        sockets.abort(4)
    assert len(looks) == 4
