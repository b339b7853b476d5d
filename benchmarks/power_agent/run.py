"""How soon the power agent restores, and what a minute of nonsense does to it.

    python benchmarks/power_agent/run.py

A real agent process with nvidia-ml-py over the small libnvidia-ml of tests/power/support; needs a C compiler. Writes
result.json and README.md beside itself: seconds from SIGKILL of a controller (lease 3 s, renewed every 0.1 s) to
nominal, from the start of a new agent after SIGKILL to its first answer, microseconds of a call, and what 60 s of
fuzzing was answered.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from runflat.check.bench import arguments, report
from runflat.power.client import read

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "power" / "support"))

import fake_nvml  # noqa: E402 (needs the path above)
from agent_node import CEILING_W, HEALTHY, AgentNode, until  # noqa: E402 (needs the path above)
from fuzz import fuzz  # noqa: E402 (needs the path above)

LEASE_S = 3.0


def controller_killed_s(node: AgentNode) -> float:
    """Seconds from SIGKILL of a controller to nominal on all devices."""
    controller = node.controller(LEASE_S)
    controller.kill()
    controller.wait()
    return until(lambda: node.driver.limits_w() == HEALTHY)


def call_us(node: AgentNode) -> float:
    """Median microseconds of a call that reads all devices, connection included."""
    found = []
    for _ in range(1000):
        start_s = time.perf_counter()
        assert read(node.client).type == "telemetry"
        found.append(time.perf_counter() - start_s)
    return statistics.median(found) * 1e6


def measure(folder: Path, fuzz_s: float) -> dict[str, Any]:
    """All of it, on one node."""
    node = AgentNode(folder, fake_nvml.build(folder))
    try:
        agent = node.agent()
        result: dict[str, Any] = {"lease_s": LEASE_S, "read_us": round(call_us(node), 1)}
        result["controller_killed_to_nominal_s"] = [round(controller_killed_s(node), 2) for _ in range(5)]
        node.boost()
        agent.kill()
        agent.wait()
        start_s = time.monotonic()
        agent = node.agent()
        assert node.driver.limits_w() == HEALTHY
        assert read(node.client).type == "telemetry"
        result["agent_killed_start_to_first_answer_s"] = round(time.monotonic() - start_s, 2)
        found = fuzz(node.socket, fuzz_s, seed=2)
        assert agent.poll() is None, "the agent is dead"
        assert not [name for name in found if name.startswith("failed")], found
        until(lambda: node.driver.limits_w() == HEALTHY)
        highest_w = max(device.highest_set_mw for device in node.driver.state.devices) / 1000
        assert highest_w <= CEILING_W
        result |= {"fuzzed_s": fuzz_s, "fuzz_answers": dict(sorted(found.items())), "highest_limit_set_w": highest_w}
        return result
    finally:
        node.close()


def main() -> None:
    """Measures, writes result.json and README.md."""
    parser = arguments(__doc__, HERE)
    parser.add_argument("--fuzz-s", type=float, default=60.0, help="seconds of fuzzing")
    args = parser.parse_args()
    if not any(shutil.which(name) for name in ("gcc", "cc", "clang")):
        sys.exit("no C compiler: this benchmark builds a small libnvidia-ml")
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), args.fuzz_s)
    restored_s = result["controller_killed_to_nominal_s"]
    first_s = result["agent_killed_start_to_first_answer_s"]
    rows = [
        (f"SIGKILL of a controller to nominal, lease {LEASE_S:g} s", f"{min(restored_s)} to {max(restored_s)} s", ""),
        ("start after SIGKILL of the agent to its first answer, all restored", f"{first_s} s", ""),
        ("a call that reads all devices", f"{result['read_us']} us", ""),
        (
            f"highest limit set in {args.fuzz_s:g} s of fuzzing",
            f"{result['highest_limit_set_w']} W",
            f"<= {CEILING_W} W",
        ),
    ]
    report(args.out, "The power agent", __doc__.partition("\n\n")[0], rows, result)


if __name__ == "__main__":
    main()
