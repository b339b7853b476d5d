import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runflat.errors import ConfigError
from runflat.power.control import PowerLimits, static_boost
from runflat.power.curve import PowerCurve, curve_named, exponent_curve, named_curves


def test_published_points_lie_on_the_curves() -> None:
    """Catches an exponent or interpolation that no longer gives the published points."""
    ntp = curve_named("ntp")
    assert ntp.ratio(1.1, 1.0) == pytest.approx(1.069, abs=0.006)
    assert ntp.ratio(1.2, 1.0) == pytest.approx(1.122, abs=0.006)
    bert = curve_named("v100-bert")
    assert bert.speed(0.8) == pytest.approx(0.94)
    assert curve_named("cube").ratio(1.3, 1.0) == pytest.approx(1.0914, abs=1e-3)


@given(st.sampled_from(sorted(named_curves())), st.floats(0.4, 1.4), st.floats(1.0, 1.3))
def test_power_for_a_ratio_gives_that_ratio(name: str, nominal: float, ratio: float) -> None:
    """Catches an inverse that does not fit its curve, at a bend or beyond the ends."""
    curve = curve_named(name)
    power = curve.power_for(ratio, nominal)
    assert math.isinf(power) or curve.ratio(power, nominal) == pytest.approx(ratio, rel=1e-9)
    assert power >= nominal * (1 - 1e-9)


def test_a_flat_end_cannot_be_outrun() -> None:
    """Catches a division by a slope of zero."""
    flat = PowerCurve(((0.5, 0.8), (0.9, 1.0), (1.0, 1.0)))
    assert math.isinf(flat.power_for(1.05, 0.95))


@pytest.mark.parametrize(
    "points", [((1.0, 1.0),), ((0.5, 0.5), (0.5, 0.6)), ((0.5, 0.6), (1.0, 0.5)), ((0.0, 0.5), (1.0, 1.0))]
)
def test_impossible_curves_are_refused(points: tuple[tuple[float, float], ...]) -> None:
    """Catches a calibration file that would turn more power into less speed."""
    with pytest.raises(ConfigError, match="power curve"):
        PowerCurve(points)


@pytest.mark.parametrize("name", ["magic", "exponent:lots", "exponent:9"])
def test_unknown_curves_are_named(name: str) -> None:
    """Catches a mistyped curve that falls back to another."""
    with pytest.raises(ConfigError):
        curve_named(name)


LIMITS = PowerLimits(curve=exponent_curve(0.65), tdp_w=1200, nominal_w=960, max_w=1200)


def test_boost_takes_the_least_power_that_hides_the_loss() -> None:
    """Catches survivors that are raised to the maximum for nothing: 1 of 8 needs 1.143x speed, 1.23x power."""
    boost = static_boost(LIMITS, 8 / 7, num_raised=7, num_live=7, num_dead=1)
    assert boost.limited_by == "need"
    assert boost.limit_w / 960 == pytest.approx(1.228, abs=1e-3)
    assert boost.speed == pytest.approx(8 / 7)


def test_boost_stops_at_device_and_domain_limits() -> None:
    """Catches a limit above the range or the budget."""
    steep = static_boost(LIMITS, 2.0, num_raised=4, num_live=4, num_dead=4)
    assert (steep.limit_w, steep.limited_by) == (1200, "device")
    tight = PowerLimits(curve=LIMITS.curve, tdp_w=1200, nominal_w=960, max_w=1200, domain_budget_w=8 * 960 + 140)
    boost = static_boost(tight, 8 / 7, num_raised=7, num_live=7, num_dead=1)
    assert (boost.limit_w, boost.limited_by) == (pytest.approx(980), "domain")
    freed = PowerLimits(
        curve=LIMITS.curve, tdp_w=1200, nominal_w=960, max_w=1200, domain_budget_w=8 * 960, dead_count=False
    )
    assert static_boost(freed, 8 / 7, num_raised=7, num_live=7, num_dead=1).limit_w == pytest.approx(960 * 8 / 7)


@given(st.floats(0.9, 3.0), st.integers(1, 71), st.floats(60_000, 90_000))
def test_the_sum_of_limits_never_exceeds_the_budget(wanted: float, dead: int, budget_w: float) -> None:
    """Catches a domain that draws more than its feed."""
    limits = PowerLimits(curve=LIMITS.curve, tdp_w=1200, nominal_w=800, max_w=1200, domain_budget_w=budget_w)
    boost = static_boost(limits, wanted, num_raised=72 - dead, num_live=72 - dead, num_dead=dead)
    total_w = boost.limit_w * (72 - dead) + 800 * dead
    assert total_w <= max(budget_w, 72 * 800) * (1 + 1e-12)
    assert 800 <= boost.limit_w <= 1200


def test_no_headroom_is_said_and_changes_nothing() -> None:
    """Catches a boost where nominal is already the maximum."""
    full = PowerLimits(curve=LIMITS.curve, tdp_w=700, nominal_w=700, max_w=700)
    assert full.headroom == 1.0
    assert static_boost(full, 1.2, num_raised=7, num_live=7, num_dead=1).speed == 1.0
    with pytest.raises(ConfigError, match="nominal"):
        PowerLimits(curve=LIMITS.curve, tdp_w=700, nominal_w=701, max_w=700)
