"""What power can hide, without time: least limits, ranges, budgets."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runflat.errors import ConfigError
from runflat.power.curve import curve_named, exponent_curve
from runflat.power.reach import Need, PowerLimits, Room, reach

CURVE = exponent_curve(0.65)
LIMITS = PowerLimits(curve=CURVE, tdp_w=1200, nominal_w=960, max_w=1200)


def test_boost_takes_the_least_power_that_hides_the_loss() -> None:
    """Catches survivors that are raised to the maximum for nothing: 1 of 8 needs 1.143x speed, 1.23x power."""
    found = LIMITS.reach([(8 / 7, 7)], num_dead=1)
    assert (found.limited_by, found.pace) == ("need", 1.0)
    assert found.limits_w[0] / 960 == pytest.approx(1.228, abs=1e-3)
    assert LIMITS.speed(found.limits_w[0]) == pytest.approx(8 / 7)


def test_boost_stops_at_device_and_domain_limits() -> None:
    """Catches a limit above the range or the budget."""
    steep = LIMITS.reach([(2.0, 4)], num_dead=4)
    assert steep.limited_by == "device"
    assert steep.limits_w[0] == pytest.approx(1200)
    tight = PowerLimits(curve=CURVE, tdp_w=1200, nominal_w=960, max_w=1200, domain_budget_w=8 * 960 + 140)
    found = tight.reach([(8 / 7, 7)], num_dead=1)
    assert (found.limits_w[0], found.limited_by) == (pytest.approx(980), "domain")
    freed = PowerLimits(curve=CURVE, tdp_w=1200, nominal_w=960, max_w=1200, domain_budget_w=8 * 960, dead_count=False)
    assert freed.reach([(8 / 7, 7)], num_dead=1).limits_w[0] == pytest.approx(960 * 8 / 7)


def test_only_the_most_loaded_devices_get_more() -> None:
    """Catches one limit for all of a replica: 64 heads over 7 leave one device with 10, the others with 9."""
    found = LIMITS.reach([(10 / 9, 1), (1.0, 6)])
    assert found.limits_w[0] > 960
    assert found.limits_w[1] == 960


def test_nobody_gets_more_than_the_slowest_allows() -> None:
    """Catches watts for devices that then wait: one device at its ceiling sets the pace of all."""
    needs = [Need(1.2, 1000, 1050), Need(1.2, 1000, 1500), Need(1.1, 1000, 1500)]
    found = reach(CURVE, 1000, needs)
    speeds = [CURVE.ratio(limit / 1000, 1.0) for limit in found.limits_w]
    assert found.limits_w[0] == pytest.approx(1050)
    assert speeds[1] == pytest.approx(speeds[0])
    assert found.limits_w[2] == 1000  # 1.1 times the pace of the slowest is below what it does anyway


@given(st.floats(0.9, 3.0), st.integers(1, 71), st.floats(60_000, 90_000))
def test_the_sum_of_limits_never_exceeds_the_budget(wanted: float, dead: int, budget_w: float) -> None:
    """Catches a domain that draws more than its feed."""
    limits = PowerLimits(curve=CURVE, tdp_w=1200, nominal_w=800, max_w=1200, domain_budget_w=budget_w)
    found = limits.reach([(wanted, 72 - dead)], num_dead=dead)
    total_w = found.limits_w[0] * (72 - dead) + 800 * dead
    assert total_w <= max(budget_w, 72 * 800) * (1 + 1e-9)
    assert 800 <= found.limits_w[0] <= 1200 * (1 + 1e-9)


@given(
    st.lists(st.tuples(st.floats(0.8, 1.6), st.floats(1000, 1400)), min_size=1, max_size=6),
    st.floats(900, 9000),
    st.sampled_from(["ntp", "cube", "a40-bert", "v100-bert"]),
)
def test_limits_are_the_least_of_the_pace_that_is_reached(
    pairs: list[tuple[float, float]], watts: float, name: str
) -> None:
    """Catches a pace that is not reached, one that could be higher, and a device beyond its range."""
    curve = curve_named(name)
    needs = [Need(speed, 1000, max_w) for speed, max_w in pairs]
    room = Room(max(watts, 1000.0 * len(needs)), frozenset(range(len(needs))))
    found = reach(curve, 1000, needs, [room])
    speeds = [curve.ratio(limit / 1000, 1.0) for limit in found.limits_w]
    assert all(s >= need.speed * found.pace * (1 - 1e-6) for s, need in zip(speeds, needs, strict=True))
    assert all(1000 <= w <= need.max_w * (1 + 1e-6) for w, need in zip(found.limits_w, needs, strict=True))
    assert sum(found.limits_w) <= room.watts * (1 + 1e-6)
    if found.pace < 1 - 1e-6:
        more = [max(curve.power_for(need.speed * found.pace * 1.001, 1.0) * 1000, 1000) for need in needs]
        assert sum(more) > room.watts or any(w > need.max_w for w, need in zip(more, needs, strict=True))


def test_it_says_what_it_cannot_hide_and_by_how_much() -> None:
    """Catches a silent shortfall: the cube law at 1.3x power gives 1.091x of the 1.143x that 1 of 8 takes."""
    cube = PowerLimits(curve=curve_named("cube"), tdp_w=1000, nominal_w=1000, max_w=1300)
    text = cube.describe(cube.reach([(8 / 7, 7)]), 8 / 7, 1, 8)
    assert "cannot hide 1 of 8 with curve cube and 1.30x power: 1.091x of the 1.143x" in text
    assert f"{100 * (8 / 7 / 1.3 ** (1 / 3) - 1):.1f} % slower" in text
    paper = PowerLimits(curve=curve_named("ntp"), tdp_w=1000, nominal_w=1000, max_w=1250)
    assert "hides 1 of 8 with 1.24x power (curve ntp (extrapolated))" in paper.describe(
        paper.reach([(8 / 7, 7)]), 8 / 7, 1, 8
    )


def test_no_headroom_is_said_and_changes_nothing() -> None:
    """Catches a boost where nominal is already the maximum."""
    full = PowerLimits(curve=CURVE, tdp_w=700, nominal_w=700, max_w=700)
    assert full.headroom == 1.0
    found = full.reach([(1.2, 7)])
    assert found.limits_w == (700,)
    assert found.pace == pytest.approx(1 / 1.2)
    with pytest.raises(ConfigError, match="nominal"):
        PowerLimits(curve=CURVE, tdp_w=700, nominal_w=701, max_w=700)
    assert math.isinf(curve_named("a40-bert").power_for(2.0, 0.5))
