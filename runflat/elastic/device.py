"""One device as the controller sees it: its standing, what it was heard to say, what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Standing(StrEnum):
    """What a device is to the job; the words of devices.json."""

    STARTING = "starting"
    """Its process starts, imports, tests itself."""
    STANDBY = "standby"
    """Tested; waits for a place, or is being fed."""
    ACTIVE = "active"
    """Trains."""
    DRAINING = "draining"
    """Trains, and leaves at the next step boundary."""
    LOST = "lost"
    """Failed; comes back after its back-off, or when a person says so."""
    PARKED = "parked"
    """Healthy, but without work: drained, or of a replica that left."""
    OUT = "out"
    """Failed too often: stays out until a person says return."""


LIVE = (Standing.ACTIVE, Standing.DRAINING)
PRESENT = (Standing.STARTING, Standing.STANDBY, *LIVE)


@dataclass(frozen=True)
class Device:
    """One device as the controller sees it. Times are seconds since the start of the run."""

    name: str
    standing: Standing
    since: float
    incarnation: int = 0
    hello: bool = False
    present: bool = True
    """Its process may still exist."""
    heard: float = 0.0
    waiting_s: float = 0.0
    """Recent seconds between two heartbeats in which it waited for peers."""
    waited_s: float = 0.0
    """Seconds that its process has waited for peers, as far as heard."""
    intervals: tuple[float, ...] = ()
    """Recent times between heartbeats."""
    phase: str = "import"
    waits_for: str | None = None
    since_when: float = 0.0
    """Since when it waits, or works without waiting."""
    committed: int = 0
    holds: int = -1
    """Generation of the plan whose units it has complete."""
    failures: int = 0
    """How often it was lost, as its back-off counts: from the start, or since a person or a script let it return."""
    num_losses: int = 0
    """How often it was lost."""
    heals: int = 0
    """How often its bits were wrong."""
    restart_at: float | None = None
    by_word: bool = False
    """Comes back only when a person says so."""
    scripted: bool = False
    """A script strikes it, and says when it comes back, each time."""
    awaited: bool = False
    """No plan is made before its process is up: the run begins, or starts again."""
    ending: bool = False
    """Its process is to end for a restart; then a new one starts."""
    healthy: bool = False
    """Starts although it had not failed: its replica becomes whole, or it is a spare."""
    surplus: bool = False
    """Parked because its replica left, so it comes back with it."""
    killed_at: float | None = None
    fault_at: float | None = None
    """Since when it was at fault, where it was killed for that."""
    cause: str = ""
    """Why it was killed or lost."""
