"""Where the time of a run went: each device-second has one category, and the parts sum to the total.

Used by the runtime (measured seconds) and by the simulator (predicted seconds), so that the two can be compared
category by category.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path


class Category(StrEnum):
    """What a device did during a second. The order is the order of every table."""

    PRODUCTIVE = "productive"
    """Working on a step that was committed later."""
    IMBALANCE = "imbalance"
    """Waiting for a slower replica or stage in a step that was committed later."""
    START = "start"
    """Before the first step."""
    DETECT = "detect"
    """From the fault until someone with authority said so."""
    REFORM = "reform"
    """Abort, barrier, forming new groups, digest."""
    TRANSFER = "transfer"
    """Moving units to their new holders while training stands still."""
    REPLAY = "replay"
    """Work done a second time: after a restart from a checkpoint, or the discarded part of a step."""
    CHECKPOINT = "checkpoint"
    """Standing still for a save."""
    RESTART = "restart"
    """Stopping all workers, starting them again and loading."""
    PAUSE = "pause"
    """Capped batch rule: too few devices for the target, so training waits."""
    IDLE = "idle"
    """Healthy but unused: a spare, or a live device of a replica that left."""
    FAILED = "failed"
    """Out of service."""


GOODPUT_NAMES: Mapping[Category, str] = {
    Category.PRODUCTIVE: "GOODPUT",
    Category.IMBALANCE: "OTHER",
    Category.START: "TPU_INITIALIZATION + TRAINING_PREP + PROGRAM_STARTUP",
    Category.DETECT: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    Category.REFORM: "ELASTIC_REINITIALIZATION",
    Category.TRANSFER: "ELASTIC_SCALE_UP",
    Category.REPLAY: "WASTED_PROGRESS_FROM_DISRUPTION",
    Category.CHECKPOINT: "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    Category.RESTART: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION + UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    Category.PAUSE: "OTHER",
    Category.IDLE: "ELASTIC_SLICE_DOWN",
    Category.FAILED: "ELASTIC_SLICE_DOWN",
}
"""The nearest badput names of ``ml-goodput-measurement``, printed beside ours."""

_TOLERANCE = 1e-9


@dataclass(slots=True)
class Ledger:
    """Device-seconds by category; grows by :meth:`charge`."""

    device_s: dict[Category, float] = field(default_factory=lambda: dict.fromkeys(Category, 0.0))

    def charge(self, category: Category, seconds: float, num_devices: float = 1.0) -> None:
        """Book ``seconds`` of ``num_devices`` devices under ``category``.

        Raises:
            ValueError: if either is negative: time is booked once and never taken back.
        """
        if seconds < 0 or num_devices < 0:
            raise ValueError(
                f"ledger: cannot book {seconds} s of {num_devices} devices as {category.value}; both must be at least 0"
            )
        self.device_s[category] += seconds * num_devices

    def move(self, source: Category, target: Category, device_s: float) -> None:
        """Book ``device_s`` device-seconds again under another category, as when a step is discarded."""
        self.device_s[source] -= device_s
        self.device_s[target] += device_s

    @property
    def total_device_s(self) -> float:
        """Sum over all categories, in device-seconds."""
        return sum(self.device_s.values())

    def share(self, category: Category) -> float:
        """Fraction 0..1 of the total that ``category`` has; 0 for an empty ledger."""
        total = self.total_device_s
        return self.device_s[category] / total if total else 0.0

    def check(self, num_devices: float, wall_s: float) -> None:
        """Make sure that the parts sum to ``num_devices`` times ``wall_s`` and none is negative.

        Raises:
            ValueError: with both numbers, if time was lost or booked twice.
        """
        wanted = num_devices * wall_s
        slack = _TOLERANCE * max(wanted, 1.0)
        negative = [category.value for category, seconds in self.device_s.items() if seconds < -slack]
        if abs(self.total_device_s - wanted) > slack or negative:
            raise ValueError(
                f"ledger: parts sum to {self.total_device_s!r} device-seconds, but {num_devices} devices were held for "
                f"{wall_s} s, which is {wanted!r}; negative parts: {negative or 'none'}"
            )

    def merge(self, others: Iterable[Ledger]) -> Ledger:
        """A new ledger with the sums of this one and ``others``."""
        total = Ledger(dict(self.device_s))
        for other in others:
            for category, seconds in other.device_s.items():
                total.device_s[category] += seconds
        return total

    def to_json(self) -> dict[str, float]:
        """Device-seconds by category name, in table order."""
        return {category.value: self.device_s[category] for category in Category}

    @classmethod
    def from_json(cls, row: Mapping[str, float]) -> Ledger:
        """The ledger that :meth:`to_json` wrote; a missing category is 0.

        Raises:
            ValueError: for a name that is no category.
        """
        ledger = cls()
        for name, seconds in row.items():
            if name not in Category.__members__.values():
                allowed = ", ".join(category.value for category in Category)
                raise ValueError(f"ledger: unknown category {name!r}; allowed: {allowed}")
            ledger.device_s[Category(name)] = float(seconds)
        return ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One disturbance and what it cost: who, what was decided, seconds per phase, bytes moved."""

    number: int
    device: str
    cause: str
    started_s: float
    """Seconds since the start of the run."""
    strategy: str
    """Link of the chain that handled it."""
    phases_s: Mapping[str, float]
    """Seconds of each phase in order, such as ``{"detect": 0.02, "abort": 0.01, ...}``."""
    bytes_moved: int = 0
    replayed_steps: float = 0.0
    generation: int | None = None
    words: tuple[str, ...] = ()
    """What the chain could not do before it found something that it could."""

    @property
    def stopped_s(self) -> float:
        """Seconds during which training stood still."""
        return sum(self.phases_s.values())

    def to_json(self) -> dict[str, object]:
        """The incident as a JSON object; ``record`` keeps it apart from events in one file."""
        return {"record": "incident", **asdict(self), "stopped_s": self.stopped_s}


def append_json_line(path: Path, row: Mapping[str, object]) -> None:
    """Append one JSON object as a line, so that a reader of a running job sees whole rows."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
