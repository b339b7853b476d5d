"""What a simulation is asked: cluster, job, failures, costs, power, strategies. A TOML file has the same names."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from runflat.cluster.ledger import Category
from runflat.cluster.topology import Topology
from runflat.errors import ConfigError
from runflat.plan.batch import BatchRule
from runflat.plan.strategies import Chain, Strategy, parse_chain
from runflat.power.curve import PowerCurve, curve_named
from runflat.power.reach import PowerLimits
from runflat.sim.job import Costs, Phases
from runflat.sim.times import ProportionalTimes
from runflat.traces.generate import FailureSource
from runflat.traces.trace import DAY_S

MOST_FAILURES = 1e7
"""Failures of one draw: more do not fit in memory, and no job runs through them."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ClusterConfig(_Frozen):
    """Devices held."""

    hardware: str = ""
    """Name of the device type, such as ``h100``; with a model it gives the step time."""
    domain_size: int = Field(default=8, ge=1)
    """Devices joined by fast links: 8 in a server, 72 in an NVL72 rack."""
    spare_domains: int = Field(default=0, ge=0)
    """Whole domains held as spares."""
    spare_devices: int = Field(default=0, ge=0)
    """Single devices held as spares that can take any slot."""
    price_per_device_h: float | None = Field(default=None, ge=0)
    """Price of a device for an hour, in any currency."""


class JobConfig(_Frozen):
    """One training job in health."""

    tp: int = Field(ge=1)
    pp: int = Field(default=1, ge=1)
    dp: int = Field(ge=1)
    local_batch: int = Field(default=8, ge=1)
    """Sequences of each replica per step."""
    micro_batch: int = Field(default=1, ge=1)
    virtual_stages: int = Field(default=1, ge=1)
    seq_len: int = Field(default=8192, ge=1)
    """Tokens of a sequence."""
    model: str | None = None
    """Model whose step time the step-time model predicts; without it, ``step_s`` and proportional work."""
    step_s: float = Field(default=10.0, gt=0)
    """Seconds of a healthy step."""
    degrees: tuple[int, ...] = ()
    """Reduced degrees that may be used; empty for all."""
    attention_heads: int | None = Field(default=None, ge=1)
    """Query heads: a degree that does not divide them makes some devices do more."""
    attention_share: float = Field(default=0.25, ge=0, le=1)
    """Share of the step spent in attention, where heads are given."""
    memory_limit: float = Field(default=math.inf, gt=1, allow_inf_nan=True)
    """How many times as much of the model a survivor can hold as in health: 1.2 admits TP 7 of 8, not 6."""


class RecoveryConfig(_Frozen):
    """What disturbances cost, in seconds during which the job stands still."""

    start_s: float = Field(default=0.0, ge=0)
    detect_s: float = Field(default=30.0, ge=0)
    """From the fault until it is known."""
    reform_s: float = Field(default=15.0, ge=0)
    """Abort, barrier, forming groups, digest."""
    transfer_s: float = Field(default=10.0, ge=0)
    """Moving the lost units to their new holders."""
    join_s: float = Field(default=2.0, ge=0)
    """Stop while a returned device joins (most of its transfer runs under compute)."""
    warm_up_s: float = Field(default=0.0, ge=0)
    """From the return of a device until it may join: start, imports, self-test; training goes on meanwhile."""
    restart_s: float = Field(default=600.0, ge=0)
    """Stop, schedule, start, initialise, load."""
    restart_to_rejoin: bool = False
    """Chains of ``restart`` alone: restart on purpose once a repaired replica can join, instead of waiting for the
    next failure."""
    checkpoint_interval_s: Annotated[float, Field(gt=0)] | Literal["optimum"] = "optimum"
    """Running seconds between saves; ``optimum`` is sqrt(2 x save x time between failures), at least a step."""
    checkpoint_save_s: float = Field(default=5.0, ge=0)
    """Seconds that a save stops training."""
    copy_every: int = Field(default=0, ge=0)
    """Steps between copies in memory (``train.memory_every`` of a run), to which a restart goes back; 0: saves only."""
    discard_step: bool = True
    """Whether a loss throws the step in flight away."""


class PowerConfig(_Frozen):
    """Power of a device, in watts."""

    curve: str = "ntp"
    """Named curve, or ``exponent:0.4``."""
    points: tuple[tuple[float, float], ...] = ()
    """A curve of one's own: (power over tdp_w, relative speed)."""
    tdp_w: float = Field(gt=0)
    nominal_w: float = Field(gt=0)
    """Limit in health."""
    max_w: float = Field(gt=0)
    """Highest limit that device and site allow."""
    domain_budget_w: float | None = Field(default=None, gt=0)

    def limits(self) -> PowerLimits:
        """The limits that the static rule works with."""
        curve = PowerCurve(self.points) if self.points else curve_named(self.curve)
        return PowerLimits(
            curve=curve,
            tdp_w=self.tdp_w,
            nominal_w=self.nominal_w,
            max_w=self.max_w,
            domain_budget_w=self.domain_budget_w,
        )


