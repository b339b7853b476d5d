"""The policy: from what is known of the devices to the next power limits, as a pure function.

    decide(rules, state, seen, now) -> (state, writes, words, speeds)

Off the record of what it wrote and what was read back, it raises the devices of a hit replica to the limits that the
curve predicts, one step per training step and never more than is needed, trims them slowly by what the steps really
take, and goes back to nominal at any sign of trouble. It never fights another writer. What holds at every instant, also
between two writes: the sum of limits of a budget (dead devices included until they are confirmed off) stays within it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from runflat.power.account import Held, digest
from runflat.power.reach import Need, Reach, Room, reach
from runflat.power.views import Block, DeviceView, Observation, Rules, Write

FINE = 1e-3
"""Part of a step's time by which a replica may lag without that being evidence."""
MOST_TRIM = 0.02
"""Most by which one trim changes the wanted speed."""
GAIN_RANGE = (0.8, 1.25)
"""How far trims may move the wanted speed in all."""


@dataclass(frozen=True, slots=True)
class Trim:
    """What steps under settled limits showed: own time over that of the healthy ones, and the correction so far."""

    gain: float = 1.0
    ratios: tuple[float, ...] = ()
    settled: bool = False
    """Whether it was said that the replica keeps pace."""


@dataclass(frozen=True, slots=True)
class PowerState:
    """All that the policy remembers; start with an empty one. Only `decide` makes new ones."""

    held: Mapping[str, Held] = field(default_factory=dict)
    blocks: Mapping[int, Block] = field(default_factory=dict)
    """Replicas that may not be raised, until when and why."""
    trims: Mapping[int, Trim] = field(default_factory=dict)
    said: Mapping[int, str] = field(default_factory=dict)
    """Last sentence on each replica, so that nothing is said twice."""

    def limit_w(self, device: str) -> float | None:
        """The limit that was last asked for, or read where nothing was asked for."""
        return self.held[device].limit_w if device in self.held else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `decide` says: carry out `writes` in order and stop at the first that fails."""

    state: PowerState
    writes: tuple[Write, ...] = ()
    words: tuple[str, ...] = ()
    speeds: Mapping[int, float] = field(default_factory=dict)
    """Replicas whose speed cannot exceed this at present, whatever the curve says: 1.0 while blocked."""
    done: bool = False
    """The run was only for this policy (a calibration), and there is nothing left for it to do."""


def decide(rules: Rules, state: PowerState, seen: Observation, now: float) -> Verdict:
    """The next state, the limits to write in order, words for people, and what the planner must not count on."""
    return _Turn(rules, state, seen, now).verdict()


class _Turn:
    """One decision in the making. Lives no longer than one call."""

    def __init__(self, rules: Rules, state: PowerState, seen: Observation, now: float):
        self.rules, self.seen, self.now = rules, seen, now
        self.words: list[str] = []
        self.writes: list[Write] = []
        self.trims, self.said = dict(state.trims), dict(state.said)
        self.held, faults = digest(rules, state.held, seen, now)
        self.blocks = {
            replica: block
            for replica, block in state.blocks.items()
            # One that is over is kept for a while: trouble that comes again soon is held off for longer.
            if now < block.until + rules.hold_off_s * 2**block.times
        }
        for replica, reasons in faults.items():
            self.block(replica, reasons[0])
        self.members: dict[int, list[DeviceView]] = {}
        for device in seen.devices:
            if device.replica is not None and device.standing == "works":
                self.members.setdefault(device.replica, []).append(device)
        self.speeds: dict[int, float] = {}

    def block(self, replica: int, reason: str) -> None:
        """No raise of a replica for a while after the last trouble; each time in a row doubles it."""
        old = self.blocks.get(replica)
        active = old is not None and old.until > self.now
        times = 1 if old is None else old.times if active else old.times + 1
        if reason != HELD_OFF and not (active and old is not None and old.reason != HELD_OFF):
            self.words.append(f"replica {replica}: power at nominal for now: {reason}")
        elif active and old is not None:
            reason = old.reason
        until = self.now + self.rules.hold_off_s * 2 ** (min(times, 10) - 1)
        self.blocks[replica] = Block(until, reason, times)

    # ---- what is wanted

    def verdict(self) -> Verdict:
        """Lowers first, then what may be raised within what has been read back."""
        self.overdrawn()
        targets = {r: self.target(r) for r in sorted(self.members)}
        if self.rules.save:
            self.save(targets)
        for replica, found in targets.items():
            self.lower(replica, found)
        self.lower_others()
        for replica, found in targets.items():
            if self.trim(replica, found) and found is not None:
                self.raise_(replica, found)
        for replica, block in self.blocks.items():
            if block.until > self.now:
                self.speeds[replica] = 1.0
        state = PowerState(self.held, self.blocks, self.trims, self.said)
        return Verdict(state, tuple(self.writes), tuple(self.words), self.speeds)

    def blocked(self, replica: int) -> bool:
        """Whether a replica has to stay at nominal."""
        return replica in self.blocks and self.blocks[replica].until > self.now

    def pace_load(self) -> float:
        """Work of the most loaded device of the replicas that are not hit: nobody has to be faster than they are."""
        loads = [d.load for r, found in self.members.items() if r not in self.seen.hit for d in found]
        return max(loads, default=self.seen.full_load)

    def target(self, replica: int) -> Reach | None:
        """Limits of the replica's devices, in their order; None for nominal."""
        devices = self.members[replica]
        if replica not in self.seen.hit or replica in self.seen.joining or self.blocked(replica):
            return None
        if any(d.name not in self.held or self.held[d.name].foreign for d in devices):
            self.speeds[replica] = 1.0
            return None
        gain = self.trims.get(replica, Trim()).gain
        pace = self.pace_load()
        needs = [Need(max(d.load / pace * gain, 1.0), d.nominal_w, d.max_w) for d in devices]
        if pace <= 0 or max(need.speed for need in needs) <= 1:
            return None
        found = reach(self.rules.curve, self.rules.tdp_w, needs, self.rooms(devices))
        wanted = max(need.speed for need in needs)
        self.say(replica, self.explain(replica, devices, found, wanted))
        return found

    def rooms(self, devices: list[DeviceView]) -> list[Room]:
        """What each budget leaves for ``devices``, besides all that its other members hold or are entitled to."""
        index = {device.name: i for i, device in enumerate(devices)}
        rooms = []
        for budget in self.seen.budgets:
            inside = frozenset(index[name] for name in budget.members if name in index)
            if inside:
                others = sum(self.booked(name) for name in budget.members if name not in index)
                nominal = sum(devices[i].nominal_w for i in inside)
                rooms.append(Room(max(budget.watts - others, nominal), inside))
        return rooms

    def booked(self, name: str) -> float:
        """Watts that a device may take at this instant: the most of what was asked, read and is its due."""
        device = self.seen.by_name[name]
        if device.standing == "off":
            return 0.0
        held = self.held.get(name)
        return max(device.nominal_w, held.booked_w if held else 0.0)

    def say(self, replica: int, text: str) -> None:
        """Say a sentence on a replica unless it was the last one."""
        if self.said.get(replica) != text:
            self.said[replica] = text
            self.words.append(text)

    def explain(self, replica: int, devices: list[DeviceView], found: Reach, wanted: float) -> str:
        """What is wanted, what it takes, and what stays over."""
        top = max(zip(found.limits_w, devices, strict=True), key=lambda pair: pair[0] / pair[1].nominal_w)
        label = self.rules.curve.label(top[0] / self.rules.tdp_w)
        times = f"{top[0]:.0f} W, {top[0] / top[1].nominal_w:.2f}x nominal"
        text = f"replica {replica}: wants {wanted:.3f}x speed of its survivors"
        if found.limited_by == "need":
            return f"{text}: {times} by curve {label}"
        short = found.pace * wanted
        limit = "their range" if found.limited_by == "device" else "the power budget"
        return f"{text}, but {limit} ends at {times}, {short:.3f}x by curve {label}"

    # ---- what is written

    def overdrawn(self) -> None:
        """A budget that somebody else has overdrawn: whoever we raised in it goes back."""
        for budget in self.seen.budgets:
            if sum(self.booked(name) for name in budget.members) > budget.watts * (1 + 1e-9):
                for name in budget.members:
                    device = self.seen.by_name[name]
                    raised = name in self.held and self.held[name].limit_w > device.nominal_w + self.rules.tolerance_w
                    if raised and device.replica is not None:
                        self.block(device.replica, f"the limits in {budget.name} exceed its {budget.watts:g} W")

    def lower(self, replica: int, found: Reach | None) -> None:
        """Bring limits down to the target at once; below nominal (saving) only step by step."""
        raised = False
        for i, device in enumerate(self.members[replica]):
            held = self.held.get(device.name)
            if held is None:
                continue
            raised = raised or held.limit_w > device.nominal_w + self.rules.tolerance_w
            target = found.limits_w[i] if found else device.nominal_w
            band_w = self.rules.dead_band_w if target > device.nominal_w else self.rules.tolerance_w
            if held.limit_w > target + band_w:
                if target >= device.nominal_w:
                    self.write(device, target, "lower")
                elif self.seen.own_s is not None and held.confirmed:
                    self.write(device, max(target, held.limit_w - self.rules.step_w), "save")
            elif held.limit_w < min(target, device.nominal_w) - self.rules.tolerance_w:
                self.write(device, min(target, device.nominal_w), "restore")
        if raised and found is None:
            self.trims.pop(replica, None)
            self.said.pop(replica, None)
            self.words.append(f"replica {replica}: power back to nominal")
            if not self.blocked(replica):
                self.block(replica, HELD_OFF)  # nobody is raised, dropped and raised again in a row

    def lower_others(self) -> None:
        """Dead devices and those without work do not keep a raised limit, if they can still be reached."""
        for device in self.seen.devices:
            held = self.held.get(device.name)
            working = device.replica in self.members and device.standing == "works"
            if not working and held is not None and held.limit_w > device.nominal_w + self.rules.tolerance_w:
                self.write(device, device.nominal_w, "lower")

    def trim(self, replica: int, found: Reach | None) -> bool:
        """Learn from a step; returns whether there is evidence that the replica lags."""
        healthy = self.healthy_s()
        if self.seen.own_s is None or replica not in self.seen.own_s or found is None:
            return False
        if healthy is None:
            return True  # all replicas are hit: only the prediction is left
        ratio = self.seen.own_s[replica] / healthy
        trim = self.trims.get(replica, Trim())
        if not self.settled(replica, found):
            self.trims[replica] = replace(trim, ratios=())
            return ratio > 1 + FINE
        if not trim.settled and abs(ratio - 1) <= self.rules.dead_band:
            trim = replace(trim, settled=True)
            top_w = max(self.held[d.name].limit_w for d in self.members[replica])
            self.words.append(f"replica {replica}: keeps pace at {top_w:.0f} W")
        ratios = (*trim.ratios, ratio)[-self.rules.trim_steps :]
        if len(ratios) == self.rules.trim_steps:
            middle, ratios = statistics.median(ratios), ()
            reachable = found.limited_by == "need" or middle < 1
            if abs(middle - 1) > self.rules.dead_band and reachable:
                factor = min(max(middle, 1 - MOST_TRIM), 1 + MOST_TRIM)
                trim = replace(trim, gain=min(max(trim.gain * factor, GAIN_RANGE[0]), GAIN_RANGE[1]))
        self.trims[replica] = replace(trim, ratios=ratios)
        return ratio > 1 + FINE

    def healthy_s(self) -> float | None:
        """Median own time of the replicas that are not hit."""
        own_s = self.seen.own_s or {}
        times = [seconds for replica, seconds in own_s.items() if replica not in self.seen.hit]
        return statistics.median(times) if times else None

    def settled(self, replica: int, found: Reach) -> bool:
        """Whether all devices of a replica are where they should be, read back."""
        pairs = zip(self.members[replica], found.limits_w, strict=True)
        band_w = self.rules.dead_band_w
        return all(self.held[d.name].confirmed and abs(self.held[d.name].limit_w - w) <= band_w for d, w in pairs)

    def raise_(self, replica: int, found: Reach) -> None:
        """One step up for all devices of a replica, if the last one was read back and each budget has room now."""
        devices = self.members[replica]
        if not all(self.held[d.name].confirmed and d.cool(self.rules) for d in devices):
            return
        steps = {}
        for device, target in zip(devices, found.limits_w, strict=True):
            missing_w = target - self.held[device.name].limit_w
            if missing_w > self.rules.tolerance_w:
                steps[device.name] = min(missing_w, self.rules.step_w)
        share = 1.0
        for budget in self.seen.budgets:
            wanted_w = sum(steps.get(name, 0.0) for name in budget.members)
            if wanted_w:
                room_w = budget.watts - sum(self.booked(name) for name in budget.members)
                share = min(share, max(room_w, 0.0) / wanted_w)
        for device in devices:
            step_w = steps.get(device.name, 0.0) * share
            if step_w > self.rules.tolerance_w:
                self.write(device, min(self.held[device.name].limit_w + step_w, device.max_w), "raise")

    def write(self, device: DeviceView, limit_w: float, why: str) -> None:
        """Ask for a limit, unless the device belongs to somebody else, cannot be reached, or was just asked for it."""
        held = self.held[device.name]
        if held.foreign or device.reading is None or device.reading.lost:
            return
        if not held.confirmed and math.isclose(held.limit_w, limit_w) and self.now - held.since < self.rules.confirm_s:
            return
        self.held[device.name] = held.asked(limit_w, self.now)
        self.writes.append(Write(device.name, limit_w, why))

    def save(self, targets: dict[int, Reach | None]) -> None:
        """Where somebody stays slower all the same, the others may take as long: less power for the same step."""
        slowest = max((self.seconds(r, found) for r, found in targets.items()), default=0.0)
        for replica, devices in self.members.items():
            if replica in self.seen.hit or replica in self.seen.joining or self.blocked(replica) or slowest <= 0:
                continue
            if any(d.name not in self.held or self.held[d.name].foreign for d in devices):
                continue
            if self.holds_up(replica):
                self.block(replica, "saving power made the step longer")
                continue
            needs = [Need(d.load / slowest, d.nominal_w, d.max_w, 1, d.min_w) for d in devices]
            if self.seen.hit and max(need.speed for need in needs) < 1 - self.rules.dead_band:
                targets[replica] = reach(self.rules.curve, self.rules.tdp_w, needs)

    def holds_up(self, replica: int) -> bool:
        """Whether a replica that runs below nominal takes longer than the hit ones."""
        own_s = self.seen.own_s or {}
        slowest = max((seconds for other, seconds in own_s.items() if other in self.seen.hit), default=math.inf)
        low = any(self.held[d.name].limit_w < d.nominal_w - self.rules.tolerance_w for d in self.members[replica])
        return low and own_s.get(replica, 0.0) > slowest * (1 + self.rules.dead_band)

    def seconds(self, replica: int, found: Reach | None) -> float:
        """Time that the replica will take by the curve, in units of work at nominal speed."""
        curve, tdp_w = self.rules.curve, self.rules.tdp_w
        devices = self.members[replica]
        limits = found.limits_w if found else tuple(d.nominal_w for d in devices)
        return max(
            d.load / curve.ratio(limit / tdp_w, d.nominal_w / tdp_w) for d, limit in zip(devices, limits, strict=True)
        )


HELD_OFF = "it was raised a short while ago"
