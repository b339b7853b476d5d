"""Emulated devices: a power limit that really is one number, and a curve that says how fast it makes the device.

For runs on emulated devices and for tests. What real ones do to a caller can be brought about: an out-of-band cap,
heat, a lost device, a missing right, another writer, a reloaded driver, calls that are slow to take effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from runflat.power.curve import PowerCurve
from runflat.power.devices import DeviceError, DeviceFacts, ErrorKind, Reading, Reason

CLOCK_MHZ = 1500.0
"""Clock of an emulated device at the power that is 1.0 on its curve; its speed is its clock."""
SLOWDOWN_C = 90.0
"""Temperature at which an emulated device would slow itself down."""


@dataclass
class EmulatedDevice:
    """One device: its facts, its limit, and what may be done to it. Fields may be changed at any time."""

    facts: DeviceFacts
    limit_w: float
    demand_w: float = float("inf")
    """What it would draw without a limit."""
    cap_w: float | None = None
    """Out-of-band cap: wins silently over the limit."""
    temperature_c: float = 50.0
    reasons: set[Reason] = field(default_factory=set)
    failure: ErrorKind | None = None
    """Every call fails with this."""
    set_failure: ErrorKind | None = None
    """Setting fails with this."""
    deaf: bool = False
    """Setting succeeds and changes nothing."""
    energy_j: float = 0.0
    since_s: float = 0.0

    @property
    def enforced_w(self) -> float:
        """The limit in force."""
        return self.limit_w if self.cap_w is None else min(self.limit_w, self.cap_w)

    @property
    def draw_w(self) -> float:
        """Power drawn now."""
        return min(self.enforced_w, self.demand_w)

    def reload_driver(self) -> None:
        """What a driver reload does: the limit is the default again, energy counts from zero."""
        self.limit_w = self.facts.default_w
        self.energy_j = 0.0


class EmulatedDevices:
    """A `PowerBackend` over devices of this process.

    Args:
        devices: What there is; `devices[uuid]` afterwards.
        curve: Relative speed at relative power, with 1.0 for `reference_w`.
        reference_w: Power that is 1.0 on the curve.
        clock: Seconds, for the energy counter.
    """

    def __init__(
        self, devices: Iterable[EmulatedDevice], curve: PowerCurve, reference_w: float, clock: Callable[[], float]
    ):
        self.devices = {device.facts.uuid: device for device in devices}
        self._curve = curve
        self._reference_w = reference_w
        self._clock = clock
        for device in self.devices.values():
            device.since_s = clock()

    def speed(self, uuid: str, nominal_w: float) -> float:
        """How many times as fast the device is now as at `nominal_w`."""
        enforced_w = self.devices[uuid].enforced_w
        return self._curve.ratio(enforced_w / self._reference_w, nominal_w / self._reference_w)

    def list_devices(self) -> tuple[DeviceFacts, ...]:
        """All that are not lost; indices close up over lost ones, as they do after a real loss."""
        live = [device.facts for device in self.devices.values() if device.failure != "lost"]
        return tuple(replace(facts, index=index) for index, facts in enumerate(live))

    def read(self, uuid: str) -> Reading:
        """The device's state, with the energy that it has used until now."""
        device = self._device(uuid)
        now = self._clock()
        device.energy_j += device.draw_w * (now - device.since_s)
        device.since_s = now
        capped: set[Reason] = {"power-cap"} if device.demand_w > device.enforced_w else set()
        return Reading(
            limit_w=device.limit_w,
            enforced_w=device.enforced_w,
            draw_w=device.draw_w,
            temperature_c=device.temperature_c,
            margin_c=SLOWDOWN_C - device.temperature_c,
            clock_mhz=CLOCK_MHZ * self.speed(uuid, self._reference_w),
            energy_j=device.energy_j,
            reasons=frozenset(device.reasons | capped),
        )

    def set_limit(self, uuid: str, limit_w: float) -> None:
        """Set the limit; refused outside of the device's range, as NVML does."""
        device = self._device(uuid)
        if device.set_failure is not None:
            raise DeviceError(device.set_failure, f"{uuid}: emulated failure to set: {device.set_failure}")
        facts = device.facts
        if not facts.min_w <= limit_w <= facts.max_w:
            raise DeviceError("range", f"{uuid} takes {facts.min_w:g} to {facts.max_w:g} W, not {limit_w:g} W")
        self.read(uuid)  # the energy until now was drawn under the old limit
        if not device.deaf:
            device.limit_w = limit_w

    def _device(self, uuid: str) -> EmulatedDevice:
        device = self.devices.get(uuid)
        if device is None:
            raise DeviceError("unknown", f"there is no device {uuid}")
        if device.failure is not None:
            raise DeviceError(device.failure, f"{uuid}: emulated failure: {device.failure}")
        return device


def emulated_devices(
    names: Iterable[str],
    curve: PowerCurve,
    *,
    nominal_w: float,
    max_w: float,
    min_w: float | None = None,
    tdp_w: float | None = None,
    clock: Callable[[], float],
) -> EmulatedDevices:
    """Like devices that run at `nominal_w` of `max_w`, which is also their default: the realistic form of headroom.

    Args:
        names: Their UUIDs.
        curve: Speed over power; 1.0 is `tdp_w`.
        nominal_w: Limit that they start with.
        max_w: Highest limit.
        min_w: Lowest limit; none: half of nominal.
        tdp_w: Power that is 1.0 on the curve; none: `nominal_w`.
        clock: Seconds.
    """
    low_w = nominal_w / 2 if min_w is None else min_w
    facts = [
        DeviceFacts(uuid=name, index=index, name="emulated", min_w=low_w, max_w=max_w, default_w=max_w)
        for index, name in enumerate(names)
    ]
    return EmulatedDevices([EmulatedDevice(fact, nominal_w) for fact in facts], curve, tdp_w or nominal_w, clock)
