"""Nodes of a cluster, each a host of its own: a worker, a whole node and a new node, lost and taken (soak)."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from machines import Machines
from site_launcher import EXACT, PATIENCE_S, Site, check_result

from runflat.check.live import until

pytestmark = [
    pytest.mark.soak,
    pytest.mark.process,
    pytest.mark.needs_netns,
    pytest.mark.timeout(900),
]
LAYOUT = "--layout.tp 4 --layout.replicas 2"
PACED = "--devices emulated --device.rate-tflops 1e-4"
"""Slow steps: differences of rounding grow with their number, and nodes take their time to come and go."""
SPARES = ("s0", "s1", "s2", "s3")


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """Returns what ends everything that a test has started."""
    with contextlib.ExitStack() as made:
        yield made


def test_a_worker_and_a_node(live: Any, stack: contextlib.ExitStack) -> None:
    """Catches a spare that makes a replica span nodes, and a node whose loss the spare node does not bear."""
    machines = stack.enter_context(Machines())
    site = Site(live, f"{LAYOUT} {EXACT} {PACED} --spares 4 --on-failure spare,ntp,drop", stack, machines)
    for name, first in {"a": 0, "b": 4, "c": 8}.items():
        site.node(name, *range(first, first + 4))
    site.watch.reached(3, PATIENCE_S)
    until("the spares", lambda: {site.watch.state(device) for device in SPARES} == {"standby"}, PATIENCE_S)

    os.kill(site.watch.pid("0:2"), signal.SIGKILL)
    until("a lower degree", lambda: site.degrees()[-1] == [3, 4], PATIENCE_S)
    until("the full degree", lambda: site.degrees()[-1] == [4, 4], PATIENCE_S)

    site.lose(4, 5, 6, 7)
    site.until_active(*SPARES)
    until("the spare node in its place", lambda: site.degrees()[-1] == [4, 4], PATIENCE_S)
    site.go_on()
    site.end()
    worker, *node = [row["devices"] for row in site.watch.records("incident")]
    assert worker == ["0:2"]
    assert {device for devices in node for device in devices} == {f"1:{slot}" for slot in range(4)}
    check_result(live, site, LAYOUT)


def test_a_new_node(live: Any, stack: contextlib.ExitStack) -> None:
    """Catches a job that ends with its only other node, and a new node that nobody uses."""
    machines = stack.enter_context(Machines())
    site = Site(live, f"{LAYOUT} {EXACT} {PACED} --on-failure ntp,drop", stack, machines)
    site.node("a", *range(4))
    site.node("b", *range(4, 8))
    site.watch.reached(3, PATIENCE_S)
    site.lose(4, 5, 6, 7)
    until("the job on one node", lambda: site.degrees()[-1] == [4], PATIENCE_S)
    site.node("d", 4, 5, 6, 7)
    site.until_active(*(f"1:{slot}" for slot in range(4)))
    until("both replicas", lambda: site.degrees()[-1] == [4, 4], PATIENCE_S)
    site.go_on()
    site.end()
    check_result(live, site, LAYOUT)