class SimConfig(_Frozen):
    """A whole question to the simulator."""

    name: str = "simulation"
    cluster: ClusterConfig = ClusterConfig()
    job: JobConfig
    failures: FailureSource | None = None
    """Failures by chance; or ``trace``."""
    trace: Path | None = None
    """A recorded trace instead."""
    trace_node_size: int = Field(default=1, ge=1)
    """Devices that each row of the trace takes down."""
    trace_num_nodes: int | None = Field(default=None, ge=1)
    """Devices or nodes that were watched, where the trace names only those that failed."""
    recovery: RecoveryConfig = RecoveryConfig()
    power: PowerConfig | None = None
    strategies: tuple[str, ...] = ("drop", "restart", "ntp,drop,restart")
    """Chains to compare; ``ntp+boost`` gives survivors more power."""
    rule: BatchRule = BatchRule.CONSTANT
    cap: int | None = Field(default=None, ge=1)
    """Capped: sequences that a full replica may do; none for its local batch."""
    repack: bool = True
    """Whether hit groups are put together into the fewest replicas."""
    days: float = Field(default=30.0, gt=0, le=36525)
    seeds: int = Field(default=10, ge=1)
    first_seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _one_source(self) -> SimConfig:
        if (self.failures is None) == (self.trace is None):
            raise ValueError(
                "give either 'failures' (by chance) or 'trace' (a recorded file), not both and not neither"
            )
        for text in self.strategies:
            try:
                parse_candidate(text)
            except ConfigError as error:
                # Inside pydantic only a ValueError gets the key and the file in front of it.
                raise ValueError(f"strategies: {error}") from None
        expected = self.failures_per_s() * self.days * DAY_S
        if expected > MOST_FAILURES:
            raise ValueError(
                f"about {expected:.3g} failures in {self.days:g} days are more than the {MOST_FAILURES:.0e} that are "
                "simulated: lower the failure rate or the number of days"
            )
        return self

    @property
    def topology(self) -> Topology:
        """Devices held."""
        return Topology(
            tp_full=self.job.tp,
            dp=self.job.dp,
            pp=self.job.pp,
            domain_size=self.cluster.domain_size,
            num_spare_domains=self.cluster.spare_domains,
            num_spare_devices=self.cluster.spare_devices,
        )

    def proportional_times(self) -> ProportionalTimes:
        """Step times in proportion to work."""
        job = self.job
        units = ((job.attention_share, job.attention_heads),) if job.attention_heads else ()
        return ProportionalTimes(
            step_s=job.step_s,
            tp_full=job.tp,
            local_batch=job.local_batch,
            micro_batch=job.micro_batch,
            pp=job.pp,
            virtual_stages=job.virtual_stages,
            degrees=job.degrees,
            units=units,
            memory_limit=job.memory_limit,
        )

    def costs(self, failures_per_s: float, step_s: float) -> Costs:
        """Seconds of each recovery, and the checkpoint interval for a failure rate of the whole cluster.

        Args:
            failures_per_s: Failures of all devices held.
            step_s: Seconds of a healthy step.
        """
        given = self.recovery
        detect = (Category.DETECT, given.detect_s)
        reform = (Category.REFORM, given.reform_s)
        transfer = (Category.TRANSFER, given.transfer_s)
        join: Phases = ((Category.REFORM, given.join_s),)
        return Costs(
            start_s=given.start_s,
            loss={
                Strategy.SPARE: (detect, reform, transfer),
                Strategy.NTP: (detect, reform, transfer),
                Strategy.DROP: (detect, reform),
                Strategy.RESTART: (detect, (Category.RESTART, given.restart_s)),
            },
            gain={
                Strategy.SPARE: join,
                Strategy.NTP: join,
                Strategy.DROP: join,
                # On purpose: saved just before, so nothing has to be found out or done again.
                Strategy.RESTART: ((Category.RESTART, given.restart_s),),
            },
            discard_step=given.discard_step,
            checkpoint_interval_s=self._interval_s(failures_per_s, step_s),
            checkpoint_save_s=given.checkpoint_save_s,
            copy_every=given.copy_every,
        )

    def _interval_s(self, failures_per_s: float, step_s: float) -> float:
        """Running seconds between saves."""
        given = self.recovery.checkpoint_interval_s
        if given != "optimum":
            return given
        if failures_per_s <= 0:
            return math.inf
        # Saves that cost nothing are made after every step.
        return max(math.sqrt(2 * self.recovery.checkpoint_save_s / failures_per_s), step_s)

    def failures_per_s(self) -> float:
        """Rate of failures of all devices held; 0 for a recorded trace, whose rate is not known before it is read."""
        return self.failures.per_device_day * self.topology.num_devices / DAY_S if self.failures else 0.0


def parse_candidate(text: str) -> tuple[Chain, bool]:
    """(chain, boost) of a text such as ``spare,ntp+boost,drop``.

    Raises:
        ConfigError: for an unknown link, or a boost without ``ntp``.
    """
    boost = "+boost" in text
    chain = parse_chain(text.replace("ntp+boost", "ntp"))
    return chain, boost


def load_config(path: Path) -> SimConfig:
    """The configuration in a TOML file; a trace's path is taken relative to the file.

    Raises:
        ConfigError: if the file cannot be read, or naming the key that is wrong.
    """
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}. Give a TOML file, or --preset") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    config = config_from(values, source=str(path))
    if config.trace is not None and not config.trace.is_absolute():
        config = config.model_copy(update={"trace": path.parent / config.trace})
    return config


def checked(config: SimConfig, *, source: str) -> SimConfig:
    """`config`, whose values were changed after it was read, checked again.

    Raises:
        ConfigError: naming source, key and problem.
    """
    return config_from(config.model_dump(), source=source)


def config_from(values: object, *, source: str) -> SimConfig:
    """The configuration with the given values.

    Raises:
        ConfigError: naming source, key and problem.
    """
    try:
        return SimConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        words = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:
            raise ConfigError(f"{source}: {words}") from None
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{source}: {key}: {words} (given: {str(first['input'])[:80]})") from None
