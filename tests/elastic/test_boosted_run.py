"""A real run with power: emulated devices whose declared speed follows their limit."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from runflat.check.live import Watch, until
from runflat.commands.demo_power import END, story
from runflat.report.records import step_row

LOST, BACK = 3, 22
"""Steps at which a device is lost, and told to come back."""
EVENTS = [
    {"event": "kill", "device": "1:1", "step": LOST, "phase": "backward"},
    {"event": "return", "device": "1:1", "step": BACK},
]
POWERED = (
    "--model.num-layers 1 --layout.tp 4 --layout.replicas 2 --train.global-batch 12 --train.memory-every 0 "
    "--train.steps 1000000 --devices emulated --device.rate-tflops 6e-4 --device.curve exponent:1 "
    "--device.max-power 1.4 --boost"
)


@pytest.mark.process
@pytest.mark.timeout(180)
def test_limits_follow_a_loss_and_its_return(live: Any) -> None:
    """Catches limits that do not reach the workers' declared speed, a split that moves, or limits that stay up."""

    def end_when_back(watch: Watch) -> None:
        watch.reached(BACK, 100.0)
        until("1:1 to work again", lambda: watch.state("1:1") == "active", 60.0)
        watch.reached(watch.num_steps() + 3)
        os.kill(os.getpid(), signal.SIGINT)

    ran = live.train("boost", POWERED, EVENTS, alongside=end_when_back)
    assert ran.error is None
    rows = ran.watch.steps()
    assert {tuple(replica["num_samples"] for replica in row["replicas"]) for row in rows} == {(6, 6)}
    billed_s = [row["billed_s"] for row in rows]
    limits_w = [row["power"]["replicas"]["1"]["limit_w"] for row in rows]
    lag = billed_s[LOST] / billed_s[0]
    assert 1.3 < lag < 1.34  # three devices do the work of four
    assert max(billed_s[LOST + 15 : BACK]) <= billed_s[0] / 0.99
    assert limits_w[BACK - 1] == pytest.approx(1000.0 * lag, rel=0.01)
    assert (limits_w[-1], billed_s[-1]) == (1000.0, pytest.approx(billed_s[0]))
    assert max(row["power"]["replicas"]["0"]["limit_w"] for row in rows) == 1000.0
    lines = story(rows)  # as the demo tells it
    assert "more power" in lines[2]
    assert END in lines[-1]
    steps = [step_row(row).power for row in rows]  # as the report reads them
    assert [steps[index] and steps[index].limit_w for index in (0, -1)] == [8000.0, 8000.0]
    power = ran.summary["power"]
    assert power["by_incident"]["1"]["extra_j"] == power["extra_j"] > 0


PAPER = (
    "--model.num-layers 1 --model.hidden-size 224 --model.num-heads 56 --model.num-kv-heads 56 --model.head-dim 4 "
    "--model.ffn-size 448 --model.vocab-size 448 --data.seq-len 16 --layout.tp 8 --layout.replicas 2 "
    "--train.global-batch 16 --train.memory-every 0 --train.steps 1000000 --train.timeout-s 300 --devices emulated "
    "--device.rate-tflops 2e-5 --device.curve ntp --device.max-power 1.25 --boost"
)
"""Heads and FFN blocks divide by 56: the most loaded survivor of 8 has 8/7 of the work."""


@pytest.mark.soak
@pytest.mark.process
def test_one_of_eight_is_hidden_by_the_papers_curve(live: Any) -> None:
    """Catches a boost that hides 1 of 8 on paper only: 2 x TP 8, 0.99 of the healthy rate within 15 steps, live."""

    def end(watch: Watch) -> None:
        watch.reached(LOST + 25, 600.0)
        os.kill(os.getpid(), signal.SIGINT)

    ran = live.train("paper", PAPER, [EVENTS[0]], alongside=end)
    assert ran.error is None
    rows = ran.watch.steps()
    assert {tuple(replica["num_samples"] for replica in row["replicas"]) for row in rows} == {(8, 8)}
    billed_s = [row["billed_s"] for row in rows]
    assert billed_s[LOST + 1] / billed_s[0] == pytest.approx(8 / 7, rel=0.01)
    assert billed_s[0] / max(billed_s[LOST + 15 :]) >= 0.99
    assert max(row["power"]["replicas"]["1"]["limit_w"] for row in rows) <= 1250.0
    assert ran.summary["emulated"]["valid"]
