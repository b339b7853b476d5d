"""Workers that something else starts, in real processes: strangers at the door, a lost worker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runflat.check.diff import compare
from runflat.check.live import Command, Watch, until
from runflat.elastic.endpoint import Endpoint
from runflat.elastic.journal import plan_path
from runflat.elastic.proof import StrangerError, call
from runflat.plan.plan import plan_from_json
from runflat.train.checkpoint import newest_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
EXACT = "--train.steps 2000 --train.dtype float64 --train.lift-casts --train.global-batch 8"
PACED = "--devices emulated --device.rate-tflops 4e-4"
INTERRUPTED = 130
PATIENCE_S = 240.0


class Site:
    """A launcher of the site: starts the controller and the workers of each node, which are process groups."""

    def __init__(self, live: Any, arguments: str, stack: contextlib.ExitStack) -> None:
        self.run = live.folder / "site"
        self.watch = Watch(self.run)
        self._folder = live.folder
        self._stack = stack
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.workers: dict[int, Command] = {}
        flags = [*live.flags(arguments), "--run", str(self.run)]
        self.controller = self._start(["controller", *flags], "controller.log")

    def _start(self, argv: list[str], log: str, **variables: str) -> Command:
        command = Command(argv, self._folder / log, self._environment | variables)
        return self._stack.enter_context(command)

    def node(self, name: str, *ranks: int) -> None:
        """Starts the workers of a node."""
        for rank in ranks:
            argv = ["worker", "--run", str(self.run), "--node", name]
            self.workers[rank] = self._start(argv, f"{name}-{rank}.log", RANK=str(rank), LOCAL_RANK="0")

    def lose(self, *ranks: int) -> None:
        """Has the machines of these ranks go away without a word."""
        for rank in ranks:
            self.workers[rank].process.kill()

    def endpoint(self) -> Endpoint:
        """Returns where the controller listens."""
        found = json.loads((self.run / "controller.json").read_text())
        return Endpoint(found["host"], found["port"])

    def degrees(self) -> list[list[int]]:
        """Returns the degrees of the replicas in each step so far."""
        plans = {
            number: plan_from_json(plan_path(self.run, number).read_text())
            for number in {row["generation"] for row in self.watch.steps()}
        }
        return [[replica.tp for replica in plans[row["generation"]].replicas] for row in self.watch.steps()]

    def until_active(self, *devices: str) -> None:
        def all_active() -> bool:
            assert self.controller.process.poll() is None, self.controller.output()
            return {self.watch.state(device) for device in devices} == {"active"}

        until(f"{', '.join(devices)} to train", all_active, PATIENCE_S)

    def go_on(self, num_steps: int = 3) -> None:
        """Waits for some more steps."""
        self.watch.reached(self.watch.num_steps() + num_steps, PATIENCE_S)

    def end(self) -> None:
        """Stops the run in order; all workers end with it, well."""
        os.kill(self.controller.process.pid, signal.SIGINT)
        assert self.controller.finish(PATIENCE_S) == INTERRUPTED, self.controller.output()
        for worker in self.workers.values():
            assert worker.finish(PATIENCE_S) == 0, worker.output()


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """Returns what ends everything that a test has started."""
    with contextlib.ExitStack() as made:
        yield made


def check_result(live: Any, site: Site, layout: str) -> None:
    """The run did each step once, and ended with the weights of a run that lost nothing."""
    summary = site.watch.summary()
    assert [row["step"] for row in site.watch.steps()] == list(range(summary["step"]))
    whole = live.train("whole", f"{layout} {EXACT} --train.stop-after {summary['step']}").watch
    ends = [newest_checkpoint(watch.run, pytest.fail) for watch in (whole, site.watch)]
    assert compare(*ends).whole("weight") <= 1e-11
    assert summary["sample_hash"] == whole.summary()["sample_hash"]


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


def test_strangers_and_a_lost_worker(live: Any, stack: contextlib.ExitStack) -> None:
    """Catches a stranger who disturbs training, a worker that is not taken back, and a result that depends on these."""
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
    site.end()
    check_result(live, site, layout)
