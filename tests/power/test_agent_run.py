"""A run that is boosted through an agent process: over its socket, on the tests' driver, to the controller's end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_node import AgentNode, until

from runflat.check.live import Command, Watch
from runflat.commands.demo_power import SETTINGS, story

pytestmark = [pytest.mark.needs_compiler, pytest.mark.process, pytest.mark.timeout(240)]

HEALTHY = [960.0] * 8
LEASE_S = 4.0
NEED_W = 960.0 * (4 / 3) ** 0.5
"""Three devices do the work of four, and speed goes with the square of power."""
KILL = {"event": "kill", "device": "1:1", "step": 3, "phase": "backward"}


@pytest.fixture
def node(tmp_path: Path, nvml_library: Path) -> Iterator[AgentNode]:
    """Eight devices and their agent."""
    found = AgentNode(tmp_path, nvml_library, num_devices=8)
    yield found
    found.close()


def arguments(node: AgentNode, run: Path) -> list[str]:
    """A boosted run whose emulated devices follow the limits of the agent's."""
    failures = node.folder / "failures.json"
    failures.write_text(json.dumps([KILL]))
    own: dict[str, Any] = {"run": run, "inject": failures, "power.agent": node.socket, "power.lease-s": LEASE_S}
    settings = {**SETTINGS, "device.curve": "exponent:2", **own}
    del settings["device.max-power"]
    return ["train", *(f"--{key}" if value is True else f"--{key}={value}" for key, value in settings.items())]


def test_boost_over_the_socket_and_the_controller_is_killed(node: AgentNode) -> None:
    """Catches a boost that a real agent does not carry out, and one that outlives the controller of a real run."""
    agent = node.agent()
    watch = Watch(node.folder / "run")
    with Command(arguments(node, watch.run), node.folder / "run.log") as command:
        until(lambda: any("same time again" in line for line in story(watch.steps())), 120.0)
        boosted_w = node.driver.limits_w()
        os.kill(command.process.pid, signal.SIGKILL)
        restored_s = until(lambda: node.driver.limits_w() == HEALTHY)
    assert boosted_w[:4] == HEALTHY[:4]
    assert boosted_w[5] == HEALTHY[5], "the dead device was raised"
    assert [boosted_w[index] for index in (4, 6, 7)] == pytest.approx([NEED_W] * 3, abs=15.0)
    assert restored_s < LEASE_S + 10.0
    assert [entry["why"] for entry in node.log() if entry["event"] == "lease-ended"] == ["expired"]
    lines = story(watch.steps())
    assert "three devices do the work of four, 1.33x as long" in lines[1]
    assert sum("more power" in line for line in lines) >= 3  # 148 W in steps of 50 W
    assert "1.15x power" in lines[-1]
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(30) == 0
