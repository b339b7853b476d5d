"""Failures made by chance: components with rates, repair times and blast radius; bursts; weak nodes; seeded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from runflat.traces.trace import DAY_S, FailureTrace, Floats, Ints

HOUR_S = 3600.0

LLAMA3_TABLE: tuple[tuple[str, int, bool, int], ...] = (
    *(("faulty GPU", 148, True, 1), ("GPU HBM3 memory", 72, True, 1), ("software bug", 54, False, 1)),
    *(("network switch or cable", 35, True, 1), ("host maintenance", 32, False, 8), ("GPU SRAM memory", 19, True, 1)),
    *(("GPU system processor", 17, True, 1), ("NIC", 7, True, 1), ("NCCL watchdog", 7, False, 1)),
    *(("silent data corruption", 6, True, 1), ("GPU thermal interface and sensor", 6, True, 1), ("SSD", 3, True, 8)),
    *(("power supply", 3, True, 8), ("server chassis", 2, True, 8), ("IO expansion board", 2, True, 8)),
    *(("dependency", 2, False, 1), ("CPU", 2, True, 8), ("system memory", 2, True, 8)),
)
"""(component, unexpected interruptions, hardware, devices hit) in 54 days on 16,384 H100: arXiv 2407.21783, Table 5.

419 in all. How many devices a failure takes is ours: parts of the server take all eight."""
LLAMA3_DEVICE_DAYS = 54 * 16_384


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Repair(_Frozen):
    """How long a device is out; hours. Which fields count depends on ``kind``."""

    kind: Literal["fixed", "exponential", "lognormal", "weibull", "empirical"] = "fixed"
    hours: float = Field(default=24.0, ge=0)
    """``fixed``: the value; ``exponential``: the mean; ``lognormal``: the median; ``weibull``: the scale."""
    shape: float = Field(default=1.0, gt=0)
    """``lognormal``: sigma of the logarithm; ``weibull``: the shape k."""
    values_h: tuple[float, ...] = ()
    """``empirical``: durations to draw from."""

    @model_validator(mode="after")
    def _has_values(self) -> Repair:
        if (self.kind == "empirical") != bool(self.values_h):
            raise ValueError("repair: 'values_h' goes with kind 'empirical', which needs at least one value")
        return self

    @property
    def mean_h(self) -> float:
        """Mean duration in hours."""
        if self.kind == "lognormal":
            return self.hours * math.exp(self.shape**2 / 2)
        if self.kind == "weibull":
            return self.hours * math.gamma(1 + 1 / self.shape)
        return sum(self.values_h) / len(self.values_h) if self.values_h else self.hours

    def sample_s(self, rng: np.random.Generator, size: int) -> Floats:
        """``size`` durations in seconds."""
        if self.kind == "fixed":
            hours = np.full(size, self.hours)
        elif self.kind == "exponential":
            hours = rng.exponential(self.hours, size)
        elif self.kind == "lognormal":
            hours = self.hours * np.exp(self.shape * rng.standard_normal(size))
        elif self.kind == "weibull":
            hours = self.hours * rng.weibull(self.shape, size)
        else:
            hours = rng.choice(np.asarray(self.values_h), size)
        return hours * HOUR_S


class Component(_Frozen):
    """One kind of failure."""

    name: str
    per_device_day: float = Field(ge=0)
    """Failures per device and day."""
    repair: Repair = Repair()
    blast: int = Field(default=1, ge=0)
    """Devices that one failure takes down, as an aligned block around its victim: 1 the device, 8 its node, larger
    numbers what a switch serves, 0 the whole domain."""
    blast_share: float = Field(default=1.0, ge=0, le=1)
    """Share of this component's failures that spread so far; the others hit one device."""


