"""Speed against power limit: a piecewise log-linear curve, calibrated by the user or one of four named ones.

No single exponent is right: published slopes d ln(speed) / d ln(power) near the limit run from 0.13 to 0.7. So the
curve is an input, printed in each result, and results should be shown for more than one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
        (p0, s0), slope = self._segment(power, by=0)
        return float(s0 * (power / p0) ** slope)

    def ratio(self, power: float, nominal: float) -> float:
        """How many times as fast a device is at ``power`` as at ``nominal`` (both relative powers)."""
        return self.speed(power) / self.speed(nominal)

    def power_for(self, ratio: float, nominal: float) -> float:
        """Least relative power at which a device is ``ratio`` times as fast as at ``nominal``; infinite if flat."""
        wanted = ratio * self.speed(nominal)
        (p0, s0), slope = self._segment(wanted, by=1)
        if slope == 0:
            return p0 if wanted <= s0 else math.inf
        return p0 * float((wanted / s0) ** (1 / slope))

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
    return PowerCurve(((0.5, 0.5**exponent), (1.0, 1.0)), name or f"exponent {exponent:g}")


def amdahl_curve(scaled_share: float = 0.8, exponent: float = 0.65, name: str = "amdahl") -> PowerCurve:
    """A curve on which only a share of the step time scales with the clock; the rest (memory, waiting) does not.

    Args:
        scaled_share: Share 0..1 of the time at full power that scales.
        exponent: Slope of the clock against power.
        name: Name for tables.
    """
    powers = [0.5 + 0.05 * index for index in range(21)]
    times = [scaled_share / power**exponent + 1 - scaled_share for power in powers]
    return PowerCurve(tuple((power, 1 / time) for power, time in zip(powers, times, strict=True)), name)


def named_curves() -> Mapping[str, PowerCurve]:
    """The curves that a configuration may name.

    ``v100-bert``: BERT on V100, from published traces of Zeus (NSDI'23), and typical of parts near their clock ceiling.
    ``ntp``: slope 0.65, between the two points of arXiv 2504.06095 Table 1 (1.1x power: 1.069x speed, 1.2x: 1.122x).
    ``cube``: the cube law above the voltage knee. ``amdahl``: slope 0.65 on four fifths of the time.
    """
    bert: Sequence[tuple[float, float]] = ((0.5, 0.62), (0.6, 0.76), (0.7, 0.87), (0.8, 0.94), (0.9, 0.977), (1.0, 1.0))
    curves = (
        PowerCurve(tuple(bert), "v100-bert"),
        exponent_curve(0.65, "ntp"),
        exponent_curve(1 / 3, "cube"),
        amdahl_curve(),
    )
    return {curve.name: curve for curve in curves}


def curve_named(name: str) -> PowerCurve:
    """The named curve, or ``exponent:0.4`` for a slope of one's own.

    Raises:
        ConfigError: for an unknown name.
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
    raise ConfigError(f"unknown power curve {name!r}; allowed: {', '.join(curves)}, or exponent:NUMBER")
