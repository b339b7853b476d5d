"""A curve of speed against power from a job's own steps: limits go down from nominal, level by level.

    turn(state, seen, now) -> verdict      one decision, like `control.decide`: carry out its writes in order
    fit(levels, ...) -> Fit                the part of a step that scales with the clock, and the curve

Nothing is ever raised above nominal: what lies there is the curve's last slope, and marked as extrapolated where it is
used. Any trouble ends the walk at nominal.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from runflat.errors import PowerError
from runflat.power.account import digest
from runflat.power.control import PowerState, Verdict
from runflat.power.curve import PowerCurve
from runflat.power.views import DeviceView, Observation, Rules, Write

WARM_UP_STEPS = 5
"""Steps at the start of a run that are not measured."""
SETTLE_STEPS = 2
"""Steps after a limit was read back that are not measured: one of them began before it."""
LEAST_MOVE = 0.02
"""A clock, or a step's time, that moves by less than this part over all levels has not moved."""


@dataclass(frozen=True, slots=True)
class Level:
    """What was measured under one limit: median own time of a step, its spread (of the middle half), median clock."""

    limit_w: float
    own_s: float
    spread_s: float
    num_steps: int
    clock_mhz: float | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the walk is: levels done, and steps and clocks seen at the present one."""

    levels: tuple[Level, ...] = ()
    to_skip: int = WARM_UP_STEPS
    own_s: tuple[float, ...] = ()
    clocks_mhz: tuple[float, ...] = ()
    problem: str | None = None


class Walk:
    """The policy of a calibration, in place of that of a boost.

    Args:
        rules: Tolerances and times of the policy; its curve is not used.
        num_levels: Limits to measure, nominal among them; at least 2.
        lowest: The last one over nominal; not below what the site allows.
        level_steps: Steps that are measured at each.
    """

    def __init__(self, rules: Rules, num_levels: int, lowest: float, level_steps: int):
        self.progress = Progress()
        self._rules = rules
        self._num_levels, self._lowest, self._level_steps = num_levels, lowest, level_steps

    @property
    def is_done(self) -> bool:
        """Whether there is nothing more to measure, or nothing can be."""
        return self.progress.problem is not None or len(self.progress.levels) == self._num_levels

    def limit_w(self, device: DeviceView) -> float:
        """The limit that a device should have now."""
        levels = levels_w(device.nominal_w, device.min_w, self._num_levels, self._lowest)
        return device.nominal_w if self.is_done else levels[len(self.progress.levels)]

    def turn(self, state: PowerState, seen: Observation, now: float) -> Verdict:
        """The next step of the walk."""
        held, faults = digest(self._rules, state.held, seen, now)
        words: list[str] = []
        if not self.is_done:
            problem = _problem(seen, [reason for reasons in faults.values() for reason in reasons])
            self.progress = replace(self.progress, problem=problem)
            devices = [d for d in seen.devices if d.standing == "works"]
            in_place = [
                (known := held.get(d.name)) is not None
                and known.confirmed
                and abs(known.limit_w - self.limit_w(d)) <= self._rules.tolerance_w
                for d in devices
            ]
            if problem is not None:
                words.append(f"calibration ends, limits go back to nominal: {problem}")
            elif seen.own_s and all(in_place):
                words += self._measure(seen, devices)
        writes = []
        for device in seen.devices:
            known, limit_w = held.get(device.name), self.limit_w(device)
            if known is None or known.foreign or abs(known.limit_w - limit_w) <= self._rules.tolerance_w:
                continue
            held[device.name] = known.asked(limit_w, now)
            writes.append(Write(device.name, limit_w, "lower" if limit_w < known.limit_w else "restore"))
        return Verdict(replace(state, held=held), tuple(writes), tuple(words), done=self.is_done)

    def _measure(self, seen: Observation, devices: Sequence[DeviceView]) -> list[str]:
        """A step has ended under the limits of the present level."""
        progress = self.progress
        if progress.to_skip:
            self.progress = replace(progress, to_skip=progress.to_skip - 1)
            return []
        assert seen.own_s
        own_s = (*progress.own_s, statistics.median(seen.own_s.values()))
        found = [d.reading.clock_mhz for d in devices if d.reading is not None and d.reading.clock_mhz is not None]
        clocks_mhz = (*progress.clocks_mhz, *([statistics.median(found)] if found else []))
        if len(own_s) < self._level_steps:
            self.progress = replace(progress, own_s=own_s, clocks_mhz=clocks_mhz)
            return []
        first, middle, third = statistics.quantiles(own_s, n=4, method="inclusive")
        clock_mhz = statistics.median(clocks_mhz) if clocks_mhz else None
        level = Level(self.limit_w(devices[0]), middle, third - first, len(own_s), clock_mhz)
        self.progress = Progress((*progress.levels, level), SETTLE_STEPS)
        clock = "" if clock_mhz is None else f", clock {clock_mhz:.0f} MHz"
        number = len(self.progress.levels)
        return [f"level {number} of {self._num_levels}: {level.limit_w:.0f} W, {middle:.3f} s a step{clock}"]


def levels_w(nominal_w: float, min_w: float | None, num_levels: int, lowest: float) -> tuple[float, ...]:
    """Limits from nominal down to `lowest` times nominal, or to `min_w` where that is higher, evenly spaced."""
    end_w = max(lowest * nominal_w, min_w or nominal_w)
    return tuple(nominal_w + (end_w - nominal_w) * number / (num_levels - 1) for number in range(num_levels))


def _problem(seen: Observation, faults: Sequence[str]) -> str | None:
    """Why nothing can be measured, in words."""
    if seen.hit or seen.joining or any(device.standing != "works" for device in seen.devices if device.load):
        return "a device was lost, so that the job is not the one that was to be measured"
    return faults[0] if faults else None


@dataclass(frozen=True, slots=True)
class Fit:
    """What a step is made of at nominal: seconds that scale with the clock, and seconds that do not.

    `error` is the largest part by which a level differs from the fit. `by_clock` is False where devices do not tell
    their clock: then all of the step counts as scaling, which asks for rather too much power.
    """

    compute_s: float
    fixed_s: float
    error: float
    by_clock: bool
    curve: PowerCurve


def fit(levels: Sequence[Level], tdp_w: float, name: str, source: str) -> Fit:
    """Split the times of levels (nominal first) by t = compute x clock at nominal / clock + fixed, and make a curve.

    Args:
        levels: What was measured.
        tdp_w: Power that is 1.0 on the curve.
        name: Of the curve.
        source: Who measured what; the fit is added to it.

    Raises:
        PowerError: power makes no difference to this job in this range.
    """
    first = levels[0]
    if max(level.own_s for level in levels) < first.own_s * (1 + LEAST_MOVE):
        raise PowerError(
            f"between {levels[-1].limit_w:.0f} and {first.limit_w:.0f} W the power limit does not hold this job back: "
            f"its steps take the same time to {100 * LEAST_MOVE:.0f} %. A boost would give nothing here; measure lower "
            f"levels, or a larger job."
        )
    slow = [first.clock_mhz / level.clock_mhz for level in levels if level.clock_mhz and first.clock_mhz]
    by_clock = len(slow) == len(levels) and max(slow) > 1 + LEAST_MOVE
    fixed_s = _fixed_s(slow, [level.own_s for level in levels]) if by_clock else 0.0
    compute_s = first.own_s - fixed_s
    powers = [level.limit_w / tdp_w for level in reversed(levels)]
    speeds = _rising([compute_s / (level.own_s - fixed_s) for level in reversed(levels)])
    error = (
        max(
            (abs(compute_s * s + fixed_s - level.own_s) / level.own_s for s, level in zip(slow, levels, strict=True)),
            default=0.0,
        )
        if by_clock
        else 0.0
    )
    split = f"{compute_s:.4f} s of a step scale with the clock, {fixed_s:.4f} s do not"
    if not by_clock:
        split = f"all {compute_s:.4f} s of a step are taken to scale, for the clock is not known"
    curve = PowerCurve(tuple(zip(powers, speeds, strict=True)), name, f"{source}; {split}")
    return Fit(compute_s, fixed_s, error, by_clock, curve)


def _fixed_s(slow: Sequence[float], own_s: Sequence[float]) -> float:
    """Seconds that do not scale: where the line of least squares through (slow-down, seconds) meets 0."""
    slope, at_zero_s = statistics.linear_regression(slow, own_s)
    return min(max(at_zero_s, 0.0), 0.95 * min(own_s))


def _rising(values: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls: neighbours in the wrong order share their mean."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, num_low), (high, num_high) = pools[-2:]
            pools[-2:] = [((low * num_low + high * num_high) / (num_low + num_high), num_low + num_high)]
    return [value for value, num in pools for _ in range(num)]
