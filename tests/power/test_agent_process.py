"""The agent as it runs: a process with the real nvidia-ml-py over the tests' own driver, killed and started again."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_nvml
import pytest

from runflat.power.client import AgentClient, acquire, read, set_limits
from runflat.power.wire import Granted, SetDone, Telemetry

pytestmark = [pytest.mark.needs_compiler, pytest.mark.process]

ROOT = Path(__file__).parents[2]
HEALTHY = [960.0] * 3
CONTROLLER = """
import sys, time
from pathlib import Path
from runflat.power.client import AgentClient, acquire, renew, set_limits
client = AgentClient(Path(sys.argv[1]), timeout_s=20)
lease = acquire(client, ["GPU-0", "GPU-1"], ttl_s=3.0).lease
print(set_limits(client, lease, {"GPU-0": 1100.0, "GPU-1": 1150.0}).type, flush=True)
while True:
    renew(client, lease)
    time.sleep(0.1)
"""


class Node:
    """A machine with a driver and, at times, an agent."""

    def __init__(self, folder: Path, library: Path):
        self.folder = folder
        self.driver = fake_nvml.FakeNvml(folder / "driver")
        self.client = AgentClient(folder / "power.sock", timeout_s=20)
        self.limits = folder / "power.json"
        device = {"nominal_w": 960, "ceiling_w": 1150}
        site = {"allow_uids": [os.geteuid()], "devices": {f"GPU-{index}": device for index in range(3)}}
        self.limits.write_text(json.dumps(site))
        self.limits.chmod(0o600)
        self._env = {"PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(library.parent), "PATH": "/usr/bin:/bin"}
        self._env["FAKE_NVML_STATE"] = str(self.driver.path)
        self._stack = contextlib.ExitStack()

    def run(self, *arguments: str, ready: str) -> subprocess.Popen[str]:
        """Start Python with these arguments; returns when it has said `ready`."""
        process = subprocess.Popen(
            [sys.executable, *arguments], env=self._env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        assert process.stdout is not None
        said = process.stdout.readline()
        assert ready in said, said + process.stdout.read()
        return process

    def arguments(self, *more: str) -> list[str]:
        """A command line of the agent's."""
        where = ["--limits", str(self.limits), "--state", str(self.folder), "--socket", str(self.folder / "power.sock")]
        return ["-m", "runflat.cli", "power-agent", *where, *more]

    def agent(self) -> subprocess.Popen[str]:
        """Start the agent; returns when it serves."""
        return self.run(*self.arguments(), ready="listening")

    def once(self, *more: str) -> subprocess.CompletedProcess[str]:
        """Run the agent to its end."""
        command = [sys.executable, *self.arguments(*more)]
        return subprocess.run(command, env=self._env, capture_output=True, text=True, check=False, timeout=50)

    def boost(self) -> None:
        """Boost a device, as a controller would."""
        granted = acquire(self.client, ["GPU-0"], ttl_s=60.0)
        assert isinstance(granted, Granted), granted
        assert isinstance(set_limits(self.client, granted.lease, {"GPU-0": 1100.0}), SetDone)
        assert self.driver.limits_w()[0] == 1100.0

    def log(self) -> list[dict[str, Any]]:
        """The agent's log."""
        return [json.loads(line) for line in (self.folder / "audit.jsonl").read_text().splitlines()]

    def close(self) -> None:
        """End what runs."""
        self._stack.close()


@pytest.fixture
def node(tmp_path: Path, nvml_library: Path) -> Iterator[Node]:
    """A machine whose agent has not been started."""
    found = Node(tmp_path, nvml_library)
    yield found
    found.close()


def until(is_so: Callable[[], bool]) -> None:
    """Wait for something that another process does."""
    deadline_s = time.monotonic() + 40
    while not is_so():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.02)


