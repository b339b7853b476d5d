"""What the protocol hears and what it may do about it, and the one decision in the making that joins the two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from runflat.cluster.events import Event
from runflat.cluster.ledger import Incident
from runflat.elastic.messages import Message
from runflat.elastic.orders import Exit, Order, Resume
from runflat.elastic.state import Disturbance, Growth, Stage, State
from runflat.plan.plan import Plan


@dataclass(frozen=True)
class Begin:
    """The run begins."""


@dataclass(frozen=True)
class Heard:
    """A message of the present incarnation of `device`."""

    device: str
    message: Message


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class Asked:
    """A person or a script wants something of a device."""

    action: Literal["drain", "kill", "return"]
    device: str
    request: str = ""


@dataclass(frozen=True)
class StopAsked:
    """The run is to end after the step in flight."""


@dataclass(frozen=True)
class Published:
    """A checkpoint has become visible."""

    step: int
    folder: str


@dataclass(frozen=True)
class Powered:
    """The replicas that cannot be boosted beyond a speed at present; all others can as far as the planner knows."""

    speeds: Mapping[int, float]


Happening = Powered | Begin | Heard | Tick | Asked | StopAsked | Published


# What may be done about it.


@dataclass(frozen=True)
class Send:
    """Give an order to a device."""

    device: str
    order: Order


@dataclass(frozen=True)
class Kill:
    """SIGKILL."""

    device: str


@dataclass(frozen=True)
class Start:
    """Start a process for the device."""

    device: str
    incarnation: int


@dataclass(frozen=True)
class Say:
    """A line for people."""

    text: str


@dataclass(frozen=True)
class Reply:
    """The answer to a request."""

    request: str
    ok: bool
    text: str


@dataclass(frozen=True)
class Planned:
    """A plan was decided. The books go back to `resume.committed` where they are further.

    `scalars` are those of step `resume.committed - 1`, for the case that its reports were lost.
    """

    plan: Plan
    resume: Resume
    reason: str
    scalars: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Took:
    """A plan is in force from step `committed` on."""

    plan: Plan
    committed: int


@dataclass(frozen=True)
class Note:
    """An event for events.jsonl."""

    event: Event


@dataclass(frozen=True)
class Opened:
    """An incident begins."""

    disturbance: Disturbance


@dataclass(frozen=True)
class Closed:
    """An incident is over: the first step after it is committed (`first_commit_s` later), or the run has ended."""

    incident: Incident
    devices: tuple[str, ...]
    step: int
    first_commit_s: float | None
    action: str


@dataclass(frozen=True)
class Grew:
    """A change at a step boundary is made: its first step is committed, `stopped_s` later than a step takes."""

    growth: Growth
    step: int
    stopped_s: float


@dataclass(frozen=True)
class Finish:
    """The run ends: well where `text` is None, else with this error."""

    text: str | None = None
    traceback: str | None = None
    user_error: str | None = None
    """Class of the error where the input was at fault."""


Action = Send | Kill | Start | Say | Reply | Planned | Took | Note | Opened | Closed | Grew | Finish


class Turn:
    """One decision in the making: the state so far and the actions so far. Lives no longer than one call."""

    def __init__(self, state: State, now: float):
        """Begin from `state` at time `now`."""
        self.state = state
        self.now = now
        self.actions: list[Action] = []

    def set(self, **changes: Any) -> None:
        """Change fields of the state."""
        self.state = replace(self.state, **changes)

    def device(self, name: str, **changes: Any) -> None:
        """Change fields of a device; a new standing is dated."""
        device = self.state.devices[name]
        if "standing" in changes and changes["standing"] != device.standing:
            changes.setdefault("since", self.now)
        self.set(devices=self.state.devices.changed(replace(device, **changes)))

    def enter(self, stage: Stage) -> None:
        """Go to a stage, in which nobody has answered yet."""
        self.set(stage=stage, stage_since=self.now, answered=frozenset())

    def do(self, *actions: Action) -> None:
        """Add actions."""
        self.actions.extend(actions)

    def send(self, devices: Iterable[str], order: Order) -> None:
        """Give one order to several devices."""
        self.do(*(Send(device, order) for device in devices))

    def say(self, text: str) -> None:
        """Add a line for people."""
        self.do(Say(text))

    def lap(self, phase: str) -> None:
        """Book the time since the last mark of the incident that is under way, if one is."""
        if self.state.disturbance is not None:
            self.set(disturbance=self.state.disturbance.lap(phase, self.now))

    def finish(self, text: str | None = None, traceback: str | None = None, user_error: str | None = None) -> None:
        """End the run, well or with an error: everybody leaves."""
        if self.state.stage is Stage.FINISHED:
            return
        self.send((d.name for d in self.state.devices.values() if d.present), Exit())
        self.enter(Stage.FINISHED)
        self.do(Finish(text, traceback, user_error))
