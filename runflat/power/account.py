"""What was asked of each device and what was read back: the account on which no raise goes unproved. Part of `control`.

A limit counts at the most that it may be: a raise from the moment in which it is asked for, a lower limit only once it
has been read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from runflat.power.views import DeviceView, Observation, Rules, Sample

MOST_MISSES = 2
"""Readings that differ from what was asked for, after which it is given up."""


@dataclass(frozen=True, slots=True)
class Held:
    """One device: the limit asked for (or found), since when, and what it may take at most."""

    limit_w: float
    since: float
    booked_w: float
    confirmed: bool = True
    """Whether the limit has been read back."""
    own_w: tuple[float, ...] = ()
    """Until then: limits of ours that may still be read instead."""
    misses: int = 0
    foreign: bool = False
    """Somebody else sets its limit: it is left alone for the rest of the run."""
    dead: bool = False

    def asked(self, limit_w: float, now: float) -> Held:
        """After a write of ``limit_w``."""
        booked_w = max(self.booked_w, limit_w)
        own_w = (*self.own_w, self.limit_w)
        return replace(self, limit_w=limit_w, since=now, booked_w=booked_w, confirmed=False, own_w=own_w, misses=0)


def digest(
    rules: Rules, held: Mapping[str, Held], seen: Observation, now: float
) -> tuple[dict[str, Held], dict[int, list[str]]]:
    """The account after the newest readings, and per replica what is wrong with its devices."""
    account = dict(held)
    faults: dict[int, list[str]] = {}
    for device in seen.devices:
        known, reasons = _one(rules, account.get(device.name), device, now)
        if known is not None:
            account[device.name] = known
        if reasons and device.replica is not None:
            faults.setdefault(device.replica, []).extend(f"{device.name}: {reason}" for reason in reasons)
    return account, faults


def _one(rules: Rules, held: Held | None, device: DeviceView, now: float) -> tuple[Held | None, list[str]]:
    """A device's account after its newest reading, and what is wrong with it."""
    reading = device.reading
    raised = held is not None and held.booked_w > device.nominal_w + rules.tolerance_w
    reasons = []
    dead = device.standing != "works"
    if held is not None and dead != held.dead:
        held = replace(held, dead=dead)
        reasons += ["it is lost"] if dead and raised else []
    if reading is None or now - reading.at > rules.stale_s:
        return held, [*reasons, "no reading of its power"] if raised and not dead else reasons
    if reading.lost:
        return held, [*reasons, "the driver has lost it"] if not dead else reasons
    if not dead:
        reasons += _trouble(rules, reading)
    known, problem = _settle(rules, held, device, reading)
    return known, [*reasons, problem] if problem else reasons


def _trouble(rules: Rules, reading: Sample) -> list[str]:
    if reading.alarm:
        return [reading.alarm]
    if reading.margin_c is not None and reading.margin_c < rules.drop_margin_c:
        return ["it is about to reach its thermal limit"]
    return []


def _settle(rules: Rules, held: Held | None, device: DeviceView, reading: Sample) -> tuple[Held, str | None]:
    """Compare a reading with what was asked for."""
    most_w = max(reading.requested_w, reading.enforced_w)
    if held is None:
        found = Held(reading.requested_w, reading.at, most_w, dead=device.standing != "works")
        if math.isclose(reading.requested_w, device.nominal_w, abs_tol=rules.tolerance_w):
            return found, None
        return replace(found, foreign=True), f"its limit is {reading.requested_w:g} W, not the nominal one"
    if held.foreign:
        return replace(held, limit_w=reading.requested_w, booked_w=most_w), None
    if reading.at <= held.since and not held.confirmed:
        return held, None  # read before the write
    if math.isclose(reading.requested_w, held.limit_w, abs_tol=rules.tolerance_w):
        return _as_asked(rules, held, device, reading)
    if not held.confirmed and any(abs(reading.requested_w - w) <= rules.tolerance_w for w in held.own_w):
        if held.misses + 1 < MOST_MISSES:
            return replace(held, misses=held.misses + 1), None
        back = replace(held, limit_w=reading.requested_w, booked_w=most_w, confirmed=True, own_w=(), misses=0)
        return back, f"{held.limit_w:g} W were asked for, but {reading.requested_w:g} W are read back"
    if math.isclose(reading.requested_w, device.nominal_w, abs_tol=rules.tolerance_w):  # an ended lease, a host's habit
        back = replace(held, limit_w=reading.requested_w, booked_w=most_w, confirmed=True, own_w=(), misses=0)
        return back, "somebody set its limit back to nominal"
    taken = replace(held, limit_w=reading.requested_w, booked_w=most_w, confirmed=True, own_w=(), foreign=True)
    return taken, f"somebody else set its limit to {reading.requested_w:g} W; it is left alone from now on"


def _as_asked(rules: Rules, held: Held, device: DeviceView, reading: Sample) -> tuple[Held, str | None]:
    """The device has the request; what counts is the limit that is in force."""
    if reading.enforced_w > held.limit_w + rules.tolerance_w:  # on its way down, or somebody overrides it
        if held.misses + 1 < MOST_MISSES:
            return replace(held, misses=held.misses + 1), None
        return replace(held, booked_w=max(held.booked_w, reading.enforced_w)), "its limit does not take effect"
    booked_w = max(reading.enforced_w, held.limit_w)
    known = replace(held, confirmed=True, booked_w=booked_w, own_w=(), misses=0)
    raised = held.limit_w > device.nominal_w + rules.tolerance_w
    if raised and reading.enforced_w < held.limit_w - rules.tolerance_w:
        return known, f"{held.limit_w:g} W were asked for, but something caps it at {reading.enforced_w:g} W"
    return known, None
