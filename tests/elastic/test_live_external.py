"""Workers that something else starts, in real processes: strangers at the door, a lost worker, a lost node."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from site_launcher import EXACT, PACED, PATIENCE_S, Site, check_result

from runflat.check.live import listening, until
from runflat.elastic.proof import StrangerError, call

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """Returns what ends everything that a test has started."""
    with contextlib.ExitStack() as made:
        yield made


def pester(address: tuple[str, int], num_strangers: int) -> None:
    """Has strangers call: silent ones, ones that send garbage, ones that hang up."""
    with contextlib.ExitStack() as held:
        for number in range(num_strangers):
            stranger = held.enter_context(socket.create_connection(address))
            with contextlib.suppress(OSError):  # it may have been turned away already
                stranger.sendall((b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 10_000)[number % 3])
            if number % 4:
                stranger.close()


def disturb(site: Site) -> None:
    """Has strangers call at whatever listens, a thousand of them at the controller's door."""
    door = site.endpoint()
    processes = [site.controller.process.pid, *map(site.watch.pid, site.watch.devices())]
    addresses = {address for pid in processes for address in listening(pid)}
    assert {host for host, _ in addresses} == {"::1"}
    assert len(addresses) > 2 + len(site.workers)  # door and store, and at each worker at least that for copies
    for address in addresses:
        pester(address, 1000 if address == (door.host, door.port) else 50)
    with pytest.raises(StrangerError):
        call(door, "a token that is wrong", lambda _: b"{}", 10.0)


def test_strangers_a_lost_worker_and_a_lost_node(live: Any, stack: contextlib.ExitStack) -> None:
    """Catches a stranger who disturbs training, and a worker or a node that is lost and not taken back.

    All that listens is at one IPv6 address.
    """
    layout = "--layout.tp 2 --layout.replicas 2"
    site = Site(live, f"{layout} {EXACT} {PACED} --listen ::1", stack)
    site.node("a", 0, 1)
    site.node("b", 2, 3)
    site.watch.reached(3, PATIENCE_S)
    disturb(site)
    site.go_on(11)  # copies in memory go on
    assert site.watch.records("incident") == []
    refused = [line for line in site.controller.output().splitlines() if "refused" in line]
    assert 2 <= len(refused) < 40
    assert any("copies: refused" in line for line in refused)

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
