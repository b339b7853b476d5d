import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runflat.errors import ConfigError
from runflat.power.curve import PowerCurve, curve_named, curve_to_json, named_curves


def test_published_points_lie_on_the_curves() -> None:
    """Catches an interpolation that no longer gives the published points, or continues them unmarked."""
    ntp = curve_named("ntp")
    assert ntp.ratio(1.1, 1.0) == pytest.approx(1.069)
    assert ntp.ratio(1.2, 1.0) == pytest.approx(1.122)
    last = math.log(1.122 / 1.069) / math.log(1.2 / 1.1)
    assert ntp.ratio(1.25, 1.2) == pytest.approx((1.25 / 1.2) ** last)
    assert ntp.label(1.0, 1.2) == "ntp"
    assert ntp.label(1.0, 1.24) == "ntp (extrapolated)"
    assert curve_named("v100-bert").speed(0.8) == pytest.approx(0.937)
    assert curve_named("cube").ratio(1.3, 1.0) == pytest.approx(1.0914, abs=1e-3)
    assert curve_named("cube").label(3.0) == "cube"


def test_watts_beyond_the_clock_ceiling_buy_nothing() -> None:
    """Catches a slope that is continued where the clock does not rise any more."""
    a40 = curve_named("a40-bert")
    assert a40.speed(1.2) == a40.speed(0.9167) == pytest.approx(1.0)
    assert math.isinf(a40.power_for(1.01, 0.9167))
    assert not a40.extrapolated(1.2)


def test_each_measured_curve_says_where_it_comes_from() -> None:
    """Catches a curve without a source, which nobody could check."""
    assert all(curve.source for curve in named_curves().values())
    assert {name for name, curve in named_curves().items() if curve.knee} == {"v100-bert", "a40-bert", "rtx6000-bert"}


def test_a_curve_comes_back_from_its_file(tmp_path: Path) -> None:
    """Catches a calibration that cannot be used, and a file that is no curve and passes for one."""
    path = tmp_path / "mine.json"
    for curve in named_curves().values():
        path.write_text(json.dumps(curve_to_json(curve)))
        again = curve_named(f"file:{path}")
        assert (again.points, again.name, again.ceiling) == (curve.points, curve.name, curve.ceiling)
    for text in ("", "[]", '{"points": 3}', '{"points": [[1, 1]]}', '{"points": [[1, "x"], [2, 3]]}'):
        path.write_text(text)
        with pytest.raises(ConfigError):
            curve_named(f"file:{path}")


@given(st.sampled_from(sorted(named_curves())), st.floats(0.4, 1.4), st.floats(1.0, 1.3))
def test_power_for_a_ratio_gives_that_ratio(name: str, nominal: float, ratio: float) -> None:
    """Catches an inverse that does not fit its curve, at a bend or beyond the ends."""
    curve = curve_named(name)
    power = curve.power_for(ratio, nominal)
    assert math.isinf(power) or curve.ratio(power, nominal) == pytest.approx(ratio, rel=1e-9)
    assert power >= min(nominal, curve.ceiling or math.inf) * (1 - 1e-9)


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