class FailureSource(_Frozen):
    """A cluster's failures by chance."""

    components: tuple[Component, ...] = Field(min_length=1)
    rate_scale: float = Field(default=1.0, ge=0)
    """Multiplies every rate."""
    burst_shape: float = Field(default=1.0, gt=0, le=1)
    """Weibull shape of the times between failures: 1 is Poisson, 0.62 was seen by InfiniteHBD-Trace."""
    weak_node_shape: float | None = Field(default=None, gt=0)
    """Gamma shape of how failure-prone a node is (mean 1): none means all alike, 0.9 fits InfiniteHBD-Trace."""
    node_size: int = Field(default=8, ge=1)
    """Devices of a node, for weak nodes."""
    start: Literal["empty", "steady"] = "empty"
    """``empty``: all devices healthy at time 0; ``steady``: failures of ``burn_in_days`` before count as well."""
    burn_in_days: float = Field(default=30.0, ge=0)

    @property
    def per_device_day(self) -> float:
        """Failures per device and day, over all components."""
        return self.rate_scale * sum(component.per_device_day for component in self.components)

    @property
    def mean_repair_h(self) -> float:
        """Mean time that a failed device is out, in hours, weighted by rate."""
        rates = [component.per_device_day for component in self.components]
        means = [component.repair.mean_h for component in self.components]
        return sum(r * m for r, m in zip(rates, means, strict=True)) / sum(rates) if sum(rates) else 0.0

    def generate(self, *, num_devices: int, days: float, domain_size: int, rng: np.random.Generator) -> FailureTrace:
        """Draw a trace; the same generator state gives the same trace to the bit.

        Args:
            num_devices: Devices that can fail.
            days: Length.
            domain_size: Devices of a domain, for blasts that take a whole one.
            rng: The only source of chance.
        """
        burn_s = self.burn_in_days * DAY_S if self.start == "steady" else 0.0
        time_s = self._arrivals_s(rng, num_devices, days * DAY_S + burn_s) - burn_s
        size = len(time_s)
        rates = np.array([component.per_device_day for component in self.components])
        cause: Ints = np.searchsorted(np.cumsum(rates), rng.random(size) * rates.sum(), side="right")
        victim = self._victims(rng, num_devices, size)
        duration_s, blast = np.zeros(size), np.ones(size, dtype=np.int64)
        for code, component in enumerate(self.components):
            mine = np.flatnonzero(cause == code)
            duration_s[mine] = component.repair.sample_s(rng, len(mine))
            if component.blast != 1:
                spreads = mine[rng.random(len(mine)) < component.blast_share]
                blast[spreads] = component.blast or domain_size
        duration_s = np.where(time_s < 0, duration_s + time_s, duration_s)
        keep = np.flatnonzero((duration_s > 0) | (time_s >= 0))
        incident, device = _spread(victim[keep], blast[keep], num_devices)
        row = keep[incident]
        return FailureTrace(
            time_s=np.maximum(time_s[row], 0.0),
            duration_s=duration_s[row],
            device=device,
            cause=cause[row],
            incident=incident,
            causes=tuple(component.name for component in self.components),
            num_devices=num_devices,
            span_s=days * DAY_S,
        )

    def _arrivals_s(self, rng: np.random.Generator, num_devices: int, span_s: float) -> Floats:
        """Times of failures in 0..span_s, ascending."""
        mean_s = DAY_S / (self.per_device_day * num_devices) if self.per_device_day else math.inf
        if math.isinf(mean_s):
            return np.zeros(0)
        if self.burst_shape == 1:
            return np.sort(rng.random(rng.poisson(span_s / mean_s)) * span_s)
        scale_s = mean_s / math.gamma(1 + 1 / self.burst_shape)
        times = np.zeros(0)
        last_s = 0.0
        while last_s < span_s:
            gaps = scale_s * rng.weibull(self.burst_shape, int((span_s - last_s) / mean_s * 1.2) + 16)
            times = np.concatenate((times, last_s + np.cumsum(gaps)))
            last_s = float(times[-1])
        return times[times < span_s]

    def _victims(self, rng: np.random.Generator, num_devices: int, size: int) -> Ints:
        """Device number of each failure's victim."""
        if self.weak_node_shape is None:
            return rng.integers(0, num_devices, size)
        num_nodes = -(-num_devices // self.node_size)
        weights = np.cumsum(rng.gamma(self.weak_node_shape, 1 / self.weak_node_shape, num_nodes))
        node = np.searchsorted(weights, rng.random(size) * weights[-1], side="right")
        victim: Ints = np.minimum(node * self.node_size + rng.integers(0, self.node_size, size), num_devices - 1)
        return victim


def _spread(victim: Ints, blast: Ints, num_devices: int) -> tuple[Ints, Ints]:
    """(failure, device) of each device that goes down: the aligned block of ``blast`` devices around the victim."""
    first = victim // blast * blast
    width = np.minimum(blast, num_devices - first)
    incident = np.repeat(np.arange(len(victim)), width)
    offset = np.arange(len(incident)) - np.repeat(np.cumsum(width) - width, width)
    return incident, first[incident] + offset


def hardware_software(
    failures: float,
    device_days: float,
    *,
    hardware_h: float,
    software_h: float = 3.0,
    hardware_share: float = 0.78,
    blast: int = 1,
) -> tuple[Component, ...]:
    """Two components, hardware and software, at a published rate, with fixed repair times in hours.

    The default split and the three hours are those of arXiv 2504.06095.
    """
    rate = failures / device_days
    return (
        Component(name="hardware", per_device_day=rate * hardware_share, repair=Repair(hours=hardware_h), blast=blast),
        Component(
            name="software", per_device_day=rate * (1 - hardware_share), repair=Repair(hours=software_h), blast=blast
        ),
    )


def llama3_components(*, hardware: Repair, software: Repair) -> tuple[Component, ...]:
    """The components of :data:`LLAMA3_TABLE`, with the given repair times."""
    return tuple(
        Component(
            name=name,
            per_device_day=count / LLAMA3_DEVICE_DAYS,
            repair=hardware if is_hardware else software,
            blast=blast,
        )
        for name, count, is_hardware, blast in LLAMA3_TABLE
    )


def source_like(trace: FailureTrace, *, repair: Literal["empirical", "exponential"] = "empirical") -> FailureSource:
    """A Poisson source with a recorded trace's rate and repair times, resampled or (to show what it hides) exponential.

    Args:
        trace: Recorded trace; each row is one failure.
        repair: How to draw repair times.
    """
    hours: Sequence[float] = [float(value) / HOUR_S for value in trace.duration_s if math.isfinite(value)]
    rate = len(trace) / (trace.num_devices * trace.span_s / DAY_S)
    drawn = (
        Repair(kind="empirical", values_h=tuple(hours))
        if repair == "empirical"
        else Repair(kind="exponential", hours=sum(hours) / len(hours))
    )
    return FailureSource(components=(Component(name="resampled", per_device_day=rate, repair=drawn),), start="steady")
