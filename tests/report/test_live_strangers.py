"""Strangers at the page of a running job."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from runflat.check.live import footprint, until
from runflat.report.live import MOST_READERS, LivePage


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_strangers(make_run: Callable[..., Path], tmp_path: Path, host: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches strangers who take a thread of the controller each, fill its screen, or act with a wrong token."""
    log: list[str] = []
    wishes: list[str] = []
    running = make_run(tmp_path / "live", finished=False)

    def ask(action: str, device: str) -> tuple[bool, str]:
        wishes.append(device)
        return True, action

    served = LivePage(running, host, 0, "secret", ask, log.append)
    before = footprint(os.getpid()).num_threads
    with contextlib.ExitStack() as stack:
        for number in range(300):
            stranger = stack.enter_context(socket.create_connection((host, served.port)))
            with contextlib.suppress(OSError):  # it may have been turned away already
                stranger.sendall((b"", b"\0" * 5000 + b"\r\n\r\n", b"POST /device HTTP/1.1\r\n\r\n")[number % 3])
            if number % 4 == 3:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                stranger.close()  # with a reset
            if number % 50 == 0:
                assert footprint(os.getpid()).num_threads - before <= MOST_READERS
    until("a reader to find a place", lambda: is_shown(served))
    assert posted(served, "wrong") == 403
    assert posted(served, "secret") == 200
    served.close()
    assert wishes == ["1:1"]
    assert 0 < len(log) <= 3
    assert "the token is wrong" in log[-1]
    assert capfd.readouterr() == ("", "")


def is_shown(page: LivePage) -> bool:
    """Returns whether the page can be read."""
    with contextlib.suppress(OSError), urllib.request.urlopen(page.url, timeout=20) as answer:
        return b"<html" in answer.read()
    return False


def posted(page: LivePage, token: str) -> int:
    """Returns the status of a wish with `token`."""
    wish = json.dumps({"action": "drain", "device": "1:1", "confirm": "1:1"}).encode()
    headers = {"Origin": page.url.rstrip("/"), "Content-Type": "application/json", "X-Runflat-Token": token}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{page.url}device", wish, headers), timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
