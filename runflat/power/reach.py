"""How far power goes: the least limits that give each survivor the speed its load asks for, within range and budgets.

The one place where the runtime, its planner and the simulator learn what a boost can hide. No time passes here; how
limits are brought there step by step is `control`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runflat.errors import ConfigError
from runflat.power.curve import PowerCurve

BISECTIONS = 40
"""Halvings of the interval in which the reachable pace lies: exact to 1e-12."""


@dataclass(frozen=True, slots=True)
class Need:
    """One device, or `num` alike: speed that it should have over its speed at the nominal limit; powers in watts."""

    speed: float
    nominal_w: float
    max_w: float
    num: int = 1
    min_w: float | None = None
    """Lowest limit that may be set; None if it is not to go below nominal."""


@dataclass(frozen=True, slots=True)
class Room:
    """Watts that the devices `members` (indexes of needs) may have together: a domain, or a superchip's module."""

    watts: float
    members: frozenset[int]
    name: str = "domain"
    """``domain`` or ``module``."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Limits in watts, one for each need, and the part of the wanted pace that all of them reach together."""

    limits_w: tuple[float, ...]
    pace: float
    """1.0 if every need is met; all devices of a replica wait for its slowest, so the least one counts."""
    limited_by: str
    """``need`` if the wanted speeds are reached, else ``device``, ``domain`` or ``module``."""


def reach(curve: PowerCurve, tdp_w: float, needs: Sequence[Need], rooms: Sequence[Room] = ()) -> Reach:
    """The least limits that meet ``needs``; where they are out of reach, those of the highest common pace.

    Nobody gets more than its own need at the pace that the group reaches: a device that waits wastes its watts.

    Args:
        curve: Speed against power.
        tdp_w: Power that is 1.0 on the curve.
        needs: The devices that are to be set.
        rooms: Budgets, less what all other devices in them hold.
    """
    if not needs:
        return Reach((), 1.0, "need")

    def limits(pace: float) -> tuple[float, ...]:
        return tuple(_limit(curve, tdp_w, need, pace) for need in needs)

    def fault(found: Sequence[float]) -> str | None:
        if any(limit > need.max_w * (1 + 1e-12) for limit, need in zip(found, needs, strict=True)):
            return "device"
        for room in rooms:
            if sum(found[i] * needs[i].num for i in room.members) > room.watts * (1 + 1e-12):
                return room.name
        return None

    wanted = limits(1.0)
    limited_by = fault(wanted)
    if limited_by is None:
        return Reach(wanted, 1.0, "need")
    low, high = min(1.0, *(1 / need.speed for need in needs)), 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        reason = fault(limits(middle))
        if reason is None:
            low = middle
        else:
            high, limited_by = middle, reason
    within = tuple(min(limit, need.max_w) for limit, need in zip(limits(low), needs, strict=True))
    return Reach(within, low, limited_by)


def _limit(curve: PowerCurve, tdp_w: float, need: Need, pace: float) -> float:
    """Least limit at which a device has ``pace`` times the speed that it needs."""
    floor_w = need.nominal_w if need.min_w is None else need.min_w
    speed = need.speed * pace
    if speed <= 1 and need.min_w is None:
        return need.nominal_w
    return max(curve.power_for(speed, need.nominal_w / tdp_w) * tdp_w, floor_w)


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerLimits:
    """Limits of one device type and of the domain that it sits in; powers in watts.

    Raises:
        ConfigError: if the range is empty.
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
    module_budget_w: float | None = None
    """Sum of limits that the devices of one module (superchip) may reach; None if there are no modules."""
    module_devices: int = 1
    """Neighbouring devices of a domain that make a module."""
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

    def reach(
        self,
        needs: Sequence[tuple[float, int]],
        *,
        num_others: int = 0,
        num_dead: int = 0,
        slots: Sequence[int] = (),
        dead: Sequence[int] = (),
    ) -> Reach:
        """What survivors of one domain can reach: ``needs`` are (wanted speed, number of devices that want it).

        Args:
            needs: Speeds over the speed at the nominal limit.
            num_others: Live devices of the domain that stay at nominal.
            num_dead: Dead devices of the domain; they count at nominal power where ``dead_count`` says so.
            slots: Place of the one device of each need in the domain; needed where there are modules.
            dead: Places of the dead ones.
        """
        wanted = [Need(speed, self.nominal_w, self.max_w, num) for speed, num in needs]
        rooms = []
        if self.domain_budget_w is not None:
            booked = num_others + (num_dead if self.dead_count else 0)
            num_raised = sum(num for _, num in needs)
            left_w = self.domain_budget_w - booked * self.nominal_w
            # A budget below the nominal limits cannot be kept by us: it only means that nothing may be raised.
            rooms = [Room(max(left_w, num_raised * self.nominal_w), frozenset(range(len(needs))))]
        return reach(self.curve, self.tdp_w, wanted, [*rooms, *self._modules(slots, dead)])

    def _modules(self, slots: Sequence[int], dead: Sequence[int]) -> list[Room]:
        """What each module leaves for its live devices."""
        if self.module_budget_w is None:
            return []
        rooms = []
        for module in {slot // self.module_devices for slot in slots}:
            members = frozenset(i for i, slot in enumerate(slots) if slot // self.module_devices == module)
            booked = sum(slot // self.module_devices == module for slot in dead) if self.dead_count else 0
            left_w = self.module_budget_w - booked * self.nominal_w
            rooms.append(Room(max(left_w, len(members) * self.nominal_w), members, "module"))
        return rooms

    def speed(self, limit_w: float) -> float:
        """Speed at a limit over the speed at the nominal one."""
        return self.curve.ratio(limit_w / self.tdp_w, self.nominal_w / self.tdp_w)

    def limit_w(self, speed: float) -> float:
        """Least limit for a speed over that at the nominal limit; infinite if there is none."""
        return self.curve.power_for(speed, self.nominal_w / self.tdp_w) * self.tdp_w

    def describe(self, found: Reach, wanted: float, lost: int, tp_full: int) -> str:
        """Whether power hides ``lost`` of ``tp_full`` devices, in words with the curve's name and the numbers."""
        top_w = max(found.limits_w)
        label = self.curve.label(top_w / self.tdp_w)
        if found.limited_by == "need":
            return f"hides {lost} of {tp_full} with {top_w / self.nominal_w:.2f}x power (curve {label})"
        within = {
            "device": f"{self.headroom:.2f}x power",
            "domain": f"{self.domain_budget_w or 0:g} W",
            "module": f"{self.module_budget_w or 0:g} W for a module",
        }[found.limited_by]
        return (
            f"cannot hide {lost} of {tp_full} with curve {label} and {within}: {found.pace * wanted:.3f}x of the "
            f"{wanted:.3f}x speed that it takes, so it stays {100 * (1 / found.pace - 1):.1f} % slower"
        )
