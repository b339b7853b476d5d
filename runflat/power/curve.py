"""Speed against power limit: a piecewise log-linear curve, from a file of the user's or one of a few named ones.

No single exponent is right: published slopes d ln(speed) / d ln(power) near the limit run from 0.13 to 0.7. So the
curve is an input, named in each result, and results should be shown for more than one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from runflat.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PowerCurve:
    """Relative speed at relative power, straight between points in log-log scale, with the end slopes continued.

    Powers are fractions of a reference power (for the named curves the device's thermal design power), speeds are
    relative to any common speed: only ratios count.

    Raises:
        ConfigError: unless powers and speeds are positive, powers rise and speeds do not fall.
    """

    points: tuple[tuple[float, float], ...]
    name: str = "calibrated"
    source: str = ""
    """Who measured or published it."""
    knee: float | None = None
    """Power above which speed rises clearly less than power does."""
    ceiling: float | None = None
    """Power above which the clock does not rise any more: more watts give nothing."""
    formula: bool = False
    """Whether it is a law that holds anywhere, so that nothing is extrapolated."""

    def __post_init__(self) -> None:
        """Check the points."""
        if len(self.points) < 2:
            raise ConfigError(f"power curve {self.name!r} has {len(self.points)} points; a curve needs at least 2")
        for power, speed in self.points:
            if not (power > 0 and speed > 0 and math.isfinite(power) and math.isfinite(speed)):
                raise ConfigError(f"power curve {self.name!r}: point ({power}, {speed}) must have two numbers above 0")
        for (power, speed), (next_power, next_speed) in zip(self.points, self.points[1:], strict=False):
            if next_power <= power or next_speed < speed:
                raise ConfigError(
                    f"power curve {self.name!r}: after ({power}, {speed}) comes ({next_power}, {next_speed}); "
                    "powers must rise and speeds must not fall. Sort the points and average repeated measurements"
                )

    def speed(self, power: float) -> float:
        """Relative speed at a relative power above 0."""
        if self.ceiling is not None:
            power = min(power, self.ceiling)
        (p0, s0), slope = self._segment(power, by=0)
        return float(s0 * (power / p0) ** slope)

    def ratio(self, power: float, nominal: float) -> float:
        """How many times as fast a device is at ``power`` as at ``nominal`` (both relative powers)."""
        return self.speed(power) / self.speed(nominal)

    def power_for(self, ratio: float, nominal: float) -> float:
        """Least relative power at which a device is ``ratio`` times as fast as at ``nominal``; infinite if none."""
        wanted = ratio * self.speed(nominal)
        if self.ceiling is not None and wanted > self.speed(self.ceiling) * (1 + 1e-12):
            return math.inf
        (p0, s0), slope = self._segment(wanted, by=1)
        if slope == 0:
            return p0 if wanted <= s0 else math.inf
        return p0 * float((wanted / s0) ** (1 / slope))

    def extrapolated(self, power: float) -> bool:
        """Whether ``power`` lies beyond what was measured: there the end slope is only continued."""
        low, high = self.points[0][0], self.points[-1][0] if self.ceiling is None else math.inf
        return not self.formula and not low * (1 - 1e-9) <= power <= high * (1 + 1e-9)

    def label(self, *powers: float) -> str:
        """Its name, and whether one of ``powers`` is extrapolated: what every result says of its curve."""
        return f"{self.name} (extrapolated)" if any(self.extrapolated(power) for power in powers) else self.name

    def _segment(self, value: float, *, by: int) -> tuple[tuple[float, float], float]:
        """The point and log-log slope that hold at ``value`` of power (by 0) or speed (by 1)."""
        last = len(self.points) - 2
        index = next((i for i in range(last) if value <= self.points[i + 1][by]), last)
        (p0, s0), (p1, s1) = self.points[index : index + 2]
        return (p0, s0), math.log(s1 / s0) / math.log(p1 / p0)


def exponent_curve(exponent: float, name: str = "") -> PowerCurve:
    """The curve speed = power ** exponent, for exponents 0..2.

    Raises:
        ConfigError: if the exponent is outside.
    """
    if not 0 <= exponent <= 2:
        raise ConfigError(f"power exponent {exponent} is outside 0..2; published values lie between 0.13 and 1.2")
    label = name or f"exponent {exponent:g}"
    return PowerCurve(((0.5, 0.5**exponent), (1.0, 1.0)), label, "a law with one exponent", formula=True)


def amdahl_curve(scaled_share: float = 0.8, exponent: float = 0.65, name: str = "amdahl") -> PowerCurve:
    """A curve on which only a share of the step time scales with the clock; the rest (memory, waiting) does not.

    Args:
        scaled_share: Share 0..1 of the time at full power that scales.
        exponent: Slope of the clock against power.
        name: Name for tables.
    """
    powers = [0.5 + 0.05 * index for index in range(21)]
    times = [scaled_share / power**exponent + 1 - scaled_share for power in powers]
    points = tuple((power, 1 / time) for power, time in zip(powers, times, strict=True))
    return PowerCurve(points, name, f"a law: {scaled_share:g} of the time scales with power ** {exponent:g}")


def named_curves() -> Mapping[str, PowerCurve]:
    """The curves that a configuration may name.

    ``ntp``: the two published points of arXiv 2504.06095. ``v100-bert``, ``a40-bert``, ``rtx6000-bert``: measured on
    older cards. ``cube``: the cube law above the voltage knee. ``amdahl``: slope 0.65 on four fifths of the time.
    """
    text = resources.files(__package__).joinpath("curves.json").read_text(encoding="utf-8")
    measured = [_from_json(name, entry) for name, entry in json.loads(text).items()]
    cube = exponent_curve(1 / 3, "cube")
    return {curve.name: curve for curve in (*measured, cube, amdahl_curve())}


def _from_json(name: str, entry: Mapping[str, Any]) -> PowerCurve:
    points = tuple((float(power), float(speed)) for power, speed in entry["points"])
    return PowerCurve(points, name, entry.get("source", ""), entry.get("knee"), entry.get("ceiling"))


def curve_named(name: str) -> PowerCurve:
    """The named curve, ``exponent:0.4`` for a slope of one's own, or ``file:PATH``, as :func:`read_curve` reads it.

    The path of a file that ends in .json needs no ``file:``.

    Raises:
        ConfigError: for an unknown name, or a file that is no curve.
    """
    curves = named_curves()
    if name in curves:
        return curves[name]
    kind, _, value = name.partition(":")
    if kind == "exponent":
        try:
            return exponent_curve(float(value))
        except ValueError:
            raise ConfigError(
                f"power curve {name!r}: {value!r} is not a number; write for example exponent:0.4"
            ) from None
    if kind == "file" or name.endswith(".json"):
        return read_curve(Path(value if kind == "file" else name))
    raise ConfigError(f"unknown power curve {name!r}; allowed: {', '.join(curves)}, exponent:NUMBER or file:PATH")


def read_curve(path: Path) -> PowerCurve:
    """The curve in a JSON file: ``{"name", "source", "points": [[power, speed], ...], "knee", "ceiling"}``.

    Raises:
        ConfigError: it cannot be read, or is no curve.
    """
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        return _from_json(entry.get("name", path.stem), entry)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no power curve: {error}. A curve is a JSON object with 'points', a list of [power, speed], "
            "powers as fractions of the thermal design power"
        ) from None


def curve_to_json(curve: PowerCurve) -> dict[str, Any]:
    """What `read_curve` reads."""
    return {
        "name": curve.name,
        "source": curve.source,
        "points": [list(point) for point in curve.points],
        "knee": curve.knee,
        "ceiling": curve.ceiling,
    }
