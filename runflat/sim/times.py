"""Seconds that a replica needs for its share of a step, as a line in the number of sequences, by lost devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from runflat.errors import ConfigError
from runflat.plan.strategies import reduced_degree


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a step on one replica: ``fixed_s + sequences * per_sequence_s`` if it has any sequence."""

    fixed_s: float
    per_sequence_s: float

    def at(self, num_sequences: float) -> float:
        """Seconds for a number of sequences; 0 for none."""
        return self.fixed_s + self.per_sequence_s * num_sequences if num_sequences > 0 else 0.0

    def most(self, seconds: float) -> int:
        """Sequences that fit in ``seconds``; rounding errors are forgiven."""
        return max(int((seconds - self.fixed_s) / self.per_sequence_s * (1 + 1e-12) + 1e-9), 0)


class Times(Protocol):
    """How long a replica takes; implementations: :class:`ProportionalTimes`, ``PerfTimes``."""

    def line(self, lost: int, speed: float = 1.0) -> Line | None:
        """Seconds of a replica whose most hit stage lost ``lost`` devices and runs at ``speed``; None if it cannot."""

    def fits(self, lost: int) -> bool:
        """Whether the model fits in the memory of the survivors of a group that lost ``lost``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProportionalTimes:
    """Step time in proportion to the work of the most loaded device, with the bubble of a pipeline.

    Raises:
        ConfigError: if a number is not positive.
    """

    step_s: float
    """Seconds of a healthy step."""
    tp_full: int
    local_batch: int
    """Sequences of a replica in health."""
    micro_batch: int = 1
    pp: int = 1
    virtual_stages: int = 1
    degrees: tuple[int, ...] = ()
    units: tuple[tuple[float, int], ...] = ()
    """(share of the time, number of units) of each partitioned kind; the rest of the time divides evenly."""
    serial_share: float = 0.0
    """Share of the time that does not shrink with the degree (norms, host)."""
    memory_limit: float = float("inf")
    """How many times its healthy share of the model a device can hold."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if min(self.step_s, self.tp_full, self.local_batch, self.micro_batch, self.pp, self.virtual_stages) <= 0:
            raise ConfigError(f"step time, degrees and batch sizes must be above 0: {self}")
        if sum(share for share, _ in self.units) + self.serial_share > 1 + 1e-9:
            raise ConfigError("the shares of units and of serial work add up to more than 1")

    def line(self, lost: int, speed: float = 1.0) -> Line | None:
        """See :class:`Times`."""
        degree = reduced_degree(self.tp_full, lost, self.degrees)
        if degree < 1:
            return None
        bubble = self.micro_batch * (self.pp - 1) / self.virtual_stages
        per_sequence_s = self.step_s / (self.local_batch + bubble) * self._slowdown(degree) / speed
        return Line(per_sequence_s * bubble, per_sequence_s)

    def fits(self, lost: int) -> bool:
        """See :class:`Times`."""
        degree = reduced_degree(self.tp_full, lost, self.degrees)
        return degree > 0 and self.tp_full / degree <= self.memory_limit

    def _slowdown(self, degree: int) -> float:
        """Time at a degree over time at full degree."""
        even = 1 - self.serial_share - sum(share for share, _ in self.units)
        uneven = sum(share * -(-num_units // degree) / -(-num_units // self.tp_full) for share, num_units in self.units)
        return self.serial_share + even * self.tp_full / degree + uneven
