"""A machine with the tests' own driver and, at times, a power agent: started, killed and looked at as processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_nvml

from runflat.power.client import AgentClient, acquire, set_limits
from runflat.power.wire import Granted, SetDone

ROOT = Path(__file__).parents[3]
HEALTHY = [960.0] * 3
CEILING_W = 1150
CONTROLLER = """
import select, sys
from pathlib import Path
from runflat.power.client import AgentClient, acquire, renew, set_limits
client = AgentClient(Path(sys.argv[1]), timeout_s=20)
lease = acquire(client, ["GPU-0", "GPU-1"], ttl_s=float(sys.argv[2])).lease
print(set_limits(client, lease, {"GPU-0": 1100.0, "GPU-1": 1150.0}).type, flush=True)
while not select.select([sys.stdin], [], [], 0.1)[0]:
    renew(client, lease)
"""


class AgentNode:
    """Devices at 960 of 1200 W with a ceiling of 1150 W; this user may talk to the agent."""

    def __init__(self, folder: Path, library: Path, num_devices: int = 3):
        self.folder = folder
        self.driver = fake_nvml.FakeNvml(folder / "driver", num_devices)
        self.socket = folder / "power.sock"
        self.client = AgentClient(self.socket, timeout_s=20)
        self.limits = folder / "power.json"
        device = {"nominal_w": 960, "ceiling_w": CEILING_W}
        site = {"allow_uids": [os.geteuid()], "devices": {f"GPU-{index}": device for index in range(num_devices)}}
        self.limits.write_text(json.dumps(site))
        self.limits.chmod(0o600)
        self._env = {"PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(library.parent), "PATH": "/usr/bin:/bin"}
        self._env["FAKE_NVML_STATE"] = str(self.driver.path)
        self._stack = contextlib.ExitStack()

    def run(self, *arguments: str, ready: str) -> subprocess.Popen[str]:
        """Start Python with these arguments; returns when it has said `ready`."""
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        assert process.stdout is not None
        said = process.stdout.readline()
        assert ready in said, said + process.stdout.read()
        return process

    def arguments(self, *more: str) -> list[str]:
        """A command line of the agent's."""
        where = ["--limits", str(self.limits), "--state", str(self.folder), "--socket", str(self.socket)]
        return ["-m", "runflat.cli", "power-agent", *where, *more]

    def agent(self) -> subprocess.Popen[str]:
        """Start the agent; returns when it serves."""
        return self.run(*self.arguments(), ready="listening")

    def controller(self, ttl_s: float) -> subprocess.Popen[str]:
        """Start a controller that boosts two devices and renews its lease; returns when it has boosted them."""
        return self.run("-c", CONTROLLER, str(self.socket), str(ttl_s), ready="set-done")

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


def until(is_so: Callable[[], bool], timeout_s: float = 40.0) -> float:
    """Wait for something that another process does; returns the seconds that it took."""
    start_s = time.monotonic()
    while not is_so():
        assert time.monotonic() < start_s + timeout_s
        threading.Event().wait(0.02)
    return time.monotonic() - start_s
