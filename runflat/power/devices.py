"""What the policy and the agent need of a device's power limit, whoever answers: NVML or emulated devices.

Everything here is in watts, degrees Celsius and joules; a backend converts at its own edge. Devices are named by UUID:
indices shift when a device is lost.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal, Protocol

from runflat.errors import RunError

SAME_W = 1.0
"""Two limits within this are the same one: drivers round."""

Reason = Literal[
    "idle", "power-cap", "hw-slowdown", "sync-boost", "sw-thermal", "hw-thermal", "power-brake", "board", "reliability"
]
"""Why a device does not clock higher. Only ``power-cap`` says that more watts would help; it is no fault."""

ALARMS: Set[Reason] = frozenset({"hw-slowdown", "hw-thermal", "power-brake"})
"""Reasons with which no device is boosted: the hardware protects itself."""

ErrorKind = Literal["unknown", "lost", "permission", "range", "unsupported", "driver", "slow"]


class DeviceError(RunError):
    """A backend could not do what was asked of one device.

    Attributes:
        kind: unknown (no such device), lost (fell off the bus), permission, range (limit outside of what the device
            takes), unsupported, driver (not loaded, reloading, any other error), slow (no answer in time).
    """

    def __init__(self, kind: ErrorKind, text: str):
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One device as its driver describes it. `default_w` is what the driver sets at load, not what a site runs at."""

    uuid: str
    index: int
    name: str
    min_w: float
    max_w: float
    default_w: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look at a device; None where the device does not say.

    Attributes:
        limit_w: What software last asked for.
        enforced_w: What is in force after all limiters, out-of-band ones included. Only this proves a write.
        draw_w: Power drawn; a slow average on many devices, so no evidence for a fast loop.
        temperature_c: Core temperature.
        margin_c: Degrees left to the temperature at which the device slows itself down.
        clock_mhz: Clock of what computes.
        energy_j: Energy since the driver was loaded: if it falls, the driver was reloaded and forgot its limits.
        reasons: Why the clocks are not higher.
    """

    limit_w: float
    enforced_w: float
    draw_w: float | None = None
    temperature_c: float | None = None
    margin_c: float | None = None
    clock_mhz: float | None = None
    energy_j: float | None = None
    reasons: Set[Reason] | None = None


class PowerBackend(Protocol):
    """Devices whose limit can be read and, with the right to do so, set. Calls block; none retries.

    Every method raises `DeviceError`. `list_devices` looks anew each time. `set_limit` returns when the driver has
    taken the value, which proves nothing: read back.
    """

    def list_devices(self) -> tuple[DeviceFacts, ...]:
        """All devices that answer, in the driver's order."""
        ...

    def read(self, uuid: str) -> Reading:
        """The device's limits and state now."""
        ...

    def set_limit(self, uuid: str, limit_w: float) -> None:
        """Ask for a limit."""
        ...


def same_limit(first_w: float, second_w: float) -> bool:
    """Whether two limits are the same but for rounding."""
    return abs(first_w - second_w) <= SAME_W
