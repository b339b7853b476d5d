"""The agent as it runs: a process with the real nvidia-ml-py over the tests' own driver, killed and started again."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_node import CEILING_W, HEALTHY, AgentNode, until
from fuzz import fuzz

from runflat.power.client import acquire, read, set_limits
from runflat.power.wire import Granted, SetDone, Telemetry

pytestmark = [pytest.mark.needs_compiler, pytest.mark.process]


@pytest.fixture
def node(tmp_path: Path, nvml_library: Path) -> Iterator[AgentNode]:
    """A machine whose agent has not been started."""
    found = AgentNode(tmp_path, nvml_library)
    yield found
    found.close()


def test_controller_is_killed(node: AgentNode) -> None:
    """Catches a boost that outlives a controller that could say nothing any more: the failure that matters most."""
    agent = node.agent()
    controller = node.controller(ttl_s=3.0)
    until(lambda: [entry["event"] for entry in node.log()].count("set") == 2)
    assert node.driver.limits_w() == [1100.0, 1150.0, 960.0]
    controller.kill()
    until(lambda: node.driver.limits_w() == HEALTHY)
    assert [entry["why"] for entry in node.log() if entry["event"] == "lease-ended"] == ["expired"]
    assert max(device.highest_set_mw for device in node.driver.state.devices) == 1_150_000
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(30) == 0


def test_agent_is_killed_and_starts_again(node: AgentNode) -> None:
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


def test_killed_and_only_restored(node: AgentNode) -> None:
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


def test_stop_and_one_agent_a_node(node: AgentNode) -> None:
    """Catches SIGTERM that leaves a boost, and a second agent that takes the socket from the first."""
    agent = node.agent()
    node.boost()
    done = node.once()
    assert done.returncode == 2
    assert "another power agent is running" in done.stderr.replace("\n", " ")
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(30) == 0
    assert node.driver.limits_w() == HEALTHY


def test_device_is_lost_at_the_end(node: AgentNode) -> None:
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


def test_driver_that_hangs(node: AgentNode) -> None:
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


def test_dry_run(node: AgentNode) -> None:
    """Catches a dry run that writes, or that leaves a debt behind."""
    node.run(*node.arguments("--dry-run"), ready="listening")
    granted = acquire(node.client, ["GPU-0"], ttl_s=20.0)
    assert isinstance(granted, Granted)
    done = set_limits(node.client, granted.lease, {"GPU-0": 1100.0})
    assert isinstance(done, SetDone)
    assert done.devices[0].limit_w == 1100.0
    assert node.driver.limits_w() == HEALTHY
    assert not (node.folder / "journal.json").exists()


def test_fuzzed(node: AgentNode) -> None:
    """Catches bytes, in any order, that bring the agent down, move a device too far, or keep a good caller waiting."""
    agent = node.agent()
    found = fuzz(node.socket, 10.0, seed=1)
    assert agent.poll() is None
    assert found["served"] > 0
    assert [name for name in found if name.startswith("failed")] == []
    assert min(found[name] for name in ("malformed", "oversized", "telemetry")) > 0
    assert max(device.highest_set_mw for device in node.driver.state.devices) <= CEILING_W * 1000
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(30) == 0
    assert node.driver.limits_w() == HEALTHY
