"""The static rule: how much power survivors of a hit domain may get, and how fast that makes them.

Only devices of the hit group are raised, within the device's range and the domain's budget; what power cannot hide is
left to the batch split.
"""

from __future__ import annotations

from dataclasses import dataclass

from runflat.errors import ConfigError
from runflat.power.curve import PowerCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerLimits:
    """Limits of one device type and of the domain that it sits in; powers in watts.

    Raises:
        ConfigError: if the range is empty or the budget does not cover the nominal limits.
    """

    curve: PowerCurve
    tdp_w: float
    """Power that is 1.0 on the curve."""
    nominal_w: float
    """Limit in health; headroom exists only if it is below ``max_w``."""
    max_w: float
    """Highest limit that the device and the site allow."""
    domain_budget_w: float | None = None
    """Sum of limits that the domain may reach; None if only the device limits count."""
    dead_count: bool = True
    """Whether a dead device keeps its nominal watts booked (until it is confirmed off)."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 0 < self.nominal_w <= self.max_w:
            raise ConfigError(
                f"power: nominal limit {self.nominal_w} W must be above 0 and at most the maximum {self.max_w} W"
            )

    @property
    def headroom(self) -> float:
        """Highest over nominal limit; 1.0 means that there is nothing to boost with."""
        return self.max_w / self.nominal_w


@dataclass(frozen=True, slots=True)
class Boost:
    """Limit of each survivor of a hit group, and how many times as fast it is as at the nominal limit."""

    limit_w: float
    speed: float
    limited_by: str
    """``need`` if the wanted speed is reached, else ``device`` or ``domain``."""


def static_boost(limits: PowerLimits, speed_wanted: float, *, num_raised: int, num_live: int, num_dead: int) -> Boost:
    """The least limit that gives the survivors ``speed_wanted``, or the highest that is allowed.

    Args:
        limits: Range, curve and budget.
        speed_wanted: Speed over nominal speed that would hide the loss; at most 1 means that none is needed.
        num_raised: Devices to be raised in the domain.
        num_live: Live devices of the domain, the raised ones included; the others stay at nominal.
        num_dead: Dead devices of the domain; they count at nominal power where the limits say so.

    Returns:
        A limit within device range and domain budget; never below nominal.
    """
    nominal = limits.nominal_w
    if speed_wanted <= 1 or num_raised == 0:
        return Boost(nominal, 1.0, "need")
    wanted_w = limits.curve.power_for(speed_wanted, nominal / limits.tdp_w) * limits.tdp_w
    allowed_w, limited_by = limits.max_w, "device"
    if limits.domain_budget_w is not None:
        others = num_live - num_raised + (num_dead if limits.dead_count else 0)
        share_w = max((limits.domain_budget_w - others * nominal) / num_raised, nominal)
        if share_w < allowed_w:
            allowed_w, limited_by = share_w, "domain"
    if wanted_w <= allowed_w:
        return Boost(max(wanted_w, nominal), speed_wanted, "need")
    return Boost(allowed_w, limits.curve.ratio(allowed_w / limits.tdp_w, nominal / limits.tdp_w), limited_by)
