"""A calibration through the controller: limits walk down, the curve comes out, limits are nominal however it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from powered_job import LINEAR, NOMINAL_W, STEP_S, Job

from runflat.elastic.fake_launcher import Fault
from runflat.power.calibrate import Walk, fit
from runflat.power.curve import curve_named
from runflat.power.views import Rules

FACTS: dict[str, Any] = {"tp": 4, "replicas": 2, "units": 12, "max_w": NOMINAL_W, "min_w": 700.0, "raises": False}
LEVELS = 4


def walk() -> Walk:
    return Walk(Rules(curve=LINEAR, tdp_w=NOMINAL_W), LEVELS, lowest=0.7, level_steps=6)


@pytest.mark.parametrize(("name", "fixed_s"), [("ntp", 0.0), ("cube", 0.1), ("v100-bert", 0.05)])
def test_the_curve_that_devices_follow_comes_out(tmp_path: Path, name: str, fixed_s: float) -> None:
    """Catches a level measured before its limit is in force, and seconds that are counted on the wrong side."""
    curve, mine = curve_named(name), walk()
    job = Job(tmp_path, **FACTS, curve=curve, fixed_s=fixed_s, policy=mine.turn, steps=200)
    job.run()
    assert len(job.steps()) < 80  # it ends with the walk
    assert [level.limit_w for level in mine.progress.levels] == pytest.approx([1000.0, 900.0, 800.0, 700.0])
    found = fit(mine.progress.levels, NOMINAL_W, "mine", "a test")
    assert found.by_clock
    assert found.compute_s == pytest.approx(STEP_S, rel=0.01)
    assert found.fixed_s == pytest.approx(fixed_s, abs=0.004)
    for power in (0.7, 0.8, 0.9):
        assert found.curve.ratio(power, 1.0) == pytest.approx(curve.ratio(power, 1.0), rel=0.01)
    assert set(job.limits_w().values()) == {NOMINAL_W}


def test_a_loss_ends_it_at_nominal(tmp_path: Path) -> None:
    """Catches a curve from steps of different plans, and a job that stays slowed."""
    mine = walk()
    lost = (Fault("kill", "1:2", "forward", 16),)
    job = Job(tmp_path, **FACTS, curve=LINEAR, policy=mine.turn, steps=200, faults=lost)
    job.run()
    assert mine.progress.problem is not None
    assert "a device was lost" in mine.progress.problem
    assert len(job.steps()) < 30
    assert {limit for name, limit in job.limits_w().items() if name != "1:2"} == {NOMINAL_W}


@pytest.mark.parametrize(("trouble", "words"), [("foreign", "somebody else"), ("deaf", "are read back")])
def test_trouble_ends_it_at_nominal(tmp_path: Path, trouble: str, words: str) -> None:
    """Catches levels that were never in force, and another writer who is fought."""
    mine = walk()

    def meddle(job: Job) -> None:
        device = job.backend.devices["0:1"]
        if job.controller.state.committed < 3:
            job.launcher.later(STEP_S, lambda: meddle(job))
        elif trouble == "foreign":
            device.limit_w = 820.0
        else:
            device.deaf = True

    job = Job(tmp_path, **FACTS, curve=LINEAR, policy=mine.turn, steps=200, act=meddle)
    job.run()
    assert mine.progress.problem is not None
    assert words in mine.progress.problem
    assert len(mine.progress.levels) < LEVELS
    others = {limit for name, limit in job.limits_w().items() if name != "0:1"}
    assert others == {NOMINAL_W}
