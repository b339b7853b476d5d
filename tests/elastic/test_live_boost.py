"""A real run with power: emulated devices whose declared speed follows their limit."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

POWERED = (
    "--devices emulated --device.rate-tflops 2e-4 --device.curve exponent:1 --device.max-power 1.5 --boost "
    "--layout.tp 3 --layout.replicas 2 --train.global-batch 4 --power.step-w 150 --train.memory-every 0"
)


def test_limits_follow_a_loss_and_its_return(live: Any) -> None:
    """Catches limits that do not reach the workers' declared speed, a split that moves, or limits that stay up."""
    events = [
        {"event": "kill", "device": "1:1", "step": 3, "phase": "backward"},
        {"event": "return", "device": "1:1", "step": 14},
    ]
    ran = live.train("boost", f"{POWERED} --train.steps 60", events)
    assert (ran.code, ran.error) == (0, None)
    rows = ran.watch.steps()
    assert {tuple(r["num_samples"] for r in row["replicas"]) for row in rows} == {(2, 2)}
    hurt = [row for row in rows if row["generation"] == rows[4]["generation"]]
    healthy_s = min(row["billed_s"] for row in rows[:3])
    assert hurt[0]["billed_s"] == pytest.approx(1.5 * healthy_s, rel=0.01)
    assert hurt[-1]["billed_s"] == pytest.approx(healthy_s, rel=0.01)
    assert max(row["power"]["replicas"]["1"]["limit_w"] for row in hurt) == pytest.approx(1500.0)
    assert rows[-1]["power"]["replicas"]["1"]["limit_w"] == 1000.0
    assert rows[-1]["billed_s"] == pytest.approx(healthy_s, rel=0.01)
    power = ran.summary["power"]
    assert power["curve"] == "exponent 1"
    assert power["extra_j"] > 0
