"""The device map: every device as a cell, replicas as blocks, and how both changed over time.

A cell stands for a device at its home (`replica:slot`, or among the spares), wherever it works now. A frame says only
what changed since the frame before, so that thousands of devices over thousands of events stay small.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from runflat.report.records import Happening, PlanView, Step
from runflat.report.run_files import RunData

STATES = {
    "active": ("A", "trains"),
    "draining": ("D", "leaves at the next step boundary"),
    "standby": ("S", "waits to join"),
    "starting": ("S", "starts"),
    "parked": ("P", "healthy, without work"),
    "lost": ("L", "lost"),
    "out": ("O", "stays out"),
}
"""State of a device -> (letter of its look, words)."""
UNIT_WORDS = {"head": "heads", "ffn": "FFN blocks", "vocab": "vocabulary blocks"}
"""Kinds of unit, in the plural."""
SMALL = 96
"""Up to so many devices, cells have room for words."""
LEAST_CHANGE = 0.005
"""A limit that has changed by less is not worth a frame."""
STATE_AFTER = {"fail": "lost", "kill": "lost", "return": "standby", "drain": "draining"}
"""What an event makes of its device."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a cell shows: state, place in the plan, units held, power limit and draw."""

    state: str
    place: str = ""
    units: str = ""
    power: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One moment: cells and blocks that look otherwise than in the frame before."""

    time_s: float
    label: str
    generation: int | None
    cells: tuple[tuple[int, Look], ...]
    blocks: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMap:
    """Blocks of devices, and the frames."""

    blocks: tuple[tuple[str, tuple[str, ...]], ...]
    """(name, devices) of each block."""
    frames: tuple[Frame, ...]
    has_power: bool = False
    """Whether power is told of devices, now or later."""

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices, in the order of the cells."""
        return tuple(device for _, devices in self.blocks for device in devices)


@dataclass(slots=True)
class _Reading:
    """Power of a device: the first limit that was read of it, the newest one, the one last shown; the draw."""

    nominal_w: float
    limit_w: float
    shown_w: float
    draw_w: float | None

    @property
    def words(self) -> str:
        """For people; ▲ and ▼ mark a limit that is not the first."""
        sign = "▲" if self.limit_w > self.nominal_w else "▼" if self.limit_w < self.nominal_w else ""
        draw = "" if self.draw_w is None else f" · draws {self.draw_w:.0f} W"
        return f"{sign}{self.limit_w:.0f} W limit{draw}"


@dataclass
class _Drawing:
    """Builds frames: what all cells and blocks look like now, and what changed since the last frame."""

    devices: tuple[str, ...]
    num_blocks: int
    states: dict[str, str] = field(default_factory=dict)
    plan: PlanView | None = None
    held: dict[str, tuple[str, str]] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)
    _power: dict[str, _Reading] = field(default_factory=dict)
    _looks: dict[str, Look] = field(default_factory=dict)
    _words: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Number the cells."""
        self.cells = {device: index for index, device in enumerate(self.devices)}

    def adopt(self, plan: PlanView) -> None:
        """A plan is in force: who is in it trains, who is not any more has no work."""
        self.plan, self.held = plan, _held(plan)
        for device in self.devices:
            state = self.states.get(device)
            if device in self.held:
                self.states[device] = "active"
            elif state in ("active", "draining"):
                self.states[device] = "parked"
            elif state is None:
                self.states[device] = "lost"

    def read(self, step: Step) -> None:
        """Take in the power of a step; where limits have changed since they were shown, that is a frame."""
        changed = []
        for device, limit_w, draw_w in step.power.devices if step.power else ():
            if device not in self.cells:
                continue
            known = self._power.setdefault(device, _Reading(limit_w, limit_w, limit_w, draw_w))
            known.limit_w, known.draw_w = limit_w, draw_w
            if abs(limit_w - known.shown_w) > LEAST_CHANGE * known.shown_w:
                known.shown_w = limit_w
                changed.append(device)
        if changed:
            shown = ", ".join(changed[:8]) + (" and others" if len(changed) > 8 else "")
            self.frame(step.time_s, f"power limits of {shown} change", changed)

    def frame(self, time_s: float, label: str, touched: Iterable[str]) -> None:
        """Add a frame with what changed of the `touched` devices, and of the blocks."""
        cells = []
        for device in touched:
            place, units = self.held.get(device, ("", ""))
            state, power = self.states.get(device, "starting"), self._power.get(device)
            look = Look(state, place if place != device else "", units, power.words if power else "")
            if self._looks.get(device) != look:
                self._looks[device] = look
                cells.append((self.cells[device], look))
        blocks = []
        for index, words in enumerate(_block_words(self.plan, self.num_blocks)):
            if self._words.get(index) != words:
                self._words[index] = words
                blocks.append((index, words))
        if cells or blocks or not self.frames:
            generation = self.plan.generation if self.plan else None
            self.frames.append(
                Frame(time_s=time_s, label=label, generation=generation, cells=tuple(cells), blocks=tuple(blocks))
            )


def _held(plan: PlanView | None) -> dict[str, tuple[str, str]]:
    """Place and units in words of each device of the plan."""
    found = {}
    for replica in plan.replicas if plan else ():
        for slot, device in enumerate(replica.devices):
            if device is not None:
                held = [(kind, counts[slot]) for kind, counts in replica.units if slot < len(counts)]
                units = ", ".join(f"{count} {_plural(kind, count)}" for kind, count in held)
                found[device] = (f"{replica.replica}:{slot}", units)
    return found


def _plural(kind: str, count: int) -> str:
    words = UNIT_WORDS.get(kind, kind)
    return words.removesuffix("s") if count == 1 else words


def _block_words(plan: PlanView | None, num_blocks: int) -> list[str]:
    """What stands over each replica's block."""
    if plan is None:
        return [""] * num_blocks
    known = {replica.replica: replica for replica in plan.replicas}
    words = []
    for index in range(num_blocks):
        replica = known.get(index)
        if replica is None:
            words.append("not in the plan")
        else:
            words.append(f"TP {replica.degree} of {plan.tp_full} · {replica.num_sequences} sequences")
    return words


