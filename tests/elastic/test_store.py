"""The store at which process groups meet: where it listens, and what strangers can do to it."""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from runflat.elastic.launch_local import open_store

TIMEOUT = timedelta(seconds=10)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_strangers_do_not_end_the_store(host: str) -> None:
    """Catches a store that ends, or stops to answer, when something calls that does not speak its language."""
    store, port = open_store(host)
    assert port == store.port
    with contextlib.ExitStack() as stack:
        for number in range(200):
            stranger = stack.enter_context(socket.create_connection((host, port)))
            with contextlib.suppress(OSError):  # it may have hung up
                stranger.sendall((b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, b"\xff" * 5000)[number % 4])
        client = TCPStore(host, port, is_master=False, timeout=TIMEOUT)
        client.set("key", "value")
        assert store.get("key") == b"value"
