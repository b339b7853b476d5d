"""What boost can and cannot do with the devices of a machine, in words and numbers; only reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runflat.power.devices import ALARMS, SAME_W, DeviceError, DeviceFacts, PowerBackend, Reading, Reason

WORDS: dict[Reason, str] = {
    "idle": "it is idle",
    "power-cap": "its power limit: more watts would make it faster",
    "hw-slowdown": "the hardware slows it down",
    "sync-boost": "it is bound to the clock of another device",
    "sw-thermal": "heat",
    "hw-thermal": "heat, so much that the hardware slows it down",
    "power-brake": "the power brake of the rack or the supply",
    "board": "the power limit of its board",
    "reliability": "its voltage limit: more watts would not help",
}


@dataclass(frozen=True, kw_only=True)
class Probed:
    """One device; `reading` is None where it could not be read, `error` says why."""

    facts: DeviceFacts
    reading: Reading | None
    error: str | None = None

    @property
    def headroom_w(self) -> float:
        """Watts between the limit that software has set, which a boost would start from, and the device's maximum."""
        return 0.0 if self.reading is None else max(self.facts.max_w - self.reading.limit_w, 0.0)

    def verdict(self) -> str:
        """What boost can do with it."""
        if self.reading is None:
            return f"it cannot be read: {self.error}"
        reading, facts = self.reading, self.facts
        parts = []
        if self.headroom_w <= SAME_W:
            parts.append(
                f"no boost: it already runs at its maximum, {facts.max_w:g} W; headroom exists only where the limit in "
                "health is set below that"
            )
        else:
            ratio = facts.max_w / reading.limit_w
            parts.append(
                f"boost up to {ratio:.2f}x the power ({reading.limit_w:g} to {facts.max_w:g} W) if the site allows it"
            )
        if reading.enforced_w < reading.limit_w - SAME_W:
            parts.append(
                f"something outside of the driver's limit holds it at {reading.enforced_w:g} W: a raise may do nothing"
            )
        alarms = sorted((reading.reasons or frozenset()) & ALARMS)
        if alarms:
            parts.append("it protects itself now (" + ", ".join(alarms) + "): no boost while it does")
        elif reading.reasons is not None and "power-cap" not in reading.reasons and "idle" not in reading.reasons:
            parts.append("the power limit is not what holds it back now: more watts would not make this load faster")
        if reading.margin_c is not None and reading.margin_c < 5:
            parts.append(f"only {reading.margin_c:g} C are left to its thermal limit")
        return "; ".join(parts)

    def limiters(self) -> str:
        """Why it does not clock higher now."""
        if self.reading is None or self.reading.reasons is None:
            return "it does not say"
        return ", ".join(WORDS[reason] for reason in sorted(self.reading.reasons)) or "nothing"


def probe(backend: PowerBackend) -> tuple[Probed, ...]:
    """A look at every device that answers.

    Raises:
        DeviceError: not even the list can be had.
    """
    found = []
    for facts in backend.list_devices():
        try:
            found.append(Probed(facts=facts, reading=backend.read(facts.uuid)))
        except DeviceError as error:
            found.append(Probed(facts=facts, reading=None, error=str(error)))
    return tuple(found)


def summary(devices: Sequence[Probed]) -> str:
    """One sentence about all of them."""
    able = [device for device in devices if device.headroom_w > SAME_W]
    if not devices:
        return "The driver knows no device that answers."
    if not able:
        return (
            f"None of {len(devices)} devices has headroom: without a nominal limit below the maximum there is nothing "
            "to boost with, and a loss is taken by the batch split."
        )
    least = min(device.facts.max_w / (device.facts.max_w - device.headroom_w) for device in able)
    return (
        f"{len(able)} of {len(devices)} devices have headroom, at least {least:.2f}x the power. How much speed that is "
        "depends on the load: it has to be measured."
    )