def home_blocks(data: RunData) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(name, devices) of each replica, then of the spares; from the layout, the plans and devices.json."""
    tp, replicas = data.layout
    names = {f"{replica}:{slot}" for replica in range(replicas) for slot in range(tp)}
    for plan in data.plans.values():
        names |= {device for replica in plan.replicas for device in replica.devices if device is not None}
    names |= {str(row["device"]) for row in data.device_rows if "device" in row}
    blocks: dict[str, list[str]] = {}
    for name in sorted(names, key=_order):
        replica, colon, _ = name.partition(":")
        blocks.setdefault(f"replica {replica}" if colon else "spares", []).append(name)
    return tuple((name, tuple(devices)) for name, devices in blocks.items())


def _order(name: str) -> tuple[int, int, int, str]:
    replica, colon, slot = name.partition(":")
    if colon and replica.isdigit() and slot.isdigit():
        return 0, int(replica), int(slot), name
    digits = name[1:]
    return 1, int(digits) if digits.isdigit() else 0, 0, name


def device_map(data: RunData) -> DeviceMap | None:
    """The map of a run, or None where no device is known."""
    blocks = home_blocks(data)
    if not blocks:
        return None
    num_blocks = sum(name.startswith("replica ") for name, _ in blocks)
    drawing = _Drawing(tuple(device for _, devices in blocks for device in devices), num_blocks)
    drawing.frame(0.0, "the run starts", drawing.devices)
    readings = deque(step for step in data.steps if step.power is not None and step.power.devices)
    has_power = bool(readings) or data.steers_power
    for happening in data.happenings:
        while readings and readings[0].time_s <= happening.time_s:
            drawing.read(readings.popleft())
        drawing.frame(happening.time_s, _label(happening), _apply(drawing, happening, data.plans))
    for step in readings:
        drawing.read(step)
    if data.devices:
        for row in data.device_rows:
            drawing.states[str(row.get("device"))] = str(row.get("state"))
        drawing.frame(data.wall_s, "the end" if data.devices.get("finished") else "now", drawing.devices)
    return DeviceMap(blocks=blocks, frames=tuple(drawing.frames), has_power=has_power)


def _apply(drawing: _Drawing, happening: Happening, plans: Mapping[int, PlanView]) -> Iterable[str]:
    """Take in what happened; returns the devices that may look otherwise."""
    plan = plans.get(happening.generation) if happening.generation is not None else None
    if happening.kind == "took" and plan is not None:
        drawing.adopt(plan)
        return drawing.devices
    device = happening.device
    state = STATE_AFTER.get(happening.kind)
    if device is None or state is None or device not in drawing.cells:
        return ()
    drawing.states[device] = state
    return (device,)


def _label(happening: Happening) -> str:
    if happening.kind == "took":
        return f"generation {happening.generation} is in force"
    if happening.kind == "plan":
        return f"generation {happening.generation} is planned: {happening.text}"
    words = {"fail": "is lost", "return": "is back", "drain": "is to leave"}.get(happening.kind, happening.kind)
    return f"{happening.device} {words}" + (f": {happening.text}" if happening.text else "")


def worst_frame(found: DeviceMap) -> int:
    """Number of the frame at which most devices are missing, then most replicas smaller, then most limits raised.

    Of several the first one; where limits are raised the last one, when they have risen as far as they do.
    """
    states = ["starting"] * len(found.devices)
    words = [""] * len(found.blocks)
    raised = [False] * len(found.devices)
    most, worst = (0, 0, 0, 0), 0
    for number, frame in enumerate(found.frames):
        for index, look in frame.cells:
            states[index] = look.state
            raised[index] = look.power.startswith("▲")
        for index, text in frame.blocks:
            words[index] = text
        lost = sum(state in ("lost", "out") for state in states)
        reduced, parked = sum(is_reduced(text) for text in words), sum(state == "parked" for state in states)
        missing = (lost, reduced, parked, sum(raised))
        if frame.generation is not None and (missing > most or (missing == most and any(raised))):
            most, worst = missing, number
    return worst


def is_reduced(words: str) -> bool:
    """Whether the words over a block say that its replica is smaller than in health, or not in the plan."""
    degree, _, rest = words.removeprefix("TP ").partition(" of ")
    return bool(words) and degree != rest.partition(" ")[0]


def at_frame(found: DeviceMap, number: int) -> tuple[list[Look], list[str]]:
    """(look of each cell, words of each block) in a frame."""
    looks = [Look("starting")] * len(found.devices)
    words = [""] * len(found.blocks)
    for frame in found.frames[: number + 1]:
        for index, look in frame.cells:
            looks[index] = look
        for index, text in frame.blocks:
            words[index] = text
    return looks, words


def map_json(found: DeviceMap) -> str:
    """The frames for the page's script: a table of looks, and the changes of each frame by number."""
    numbers: dict[Look, int] = {}
    frames = []
    for frame in found.frames:
        cells = [[index, numbers.setdefault(look, len(numbers))] for index, look in frame.cells]
        frames.append([frame.time_s, frame.label, cells, [list(block) for block in frame.blocks]])
    looks = [[STATES.get(look.state, ("O", ""))[0], look.state, look.place, look.units, look.power] for look in numbers]
    return json.dumps({"looks": looks, "frames": frames}, separators=(",", ":"))
