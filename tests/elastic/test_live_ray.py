"""A job on Ray, in real raylets and actors: a lost actor, a lost node, a new node."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runflat.check.diff import compare
from runflat.check.live import Command, Watch, is_alive, until
from runflat.elastic.journal import plan_path
from runflat.plan.plan import plan_from_json
from runflat.train.checkpoint import newest_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.needs_ray]

ROOT = Path(__file__).parents[2]
EXACT = "--train.steps 2000 --train.dtype float64 --train.lift-casts --train.global-batch 8 --train.lr 3e-5"
"""With the usual rate a difference in the last bit is 1e-9 of the weights after 250 steps."""
PACED = "--devices emulated --device.rate-tflops 1e-4"
INTERRUPTED = 130
PATIENCE_S = 240.0


class Nodes:
    """Raylets of this machine, as Ray's own cluster utility starts them; the first has Ray's head beside it."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self._nodes: dict[str, Any] = {}

    def add(self, num_cpus: int) -> None:
        node = self._cluster.add_node(num_cpus=num_cpus, include_dashboard=False, node_ip_address="127.0.0.1")
        self._nodes[node.node_id] = node

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def lose(self, beginning: str) -> None:
        """Kills the raylet whose id begins so, and with it all that runs there."""
        (node_id,) = [node_id for node_id in self._nodes if node_id.startswith(beginning)]
        self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)

    def is_head(self, beginning: str) -> bool:
        return str(self._cluster.head_node.node_id).startswith(beginning)

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """Returns a cluster without nodes; nothing of it outlives the test."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")  # the machine's other users are not its business
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # all on loopback; else Ray replaces 127.0.0.1
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = Nodes()
    yield made
    made.close()


class Job:
    """`runflat train --launcher ray`, and what its files and lines say."""

    def __init__(self, live: Any, nodes: Nodes, arguments: str, stack: contextlib.ExitStack) -> None:
        self.watch = Watch(live.folder / "job")
        flags = [*live.flags(arguments), "--run", str(self.watch.run), "--launcher", "ray", "--address", nodes.address]
        self.driver = stack.enter_context(Command(["train", *flags], live.folder / "driver.log"))

    def until(self, what: str, condition: Any) -> None:
        def holds() -> bool:
            assert self.driver.process.poll() is None, self.driver.output()
            return bool(condition())

        until(what, holds, PATIENCE_S)

    def until_state(self, state: str, *devices: str) -> None:
        self.until(f"{devices} to be {state}", lambda: {self.watch.state(device) for device in devices} == {state})

    def go_on(self, num_steps: int = 3) -> None:
        """Waits for some more steps."""
        goal = self.watch.num_steps() + num_steps
        self.until(f"step {goal}", lambda: self.watch.num_steps() >= goal)

    def actor(self, device: str) -> int:
        """Returns the process of a device's actor, which is the parent of its worker."""
        stat = Path(f"/proc/{self.watch.pid(device)}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])

    def controller(self) -> int:
        """Returns the process of the controller's actor, which Ray writes before its lines."""
        (pid,) = set(re.findall(r"runflat controller pid=(\d+)", self.driver.output()))
        return int(pid)

    def node(self, group: str) -> str:
        """Returns the beginning of the id of the node where a group was placed last."""
        lines = [line for line in self.driver.output().splitlines() if line.startswith(f"ray: {group}: placed on ")]
        return lines[-1].rpartition(" ")[2]

    def degrees(self) -> list[int]:
        """Returns the degrees of the replicas in the newest step."""
        generation = self.watch.steps()[-1]["generation"]
        return [replica.tp for replica in plan_from_json(plan_path(self.watch.run, generation).read_text()).replicas]

    def end(self) -> None:
        """Stops the run in order."""
        os.kill(self.driver.process.pid, signal.SIGINT)
        assert self.driver.finish(PATIENCE_S) == INTERRUPTED, self.driver.output()


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """Returns what ends everything that a test has started."""
    with contextlib.ExitStack() as made:
        yield made


def check_result(live: Any, job: Job, layout: str) -> None:
    """The run did each step once, and ended with the weights of a run that lost nothing."""
    summary = job.watch.summary()
    assert [row["step"] for row in job.watch.steps()] == list(range(summary["step"]))
    whole = live.train("whole", f"{layout} {EXACT} --train.stop-after {summary['step']}").watch
    ends = [newest_checkpoint(watch.run, pytest.fail) for watch in (whole, job.watch)]
    assert compare(*ends).whole("weight") <= 1e-11
    assert summary["sample_hash"] == whole.summary()["sample_hash"]


@pytest.mark.timeout(300)
def test_an_actor_a_node_and_a_new_node(live: Any, nodes: Nodes, stack: contextlib.ExitStack) -> None:
    """Catches a job on Ray that ends, stands, loses a step or learns something else when parts of the cluster go."""
    check_losses(live, nodes, stack, tp=2)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_nodes_of_four(live: Any, nodes: Nodes, stack: contextlib.ExitStack) -> None:
    """Catches what goes wrong with more devices per node only."""
    check_losses(live, nodes, stack, tp=4)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_controller_is_lost(live: Any, nodes: Nodes, stack: contextlib.ExitStack) -> None:
    """Catches a job that ends with its controller's actor, or goes on from another state than the one it left."""
    nodes.add(num_cpus=2)
    layout = "--layout.replicas 2"
    job = Job(live, nodes, f"{layout} {EXACT} {PACED}", stack)
    job.until_state("active", "0:0", "1:0")
    job.go_on()
    os.kill(job.controller(), signal.SIGKILL)
    job.until("another controller", lambda: "another one resumes" in job.driver.output())
    job.go_on()
    assert job.degrees() == [1, 1]
    job.end()
    check_result(live, job, layout)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_command_is_lost(live: Any, nodes: Nodes, stack: contextlib.ExitStack) -> None:
    """Catches actors and workers that hold their devices when nobody is there who could end them."""
    nodes.add(num_cpus=2)
    job = Job(live, nodes, f"--layout.replicas 2 {EXACT} {PACED}", stack)
    job.until_state("active", "0:0", "1:0")
    job.go_on()
    processes = [job.controller(), *(pid for name in ("0:0", "1:0") for pid in (job.actor(name), job.watch.pid(name)))]
    job.driver.process.kill()
    until("the end of all that it started", lambda: not any(is_alive(pid) for pid in processes), PATIENCE_S)


def check_losses(live: Any, nodes: Nodes, stack: contextlib.ExitStack, tp: int) -> None:
    """On three nodes, two replicas and a spare node, an actor is killed, then a node, and a node is added."""
    for _ in range(3):
        nodes.add(num_cpus=tp)
    layout = f"--layout.tp {tp} --layout.replicas 2"
    job = Job(live, nodes, f"{layout} --spares {tp} --on-failure spare,ntp,drop {EXACT} {PACED}", stack)
    places = [f"{replica}:{slot}" for replica in range(2) for slot in range(tp)]
    spares = [f"s{number}" for number in range(tp)]
    job.until_state("active", *places)
    job.until_state("standby", *spares)
    job.go_on()

    hit = places[tp - 1]
    worker = job.watch.pid(hit)
    os.kill(job.actor(hit), signal.SIGKILL)
    job.until("the loss", lambda: job.watch.records("incident"))
    assert [row["devices"] for row in job.watch.records("incident")] == [[hit]]
    assert not is_alive(worker)
    job.go_on(1)
    assert job.degrees() == [tp - 1, tp]
    job.until("the return", lambda: job.degrees() == [tp, tp])
    job.go_on()

    number = next(number for number in range(2) if not nodes.is_head(job.node(f"replica {number}")))
    lost = [f"{number}:{slot}" for slot in range(tp)]
    nodes.lose(job.node(f"replica {number}"))
    job.until_state("active", *spares)
    job.go_on()
    assert job.degrees() == [tp, tp]
    assert {job.watch.state(device) for device in lost} == {"lost"}

    nodes.add(num_cpus=tp)
    job.until_state("standby", *lost)
    job.go_on()
    job.end()
    check_result(live, job, layout)
