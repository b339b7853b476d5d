"""What the policy sees and says: rules, devices, readings, budgets, writes. Powers in watts, times in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from runflat.power.curve import PowerCurve

IDLE_POWER = 0.25
"""Draw of a device that waits or is unused, as a share of its nominal limit (the share of a working one is 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Curve and settings of the policy."""

    curve: PowerCurve
    tdp_w: float
    """Power that is 1.0 on the curve."""
    step_w: float = 50.0
    """Most by which one write raises a limit."""
    tolerance_w: float = 1.0
    """Limits this close are the same."""
    dead_band_w: float = 10.0
    """A limit above nominal is only lowered for more than this."""
    dead_band: float = 0.01
    """Steps that differ by less than this part are equal."""
    trim_steps: int = 20
    """Steps under settled limits whose median decides on a trim."""
    confirm_s: float = 5.0
    """How long a write may take to be read back."""
    stale_s: float = 10.0
    """Readings older than this are no readings."""
    hold_off_s: float = 60.0
    """After a return to nominal nothing is raised for this long; doubles each time in a row."""
    hold_margin_c: float = 5.0
    """No raise with less thermal margin than this."""
    drop_margin_c: float = 2.0
    """Nominal with less."""
    save: bool = False
    """Whether healthy replicas are slowed to the pace of one that stays slower all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What was read of a device: the limit asked for, and the one in force after all limiters."""

    at: float
    requested_w: float
    enforced_w: float
    draw_w: float | None = None
    clock_mhz: float | None = None
    margin_c: float | None = None
    """Kelvin to the thermal limit; None if the device does not say."""
    alarm: str = ""
    """Why the hardware slowed down (heat, power brake); empty if it did not."""
    lost: bool = False
    """The driver has lost the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """One device: where it is, what it has to do in a step, its range, and the newest reading."""

    name: str
    replica: int | None
    standing: Literal["works", "dead", "off"]
    """dead: counts at its limit until it is confirmed off."""
    nominal_w: float
    """The limit that was read before anything was written."""
    max_w: float
    min_w: float | None = None
    load: float = 0.0
    """Work in a step, in a unit that all devices share."""
    reading: Sample | None = None

    def cool(self, rules: Rules) -> bool:
        """Whether it has the thermal margin for a raise."""
        margin_c = self.reading.margin_c if self.reading else None
        return margin_c is None or margin_c >= rules.hold_margin_c


@dataclass(frozen=True, slots=True)
class Budget:
    """Watts that the limits of some devices may add up to: a domain's feed, or a superchip's module."""

    name: str
    watts: float
    members: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """All that the policy looks at."""

    devices: tuple[DeviceView, ...]
    full_load: float
    """Work of the most loaded device of a replica in health."""
    hit: frozenset[int] = frozenset()
    """Replicas that work at a reduced degree."""
    joining: frozenset[int] = frozenset()
    """Replicas that a device is about to join: they go to nominal before it draws."""
    budgets: tuple[Budget, ...] = ()
    own_s: Mapping[int, float] | None = None
    """A step has ended: each replica's own time up to the gradient sync. None between steps."""

    @cached_property
    def by_name(self) -> Mapping[str, DeviceView]:
        """Devices by name."""
        return {device.name: device for device in self.devices}


@dataclass(frozen=True, slots=True)
class Write:
    """Set the limit of a device, in watts; `why` is for the log."""

    device: str
    limit_w: float
    why: str


@dataclass(frozen=True, slots=True)
class Block:
    """A replica stays at nominal `until` then, for `reason`, for the `times`-th time in a row."""

    until: float
    reason: str
    times: int = 1