def test_controller_is_killed(node: Node) -> None:
    """Catches a boost that outlives a controller that could say nothing any more: the failure that matters most."""
    agent = node.agent()
    controller = node.run("-c", CONTROLLER, str(node.folder / "power.sock"), ready="set-done")
    until(lambda: [entry["event"] for entry in node.log()].count("set") == 2)
    assert node.driver.limits_w() == [1100.0, 1150.0, 960.0]
    controller.kill()
    until(lambda: node.driver.limits_w() == HEALTHY)
    assert [entry["why"] for entry in node.log() if entry["event"] == "lease-ended"] == ["expired"]
    assert max(device.highest_set_mw for device in node.driver.state.devices) == 1_150_000
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(30) == 0


def test_agent_is_killed_and_starts_again(node: Node) -> None:
    """Catches an agent that serves before it has restored, or that forgets: the first answer must find nominal."""
    first = node.agent()
    node.boost()
    first.kill()
    first.wait(30)
    assert node.driver.limits_w()[0] == 1100.0
    node.agent()
    assert node.driver.limits_w() == HEALTHY
    seen = read(node.client)
    assert isinstance(seen, Telemetry)
    assert [state.limit_w for state in seen.devices] == HEALTHY


def test_killed_and_only_restored(node: Node) -> None:
    """Catches a unit's clean-up that needs the limits file, or a restart that waits for it to be mended."""
    agent = node.agent()
    node.boost()
    agent.kill()
    agent.wait(30)
    node.limits.chmod(0o666)
    done = node.once()
    assert done.returncode == 2
    assert "can be written by others" in done.stderr.replace("\n", " ")
    assert node.driver.limits_w() == HEALTHY
    node.driver.device("GPU-0").limit_mw = 1_100_000
    assert node.once("--restore").returncode == 0
    assert node.driver.limits_w()[0] == 1100.0, "nothing is owed any more: that limit is somebody else's"


def test_stop_and_one_agent_a_node(node: Node) -> None:
    """Catches SIGTERM that leaves a boost, and a second agent that takes the socket from the first."""
    agent = node.agent()
    node.boost()
    done = node.once()
    assert done.returncode == 2
    assert "another power agent is running" in done.stderr.replace("\n", " ")
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(30) == 0
    assert node.driver.limits_w() == HEALTHY


def test_device_is_lost_at_the_end(node: Node) -> None:
    """Catches an agent that ends as if all were well while a device is still owed its limit."""
    agent = node.agent()
    node.boost()
    node.driver.device("GPU-0").is_lost = 1
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(30) == 1
    assert agent.stdout is not None
    assert "GPU-0" in agent.stdout.read()
    node.driver.device("GPU-0").is_lost = 0
    assert node.once("--restore").returncode == 0
    assert node.driver.limits_w() == HEALTHY


def test_driver_that_hangs(node: Node) -> None:
    """Catches one hanging device that keeps the agent from serving and restoring the others."""
    node.agent()
    granted = acquire(node.client, ["GPU-0", "GPU-1"], ttl_s=5.0)
    assert isinstance(granted, Granted)
    node.driver.device("GPU-0").delay_ms = 20_000
    reply = set_limits(node.client, granted.lease, {"GPU-0": 1100.0, "GPU-1": 1100.0})
    assert reply.type == "failure"
    assert set(reply.devices) == {"GPU-0"}
    assert node.driver.limits_w() == [960.0, 1100.0, 960.0]
    until(lambda: node.driver.limits_w() == HEALTHY)


def test_dry_run(node: Node) -> None:
    """Catches a dry run that writes, or that leaves a debt behind."""
    node.run(*node.arguments("--dry-run"), ready="listening")
    granted = acquire(node.client, ["GPU-0"], ttl_s=20.0)
    assert isinstance(granted, Granted)
    done = set_limits(node.client, granted.lease, {"GPU-0": 1100.0})
    assert isinstance(done, SetDone)
    assert done.devices[0].limit_w == 1100.0
    assert node.driver.limits_w() == HEALTHY
    assert not (node.folder / "journal.json").exists()
