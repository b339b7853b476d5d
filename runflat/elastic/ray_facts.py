"""A job's site on Ray as data: what it is made of, what happens to it, what is then done; `ray_site` decides.

A *group* is asked for as a whole (a placement group): the devices of a replica, which share a node, or spares. A *seat*
is one device's actor, a `runflat worker`. Ray places groups and reports ends; training itself is the controller's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Rules:
    """How long the site waits for what, and what a group is made of."""

    wait_s: float = 600.0
    """For all groups to be placed; then training starts with the replicas that are."""
    pending_s: float = 300.0
    """For a group, before it is said again, or asked for as far as a node can hold it."""
    start_s: float = 300.0
    """For an actor in a group that is placed."""
    late_wait_s: float = 120.0
    """For workers to call a controller that starts without all of them."""
    resume_after_s: float = 20.0
    """After the end of a controller, for workers to save."""
    back_off_s: float = 1.0
    max_back_off_s: float = 60.0
    steady_s: float = 60.0
    """An actor that lived so long starts again at once."""
    max_errors: int = 5
    """Python errors of a seat in a row, after which it stays out."""
    may_span: bool = False
    """Whether a group may lie on several nodes."""


@dataclass(frozen=True)
class Group:
    """Seats that are placed together, `asked` of them: rank `ranks[i]` has bundle i. `since`: when it was asked for."""

    name: str
    ranks: tuple[int, ...]
    asked: int
    placed: bool = False
    since: float = 0.0
    due: float = 0.0


class SeatStage(Enum):
    """Where a seat's actor stands."""

    AWAITED = "awaited"
    STARTING = "starting"
    UP = "up"
    OVER = "over"
    OUT = "out"


@dataclass(frozen=True)
class Seat:
    """One device, and its newest actor, the `life`th; an AWAITED one starts at `since`."""

    rank: int
    device: str
    group: str
    stage: SeatStage = SeatStage.AWAITED
    life: int = 0
    since: float = 0.0
    losses: int = 0
    errors: int = 0


@dataclass(frozen=True)
class Site:
    """All groups and seats, and the controller: `running`, and if it has died, when it is started again."""

    groups: Mapping[str, Group]
    seats: Mapping[int, Seat]
    began: float = 0.0
    running: bool = False
    starts: int = 0
    restart_at: float | None = None
    committed: int = 0
    """Steps when the controller that runs was started, as far as is known."""
    stop_asked: bool = False


# ---- what happens


@dataclass(frozen=True)
class Begin:
    """The site opens."""


@dataclass(frozen=True)
class Placed:
    """Ray has found room for a group, on `nodes`."""

    group: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Displaced:
    """Nodes of a group are gone; Ray looks for others."""

    group: str


@dataclass(frozen=True)
class Up:
    """An actor runs, on `node`."""

    rank: int
    life: int
    node: str


@dataclass(frozen=True)
class Gone:
    """An actor has died, or its node."""

    rank: int
    life: int
    text: str


@dataclass(frozen=True)
class Failed:
    """An actor's own code could not go on."""

    rank: int
    life: int
    text: str


@dataclass(frozen=True)
class Over:
    """An actor was told that the run is over."""

    rank: int
    life: int


@dataclass(frozen=True)
class ControllerEnded:
    """The controller has done what it could, with this exit code."""

    code: int
    text: str


@dataclass(frozen=True)
class ControllerGone:
    """The controller's actor has died, with `committed` steps in the books."""

    text: str
    committed: int


@dataclass(frozen=True)
class StopAsked:
    """A person wants the run to end."""


@dataclass(frozen=True)
class Tick:
    """Time passes; `room` says how many more devices each living node could hold, if nobody else uses it."""

    room: tuple[int, ...] = ()


Happening = Begin | Placed | Displaced | Up | Gone | Failed | Over | ControllerEnded | ControllerGone | StopAsked | Tick

# ---- what is done


@dataclass(frozen=True)
class Ask:
    """Ask Ray for room for `size` devices."""

    group: str
    size: int


@dataclass(frozen=True)
class Drop:
    """Ask no longer."""

    group: str


@dataclass(frozen=True)
class StartSeat:
    """Start the actor of a seat in a bundle of its group."""

    rank: int
    life: int
    device: str
    group: str
    bundle: int


@dataclass(frozen=True)
class EndSeat:
    """Kill the actor of a seat."""

    rank: int
    life: int


@dataclass(frozen=True)
class StartController:
    """Start the controller; it waits `wait_s` for workers to call, and goes on with the run if it is to `resume`."""

    resume: bool
    wait_s: float


@dataclass(frozen=True)
class Interrupt:
    """Have the controller end the run in order."""


@dataclass(frozen=True)
class Say:
    """A line for people."""

    text: str


@dataclass(frozen=True)
class End:
    """Close the site."""

    code: int
    text: str


Action = Ask | Drop | StartSeat | EndSeat | StartController | Interrupt | Say | End
