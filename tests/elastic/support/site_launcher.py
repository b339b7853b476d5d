"""A launcher of a site: the controller and the workers of each node, which are process groups or hosts of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from machines import Machines

from runflat.check.diff import compare
from runflat.check.live import Command, Watch, until
from runflat.elastic.endpoint import Endpoint
from runflat.elastic.journal import plan_path
from runflat.plan.plan import plan_from_json
from runflat.train.checkpoint import newest_checkpoint

ROOT = Path(__file__).parents[3]
EXACT = "--train.steps 2000 --train.dtype float64 --train.lift-casts --train.global-batch 8"
PACED = "--devices emulated --device.rate-tflops 4e-4"
INTERRUPTED = 130
PATIENCE_S = 240.0


class Site:
    """Starts the controller and the workers of each node: on `machines`, or as process groups of this one."""

    def __init__(
        self, live: Any, arguments: str, stack: contextlib.ExitStack, machines: Machines | None = None
    ) -> None:
        self.run = live.folder / "site"
        self.watch = Watch(self.run)
        self._folder = live.folder
        self._stack = stack
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._machines = machines
        self._node_of: dict[int, str] = {}
        self.workers: dict[int, Command] = {}
        flags = [*live.flags(arguments), "--run", str(self.run)]
        if machines is not None:
            flags += ["--listen", machines.address]
        self.controller = self._start(["controller", *flags], "controller.log")

    def _start(self, argv: list[str], log: str, prefix: tuple[str, ...] = (), **variables: str) -> Command:
        command = Command(argv, self._folder / log, self._environment | variables, prefix)
        return self._stack.enter_context(command)

    def node(self, name: str, *ranks: int) -> None:
        """Starts the workers of a node, which is a new machine where machines are given."""
        prefix = self._machines.add(name) if self._machines is not None and name not in self._node_of.values() else ()
        for rank in ranks:
            argv = ["worker", "--run", str(self.run), "--node", name]
            self.workers[rank] = self._start(argv, f"{name}-{rank}.log", prefix, RANK=str(rank), LOCAL_RANK="0")
            self._node_of[rank] = name

    def lose(self, *ranks: int) -> None:
        """Has all processes of these ranks go away at once; with their machine, so that nobody hears that they do."""
        for name in {self._node_of[rank] for rank in ranks}:
            if self._machines is not None:
                self._machines.unplug(name)
        for rank in ranks:
            os.killpg(self.workers.pop(rank).process.pid, signal.SIGKILL)
            del self._node_of[rank]

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


def check_result(live: Any, site: Site, layout: str) -> None:
    """The run did each step once, and ended with the weights of a run that lost nothing."""
    summary = site.watch.summary()
    assert [row["step"] for row in site.watch.steps()] == list(range(summary["step"]))
    whole = live.train("whole", f"{layout} {EXACT} --train.stop-after {summary['step']}").watch
    ends = [newest_checkpoint(watch.run, pytest.fail) for watch in (whole, site.watch)]
    assert compare(*ends).whole("weight") <= 1e-11
    assert summary["sample_hash"] == whole.summary()["sample_hash"]
