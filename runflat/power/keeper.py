"""Keeps devices honest: writes limits so that nominal can always be restored, and restores it.

Before each write the limit to go back to is in the journal; after each write the device is read back. A limit that
nobody here wrote belongs to somebody else: the device is given up and left alone. The one exception is a reloaded
driver, which has no opinion: its default gives way to nominal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from runflat.power.devices import SAME_W, DeviceError, DeviceFacts, PowerBackend, Reading, same_limit
from runflat.power.journal import Journal, JournalError, Owed
from runflat.power.site import DeviceLimits
from runflat.power.wire import DeviceState, State, finite

SETTLE_S = 3.0
"""How long a limit may take to show in what is enforced before it counts as capped by something else."""

Verdict = Literal["nominal", "ours", "reset", "foreign"]
Audit = Callable[[str, Mapping[str, Any]], None]
"""Records (event, facts)."""


def judge(owed: Owed, reading: Reading, *, last_energy_j: float | None, default_w: float | None) -> Verdict:
    """Whose limit a device has.

    Args:
        owed: What we may have left it at.
        reading: What it says.
        last_energy_j: Its energy counter when we last looked, None if unknown.
        default_w: Limit that its driver sets at load, None if unknown.
    """
    is_reloaded = last_energy_j is not None and reading.energy_j is not None and reading.energy_j < last_energy_j
    if is_reloaded and default_w is not None and same_limit(reading.limit_w, default_w):
        return "reset"
    if same_limit(reading.limit_w, owed.nominal_w):
        return "nominal"
    low_w, high_w = sorted((owed.from_w, owed.to_w))
    return "ours" if low_w - SAME_W <= reading.limit_w <= high_w + SAME_W else "foreign"


@dataclass
class Kept:
    """One device and what is known of it. `written_w` is None where a write may or may not have happened."""

    site: DeviceLimits
    is_listed: bool = True
    facts: DeviceFacts | None = None
    reading: Reading | None = None
    read_s: float | None = None
    lease: str | None = None
    written_w: float | None = None
    is_restoring: bool = False
    is_given_up: bool = False
    trouble: str | None = None
    error: str | None = None
    unconfirmed_s: float | None = None

    @property
    def state(self) -> State:
        """In one word."""
        if self.is_given_up:
            return "given-up"
        if self.is_restoring:
            return "restoring"
        return "leased" if self.lease is not None else "free"


class Keeper:
    """All devices of the limits file, and those that the journal still names."""

    def __init__(
        self, devices: Mapping[str, DeviceLimits], backend: PowerBackend, journal: Journal, audit: Audit, now: float
    ):
        """Restore what an earlier agent left behind; what cannot be restored yet stays owed."""
        self._backend = backend
        self._journal = journal
        self._audit = audit
        self._is_unsaved = self.is_damaged = False
        self.kept = {uuid: Kept(site) for uuid, site in devices.items()}
        try:
            self.owed = journal.load()
        except JournalError as error:
            audit("journal-damaged", {"text": str(error)})
            self.owed = {
                uuid: Owed(nominal_w=site.nominal_w, from_w=site.low_w, to_w=site.ceiling_w)
                for uuid, site in devices.items()
            }
            # Without a device to find anything out from, the damage must stay visible for an agent that has some.
            self._is_unsaved = bool(devices)
            self.is_damaged = True
        for uuid, owed in self.owed.items():
            if uuid not in self.kept:
                low_w, high_w = min(owed.nominal_w, owed.to_w), max(owed.nominal_w, owed.to_w)
                site = DeviceLimits(nominal_w=owed.nominal_w, ceiling_w=high_w, floor_w=low_w)
                self.kept[uuid] = Kept(site, is_listed=False)
            self.kept[uuid].is_restoring = True
        self.look(now)

    def look(self, now: float) -> None:
        """Read every device; go on restoring; notice other writers, reloaded drivers and caps."""
        if self._is_unsaved:
            self._save()
        if any(kept.facts is None or kept.error for kept in self.kept.values()):
            self._describe()
        for uuid, kept in self.kept.items():
            if kept.is_restoring:
                self.restore(uuid, now)
                continue
            last_energy_j = kept.reading.energy_j if kept.reading else None
            reading = self._read(uuid, now)
            if (
                reading is not None
                and kept.lease is not None
                and self._is_still_ours(uuid, reading, last_energy_j, now)
            ):
                self._confirm(uuid, reading, now)

    def unavailable(self, uuid: str, now: float) -> str | None:
        """Why a device cannot be leased now, in words; None if it can."""
        kept = self.kept.get(uuid)
        if kept is None or not kept.is_listed:
            return "it is not in the limits file"
        if kept.lease is not None:
            return "another controller has it"
        if kept.is_given_up:
            return f"another writer was seen: {kept.trouble}"
        if kept.is_restoring:
            return f"it is still being restored: {kept.error or kept.trouble or 'wait'}"
        reading = self._read(uuid, now)
        if reading is None:
            return str(kept.error)
        if not same_limit(reading.limit_w, kept.site.nominal_w):
            return f"its limit is {reading.limit_w:g} W, not the nominal {kept.site.nominal_w:g} W of the limits file"
        if reading.enforced_w < kept.site.nominal_w and not same_limit(reading.enforced_w, kept.site.nominal_w):
            return f"something else caps it at {reading.enforced_w:g} W, below the nominal {kept.site.nominal_w:g} W"
        return None

    def lease(self, uuid: str, lease: str) -> None:
        """It is at nominal and belongs to `lease` from now on."""
        kept = self.kept[uuid]
        kept.lease, kept.written_w = lease, kept.site.nominal_w
        kept.trouble = kept.unconfirmed_s = None

    def write(self, uuid: str, limit_w: float, now: float) -> str | None:
        """Set the limit of a leased device; returns what went wrong, in words, or None.

        The caller has checked that the limit is within the site's range.
        """
        kept = self.kept[uuid]
        if kept.is_restoring:
            return f"it is being restored: {kept.error or kept.trouble or 'wait'}"
        last_energy_j = kept.reading.energy_j if kept.reading else None
        before = self._read(uuid, now)
        if before is None:
            return kept.error
        if not self._is_still_ours(uuid, before, last_energy_j, now):
            return kept.trouble
        if same_limit(before.limit_w, limit_w):
            kept.written_w = before.limit_w
            return None
        owed = self.owed.get(uuid)
        nominal_w = owed.nominal_w if owed else kept.site.nominal_w
        intent = Owed(nominal_w=nominal_w, from_w=before.limit_w, to_w=limit_w, energy_j=finite(before.energy_j))
        if not self._owe(uuid, intent):
            return "the journal cannot be written, so the device was left as it is"
        kept.written_w = kept.unconfirmed_s = None
        try:
            self._backend.set_limit(uuid, limit_w)
        except DeviceError as error:
            self._audit("set-failed", {"uuid": uuid, "limit_w": limit_w, "text": str(error)})
            self._read(uuid, now)
            return str(error)
        return self._read_back(uuid, intent, now)

    def restore(self, uuid: str, now: float) -> bool:
        """Bring a device back to its recorded nominal; returns whether it is there, or nobody's business any more."""
        kept, owed = self.kept[uuid], self.owed.get(uuid)
        if owed is None:
            kept.is_restoring = False
            return True
        kept.is_restoring = True
        last = [owed.energy_j, kept.reading.energy_j if kept.reading else None]
        last_energy_j = max((energy for energy in last if energy is not None), default=None)
        reading = self._read(uuid, now)
        if reading is None:
            return False
        if kept.written_w is not None:
            owed = owed.model_copy(update={"from_w": kept.written_w, "to_w": kept.written_w})
        verdict = judge(
            owed, reading, last_energy_j=last_energy_j, default_w=kept.facts.default_w if kept.facts else None
        )
        if verdict == "foreign":
            self._give_up(uuid, reading)
            return True
        if verdict != "nominal":
            try:
                self._backend.set_limit(uuid, owed.nominal_w)
            except DeviceError as error:
                self._fail(uuid, str(error))
                return False
            kept.written_w = None
            reading = self._read(uuid, now)
            if reading is None or not same_limit(reading.limit_w, owed.nominal_w):
                self._fail(uuid, kept.error or f"{owed.nominal_w:g} W was set and did not stay")
                return False
        if reading.enforced_w > owed.nominal_w and not same_limit(reading.enforced_w, owed.nominal_w):
            return False  # it has the limit and is not there yet
        self._settle(uuid)
        self._audit("restored", {"uuid": uuid, "limit_w": reading.limit_w, "enforced_w": reading.enforced_w})
        return True

    def allotted_w(self, uuid: str) -> float:
        """Watts to count for a device: what it may have, and at least nominal, to which it may go back at any time."""
        kept, owed = self.kept[uuid], self.owed.get(uuid)
        found = [kept.site.nominal_w]
        if owed is not None and kept.written_w is None:
            found += [owed.from_w, owed.to_w]
        if kept.written_w is not None:
            found.append(kept.written_w)
        if kept.is_given_up and kept.reading is not None:
            found.append(kept.reading.limit_w)
        return max(found)

    def describe(self, uuid: str, now: float) -> DeviceState:
        """What is known of a device."""
        kept = self.kept[uuid]
        facts, reading = kept.facts, kept.reading
        known: dict[str, Any] = {}
        if facts is not None:
            known |= {"index": facts.index, "name": facts.name, "default_w": facts.default_w}
            known |= {"min_w": facts.min_w, "max_w": facts.max_w}
        if reading is not None and kept.read_s is not None:
            known |= {"limit_w": reading.limit_w, "enforced_w": reading.enforced_w, "age_s": now - kept.read_s}
            known |= {"draw_w": finite(reading.draw_w), "temperature_c": finite(reading.temperature_c)}
            known |= {"margin_c": finite(reading.margin_c), "energy_j": finite(reading.energy_j)}
            known |= {"clock_mhz": finite(reading.clock_mhz)}
            known["reasons"] = None if reading.reasons is None else tuple(sorted(reading.reasons))
        return DeviceState(
            uuid=uuid,
            state=kept.state,
            floor_w=kept.site.low_w,
            nominal_w=kept.site.nominal_w,
            ceiling_w=kept.site.ceiling_w,
            confirmed=_is_confirmed(kept),
            trouble=kept.error or kept.trouble,
            **known,
        )

    def _describe(self) -> None:
        try:
            found = {facts.uuid: facts for facts in self._backend.list_devices()}
        except DeviceError as error:
            self._audit("no-list", {"text": str(error)})
            return
        for uuid, kept in self.kept.items():
            kept.facts = found.get(uuid, kept.facts)

    def _read(self, uuid: str, now: float) -> Reading | None:
        kept = self.kept[uuid]
        try:
            kept.reading = self._backend.read(uuid)
        except DeviceError as error:
            self._fail(uuid, str(error))
            return None
        kept.read_s, kept.error = now, None
        return kept.reading

    def _fail(self, uuid: str, text: str) -> None:
        kept = self.kept[uuid]
        if kept.error != text:
            self._audit("device-error", {"uuid": uuid, "text": text})
        kept.error = text

    def _read_back(self, uuid: str, intent: Owed, now: float) -> str | None:
        kept = self.kept[uuid]
        after = self._read(uuid, now)
        if after is None:
            return kept.error
        facts = {"uuid": uuid, "from_w": intent.from_w, "to_w": intent.to_w}
        self._audit("set", {**facts, "limit_w": after.limit_w, "enforced_w": after.enforced_w})
        kept.written_w = after.limit_w
        self._owe(uuid, intent.model_copy(update={"from_w": after.limit_w, "to_w": after.limit_w}))
        if not same_limit(after.limit_w, intent.to_w):
            kept.trouble = f"{intent.to_w:g} W was set and {after.limit_w:g} W is what the driver says: back to nominal"
            self.restore(uuid, now)
            return kept.trouble
        self._confirm(uuid, after, now)
        return None

    def _is_still_ours(self, uuid: str, reading: Reading, last_energy_j: float | None, now: float) -> bool:
        kept = self.kept[uuid]
        owed = self.owed.get(uuid)
        if kept.written_w is not None:
            if same_limit(reading.limit_w, kept.written_w):
                return True
            nominal_w = owed.nominal_w if owed else kept.site.nominal_w
            owed = Owed(nominal_w=nominal_w, from_w=kept.written_w, to_w=kept.written_w)
        if owed is None:
            return True
        default_w = kept.facts.default_w if kept.facts else None
        verdict = judge(owed, reading, last_energy_j=last_energy_j, default_w=default_w)
        if verdict == "ours" or (verdict == "nominal" and kept.written_w is None):
            kept.written_w = reading.limit_w
            return True
        if verdict == "reset":
            kept.trouble = f"its driver was reloaded and set its default, {reading.limit_w:g} W"
            self._audit("driver-reset", {"uuid": uuid, "limit_w": reading.limit_w})
            kept.lease = kept.written_w = None
            self.owed[uuid] = Owed(
                nominal_w=owed.nominal_w,
                from_w=reading.limit_w,
                to_w=reading.limit_w,
                energy_j=finite(reading.energy_j),
            )
            self._save()  # or not: the way back to nominal does not wait for a disk
            self.restore(uuid, now)
        else:
            self._give_up(uuid, reading)
        return False

    def _confirm(self, uuid: str, reading: Reading, now: float) -> None:
        """See whether what was written is in force, and go back to nominal where it is not after `SETTLE_S`."""
        kept, owed = self.kept[uuid], self.owed.get(uuid)
        if _is_confirmed(kept):
            kept.unconfirmed_s = None
            if owed is not None and same_limit(reading.limit_w, owed.nominal_w):
                self._settle(uuid)
        elif kept.unconfirmed_s is None:
            kept.unconfirmed_s = now
        elif now - kept.unconfirmed_s >= SETTLE_S:
            text = f"{reading.limit_w:g} W was set and {reading.enforced_w:g} W is enforced: something else limits it"
            if kept.trouble != text:
                self._audit("capped", {"uuid": uuid, "limit_w": reading.limit_w, "enforced_w": reading.enforced_w})
            kept.trouble = text
            self.restore(uuid, now)

    def _give_up(self, uuid: str, reading: Reading) -> None:
        kept = self.kept[uuid]
        expected = "what was left there" if kept.written_w is None else f"{kept.written_w:g} W"
        kept.trouble = f"somebody set it to {reading.limit_w:g} W where {expected} was expected; it is left alone"
        kept.is_given_up, kept.lease = True, None
        self._audit("foreign-writer", {"uuid": uuid, "limit_w": reading.limit_w, "expected_w": kept.written_w})
        self._settle(uuid)

    def _settle(self, uuid: str) -> None:
        """Nothing is owed for this device any more."""
        kept = self.kept[uuid]
        owed = self.owed.pop(uuid, None)
        kept.is_restoring, kept.unconfirmed_s = False, None
        kept.written_w = owed.nominal_w if owed and not kept.is_given_up else None
        if owed is not None:
            self._save()

    def _owe(self, uuid: str, owed: Owed) -> bool:
        before = self.owed.get(uuid)
        self.owed[uuid] = owed
        if self._save():
            return True
        if before is None:
            del self.owed[uuid]
        else:
            self.owed[uuid] = before
        return False

    def _save(self) -> bool:
        """Write down what is owed; returns whether it is safe. A record too many does no harm, so it is tried again."""
        try:
            self._journal.save(self.owed)
        except OSError as error:
            self._audit("journal-error", {"text": str(error)})
            self._is_unsaved = True
            return False
        self._is_unsaved = False
        return True


def _is_confirmed(kept: Kept) -> bool:
    if kept.written_w is None or kept.reading is None:
        return kept.lease is None
    return same_limit(kept.reading.enforced_w, kept.written_w)
