"""What the controller knows: the frozen facts on which `protocol.decide` decides."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from runflat.elastic.device import Standing
from runflat.elastic.messages import MemoryCopy, Status
from runflat.elastic.orders import Move, Origins
from runflat.elastic.planning import Planner
from runflat.elastic.roster import Roster
from runflat.plan.plan import Plan
from runflat.plan.strategies import Decision


class Stage(StrEnum):
    """Where the job is. A fault in any stage but the last leads to ABORT."""

    START = "start"
    """Processes start; waits for each to say hello."""
    ABORT = "abort"
    """Everybody leaves the old generation; waits for statuses, and for the end of what was killed."""
    READY = "ready"
    """The next plan is out; waits until all have adopted it."""
    FORM = "form"
    """Groups form, units move; waits until all run."""
    PAUSE = "pause"
    """Capped batch rule, and below the target: waits for a device."""
    RUN = "run"
    """Training."""
    FINISHED = "finished"
    """The end, good or bad."""


SAME_MEMBERS = "same members"
"""Stands for a link of the chain where nobody has to leave or to come."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """All times and counts of the protocol. `timeout_s` is the user's one knob; it caps the waits for a step.

    Time-outs that a user has to nest by trial are a trap of their own (torchtitan#2899).
    """

    timeout_s: float = 60.0
    start_s: float = 300.0
    """Longest start of a process, and longest load of weights."""
    heartbeat_floor_s: float = 5.0
    heartbeat_factor: float = 20.0
    """A heartbeat is late after this many of its median intervals."""
    progress_floor_s: float = 10.0
    progress_factor: float = 20.0
    """No commit is suspicious after this many median steps."""
    suspicion_s: float = 0.5
    """How long an exit that explains a failed collective is waited for."""
    confirm_s: float = 2.0
    """How long a killed process may take to be gone; then it is taken as cut off."""
    asleep_s: float = 1.5
    """Ticks further apart than this mean that the controller itself did not run."""
    batch_s: float = 0.5
    """Losses this close together are one failure as long as no step has been tried in between."""
    max_failures: int = 3
    """Failures without a commit after which the job stops; the same for formations."""
    max_losses: int = 5
    """Failures of one device after which it stays out."""
    slow_factor: float = 1.5
    """A replica is slow that takes this many times as long for its work as the fastest one does."""
    slow_steps: int = 20
    """In how many steps in a row it must be."""
    drain_slow: bool = False
    """Whether a device leaves that makes its replica slow."""
    max_heals: int = 3
    """Times that a device's bits were wrong after which it leaves."""
    digest_every: int = 0
    """Steps between digests, or 0; where they are compared, checkpoints are known to be good."""
    back_off_s: float = 1.0
    """Waiting time after a device's first failure; doubles with each."""
    auto_return: bool = True
    """Whether a lost device's process is started again without being asked for."""


@dataclass(frozen=True)
class Distrust:
    """Holders differ: who is wrong in which units (`kind number`), and the holders of units where nobody knows.

    `fresh`: those that are wrong have not taken part in a step yet.
    """

    wrong: Mapping[str, tuple[str, ...]]
    unclear: Mapping[str, tuple[str, ...]]
    fresh: bool = False


@dataclass(frozen=True)
class Suspicion:
    """Collectives failed in `generation`; whoever reported it is an end of a broken link, or innocent."""

    generation: int
    since: float
    ends: tuple[str, ...]
    text: str
    forming: bool


@dataclass(frozen=True)
class Flake:
    """A link flake that was answered by the same members under `successor`."""

    generation: int
    successor: int
    ends: tuple[str, ...]


class GrowthStage(StrEnum):
    """How far a change at a step boundary is."""

    LISTEN = "listen"
    FEED = "feed"
    PREPARE = "prepare"
    SWITCH = "switch"


def all_among(wanted: Collection[str], names: Collection[str]) -> bool:
    """Whether all of `wanted` are in `names`, of which most calls have fewer: then none is looked up."""
    return len(names) >= len(wanted) and set(wanted) <= set(names)


@dataclass(frozen=True)
class Growth:
    """A change of plan at a step boundary, prepared while training goes on: devices join, or one leaves."""

    generation: int
    plan: Plan
    decision: Decision
    stage: GrowthStage
    since: float
    began: float
    joining: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()
    origins: Origins | None = None
    """Where optimizer state is sharded: what each device has."""
    answered: frozenset[str] = frozenset()
    addresses: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    fed_bytes: Mapping[str, int] = field(default_factory=dict)
    marks: tuple[tuple[str, float], ...] = ()
    """(stage, seconds it took), in order."""

    @property
    def everyone(self) -> tuple[str, ...]:
        """Devices of the new plan and those that leave."""
        return (*self.plan.devices, *self.leaving)

    @property
    def all_answered(self) -> bool:
        """Whether everyone has answered in this stage."""
        return all_among(self.everyone, self.answered)


@dataclass(frozen=True)
class Disturbance:
    """An incident that is under way: who, what, and the seconds of each phase so far."""

    number: int
    devices: tuple[str, ...]
    cause: str
    started: float
    mark: float
    """When the phase that is under way began."""
    step: int
    in_flight_s: float
    """Age of the step in flight when the fault was noticed: what a discard repeats."""
    strategy: str = SAME_MEMBERS
    """Heaviest link of the chain that it took."""
    words: tuple[str, ...] = ()
    phases_s: tuple[tuple[str, float], ...] = ()
    bytes_moved: int = 0
    action: str = "discard"

    def lap(self, phase: str, now: float) -> Disturbance:
        """With the time since the last mark booked as `phase`."""
        return replace(self.add(phase, now - self.mark), mark=now)

    def add(self, phase: str, seconds: float) -> Disturbance:
        """With `seconds` booked as `phase`, wherever the mark is."""
        phases = dict(self.phases_s)
        phases[phase] = phases.get(phase, 0.0) + seconds
        return replace(self, phases_s=tuple(phases.items()))


@dataclass(frozen=True)
class State:
    """Everything that a decision depends on. Only `protocol.decide` makes new ones."""

    planner: Planner
    limits: Limits
    start_step: int
    generation: int
    """Highest number given out."""
    secret: str
    """Part of the tokens by which feeds prove that they are ours."""
    network: Mapping[str, Any] | None = None
    stage: Stage = Stage.START
    stage_since: float = 0.0
    devices: Roster = field(default_factory=Roster)
    plan: Plan | None = None
    """The plan in force, or being taken up."""
    plans: Mapping[int, Plan] = field(default_factory=dict)
    """Plans whose units some device may hold, by generation."""
    decision: Decision | None = None
    answered: frozenset[str] = frozenset()
    """Who has given what the stage waits for."""
    formed: frozenset[str] = frozenset()
    statuses: Mapping[str, Status] = field(default_factory=dict)
    worker_phases_s: Mapping[str, float] = field(default_factory=dict)
    committed: int = 0
    scalars: tuple[float, ...] | None = None
    """Those of step committed-1."""
    valid_from: int = 0
    """Commits of older generations do not count: the run went back behind them."""
    committed_at: float | None = None
    """When the last step was committed; None before the first of a generation."""
    progress_at: float = 0.0
    checked_at: float = 0.0
    """When a lack of progress was looked into without finding who is to blame."""
    step_seconds: tuple[float, ...] = ()
    failures: int = 0
    """Failures since the last commit."""
    failed_at: float = 0.0
    tried: bool = True
    """Whether a step has been tried since the last failure."""
    formfails: int = 0
    suspicion: Suspicion | None = None
    flakes: tuple[Flake, ...] = ()
    distrust: Distrust | None = None
    """Whose bits must not be used, until a digest is good again."""
    clean: int = 0
    """Up to this step every commit was made of bits that a digest has found good."""
    compared: frozenset[int] = frozenset()
    """Recent steps at which a digest was good, so that copies in memory of them are."""
    loading: bool = True
    """Whether the plan that is taken up has everybody load weights, which may take long."""
    too_low: int = 0
    """No degree up to this one fits in memory."""
    paces: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """Per replica: recent seconds for each unit of work that the plan gives it."""
    slow: Mapping[int, float] = field(default_factory=dict)
    """Replicas that are slower than their plan says, and how many times."""
    slowest: Mapping[int, str] = field(default_factory=dict)
    """Per slow replica the device that makes it so."""
    shared_for: Mapping[int, float] = field(default_factory=dict)
    """The `slow` for which the batch was last shared."""
    shares_due: bool = False
    """Whether the batch is to be shared anew: what power can do for a replica has changed."""
    growth: Growth | None = None
    leaving: frozenset[str] = frozenset()
    """Devices that the next plan leaves out because they were asked to leave."""
    grown: Growth | None = None
    """The change that has just been made, until its first commit."""
    growth_fails: int = 0
    considered: frozenset[str] = frozenset()
    """Devices with which a change was considered in vain."""
    woken: frozenset[str] = frozenset()
    """Devices standing by for which it was considered whose processes to start."""
    stop_asked: bool = False
    done: frozenset[str] = frozenset()
    stopped: bool = False
    disturbance: Disturbance | None = None
    num_incidents: int = 0
    checkpoint: tuple[int, str] | None = None
    """(step, folder) of the newest published checkpoint."""
    start_checkpoint: str | None = None
    """Folder from which the run starts, if it does not start afresh."""
    ticked: float = 0.0

    def live(self) -> tuple[str, ...]:
        """Devices that train and have not been killed."""
        return self.devices.standings.live

    def members(self) -> tuple[str, ...]:
        """Devices of the plan."""
        return self.plan.devices if self.plan else ()

    def all_in(self, names: Collection[str]) -> bool:
        """Whether all devices of the plan are among `names`."""
        return all_among(self.members(), names)

    def standing(self, *standings: Standing) -> tuple[str, ...]:
        """Names of the devices with one of these standings."""
        return self.devices.standings.names(*standings)

    def standby(self) -> tuple[str, ...]:
        """Devices that are tested and wait, and have not been killed."""
        return self.devices.standings.standby

    def dying(self) -> tuple[str, ...]:
        """Devices that train, were killed, and whose end is not confirmed yet."""
        return self.devices.standings.dying

    @property
    def median_step_s(self) -> float | None:
        """Median of recent steps, or None before the first."""
        return statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def step_limit_s(self) -> float:
        """Longest time without a commit that is not suspicious."""
        if self.median_step_s is None:
            return self.limits.timeout_s
        wanted = max(self.limits.progress_floor_s, self.limits.progress_factor * self.median_step_s)
        return min(self.limits.timeout_s, wanted)

    def copies(self) -> dict[str, tuple[MemoryCopy, ...]]:
        """Copies in memory by the device that has them, as the statuses say."""
        return {device: status.memory for device, status in self.statuses.items()}
