"""Workers that something else starts, in real processes: strangers at the door, a lost worker, a lost node."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from site_launcher import EXACT, PACED, PATIENCE_S, Site, check_result

from runflat.check.live import until
from runflat.elastic.endpoint import Endpoint
from runflat.elastic.proof import StrangerError, call

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """Returns what ends everything that a test has started."""
    with contextlib.ExitStack() as made:
        yield made


def pester(endpoint: Endpoint) -> None:
    """Has a thousand strangers call: silent ones, ones that send garbage, ones that hang up, one with a wrong token."""
    with contextlib.ExitStack() as held:
        for number in range(1000):
            stranger = held.enter_context(socket.create_connection((endpoint.host, endpoint.port)))
            with contextlib.suppress(OSError):  # it may have been turned away already
                stranger.sendall((b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 10_000)[number % 3])
            if number % 4:
                stranger.close()
        with pytest.raises(StrangerError):
            call(endpoint, "a token that is wrong", lambda _: b"{}", 10.0)


def test_strangers_a_lost_worker_and_a_lost_node(live: Any, stack: contextlib.ExitStack) -> None:
    """Catches a stranger who disturbs training, and a worker or a node that is lost and not taken back."""
    layout = "--layout.tp 2 --layout.replicas 2"
    site = Site(live, f"{layout} {EXACT} {PACED}", stack)
    site.node("a", 0, 1)
    site.node("b", 2, 3)
    site.watch.reached(3, PATIENCE_S)
    pester(site.endpoint())
    site.go_on()
    assert site.watch.records("incident") == []
    assert "refused" in site.controller.output()

    site.lose(3)
    until("the loss", lambda: site.watch.state("1:1") == "lost", PATIENCE_S)
    site.go_on()
    assert site.degrees()[-1] == [2, 1]
    site.node("b", 3)
    site.until_active("1:1")
    site.go_on()

    site.lose(2, 3)
    until("the loss of a node", lambda: site.degrees()[-1] == [2], PATIENCE_S)
    site.node("c", 2, 3)
    site.until_active("1:0", "1:1")
    site.go_on()
    site.end()
    worker, *node = [row["devices"] for row in site.watch.records("incident")]
    assert worker == ["1:1"]
    assert {device for devices in node for device in devices} == {"1:0", "1:1"}
    check_result(live, site, layout)
