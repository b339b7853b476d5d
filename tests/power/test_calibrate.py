"""From measured levels to a curve: what scales with the clock, what does not, and what cannot be told."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from runflat.commands.power_calibrate import _record
from runflat.errors import PowerError
from runflat.power.calibrate import Level, fit, levels_w
from runflat.power.curve import PowerCurve, curve_named

NOMINAL_W = 960.0


def measured(curve: PowerCurve, compute_s: float, fixed_s: float, noise: float = 0.0, seed: int = 0) -> list[Level]:
    """Levels of a job on devices that follow `curve`, each the median of 20 steps that differ by `noise`."""
    rng = random.Random(seed)
    levels = []
    for limit_w in levels_w(NOMINAL_W, 0.7 * NOMINAL_W, 4, 0.7):
        speed = curve.ratio(limit_w / NOMINAL_W, 1.0)
        own_s = [(compute_s / speed + fixed_s) * (1 + rng.gauss(0, noise)) for _ in range(20)]
        levels.append(Level(limit_w, statistics.median(own_s), 0.0, 20, 1500 * speed))
    return levels


@pytest.mark.parametrize("name", ["ntp", "cube", "v100-bert", "a40-bert", "rtx6000-bert"])
@pytest.mark.parametrize("fixed_s", [0.0, 0.1])
def test_a_known_curve_is_found(name: str, fixed_s: float) -> None:
    """Catches seconds on the wrong side, speeds over the wrong power, a curve upside down."""
    curve = curve_named(name)
    found = fit(measured(curve, 0.4, fixed_s), NOMINAL_W, "mine", "a test")
    assert (found.compute_s, found.fixed_s) == (pytest.approx(0.4), pytest.approx(fixed_s, abs=1e-6))
    assert found.error < 1e-9
    for power in (0.7, 0.75, 0.8, 0.9, 1.0):
        tolerance = 1e-9 if power in (0.7, 0.8, 0.9) else 0.01  # between levels the curve is a straight line
        assert found.curve.ratio(power, 1.0) == pytest.approx(curve.ratio(power, 1.0), rel=tolerance)
    assert found.curve.extrapolated(1.1)


def test_noise_stays_small() -> None:
    """Catches a fit that amplifies noise: steps differ by 2 % (one standard deviation), 20 of them at each level."""
    curve = curve_named("ntp")
    worst = 0.0
    for seed in range(50):
        found = fit(measured(curve, 0.4, 0.1, noise=0.02, seed=seed), NOMINAL_W, "mine", "a test")
        worst = max(worst, abs(found.curve.ratio(0.7, 1.0) / curve.ratio(0.7, 1.0) - 1))
    assert worst < 0.02


def test_without_a_clock_all_of_a_step_is_taken_to_scale() -> None:
    """Catches an invented split; the curve must ask for rather too much power than too little."""
    curve = curve_named("ntp")
    blind = [replace(level, clock_mhz=None) for level in measured(curve, 0.4, 0.1)]
    found = fit(blind, NOMINAL_W, "mine", "a test")
    assert (found.by_clock, found.fixed_s) == (False, 0.0)
    assert "the clock is not known" in found.curve.source
    assert found.curve.power_for(8 / 7, 1.0) > curve.power_for(8 / 7, 1.0)
    stuck = [replace(level, clock_mhz=1410.0) for level in measured(curve, 0.4, 0.1)]
    assert fit(stuck, NOMINAL_W, "mine", "a test").curve.points == found.curve.points


def test_a_limit_that_binds_nothing_is_said() -> None:
    """Catches a flat curve, with which every boost would be declared useless, or possible."""
    flat = PowerCurve(((0.5, 1.0), (1.0, 1.0)))
    with pytest.raises(PowerError, match="does not hold this job back"):
        fit(measured(flat, 0.4, 0.1), NOMINAL_W, "mine", "a test")


def test_speeds_never_fall() -> None:
    """Catches a curve that is refused because two levels came out in the wrong order."""
    levels = measured(curve_named("cube"), 0.4, 0.0)
    levels[1] = replace(levels[1], own_s=levels[0].own_s * 0.99)
    speeds = [speed for _, speed in fit(levels, NOMINAL_W, "mine", "a test").curve.points]
    assert speeds == sorted(speeds)


def test_the_file_is_a_curve_that_a_run_takes(tmp_path: Path) -> None:
    """Catches a file that --power.curve refuses, or that has lost where it comes from."""
    levels = tuple(measured(curve_named("ntp"), 0.4, 0.1))
    found = fit(levels, NOMINAL_W, "mine", "a test")
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(_record(found, levels)))
    again = curve_named(str(path))
    assert again == curve_named(f"file:{path}")
    assert again.points == found.curve.points
    assert again.source.startswith("a test; 0.4")
