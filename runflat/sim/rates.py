"""What a job in a given state of health does per second: sequences, busy and idle devices, watts.

The state is a list of replica classes, so that the cost of a question depends on how many kinds of damage there are
and not on the size of the cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from runflat.plan.batch import BatchRule
from runflat.power.reach import PowerLimits
from runflat.power.views import IDLE_POWER
from runflat.sim.times import Line, Times


@dataclass(frozen=True, slots=True)
class Boost:
    """Limit of each survivor of a hit group, and how many times as fast it is as at the nominal limit."""

    limit_w: float
    speed: float
    limited_by: str
    """``need`` if the wanted speed is reached, else ``device`` or ``domain``."""


@dataclass(frozen=True, slots=True)
class ReplicaClass:
    """Replicas that are alike: how many, devices lost in the most hit stage, and (lost, groups) over all of them."""

    num: int
    worst: int
    groups: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Rates:
    """What the job does from one event to the next; devices are counted as (possibly fractional) equivalents."""

    step_s: float
    """Seconds of a step; infinite when nothing runs."""
    sequences: int
    """Sequences committed per step; 0 while pausing."""
    working: float
    """Devices that take part in steps (they also are the ones that wait in a recovery)."""
    busy: float
    """Of those, the equivalents that compute; the rest waits for slower ones."""
    watts: float
    """Draw of all working devices while running."""
    boosted: int
    """Devices above their nominal limit."""
    num_reduced: int
    """Replicas at a reduced degree."""
    capacity: int
    """Sequences that the limits allow (capped and flexible), else the batch."""

    @property
    def sequences_per_s(self) -> float:
        """Committed sequences per second."""
        return self.sequences / self.step_s if self.sequences else 0.0


class RateSource(Protocol):
    """Who answers what a set of replicas does; implementations: :class:`RateTable`, ``Decided``."""

    def rates(self, classes: Sequence[ReplicaClass]) -> Rates:
        """The rates when these replicas work."""


class RateTable:
    """Answers what a state of health yields; holds the lines of each lost count, boosted where asked.

    Args:
        times: Step times.
        tp_full: Full degree.
        num_sequences: Sequences of the global batch.
        local_batch: Sequences of a replica in health.
        cap: Sequences that a full replica may do under ``capped``.
        rule: Batch rule.
        power: Limits for a boost; None for none.
        domain_size: Devices of a domain, for its power budget.
    """

    def __init__(
        self,
        times: Times,
        *,
        tp_full: int,
        num_sequences: int,
        local_batch: int,
        cap: int | None = None,
        rule: BatchRule = BatchRule.CONSTANT,
        power: PowerLimits | None = None,
        boost: bool = False,
        domain_size: int = 0,
    ) -> None:
        self._times, self._tp_full, self._power = times, tp_full, power
        self._num_sequences, self._local_batch = num_sequences, local_batch
        self._rule, self._boost = rule, boost and power is not None
        self._domain_size = domain_size or tp_full
        full = times.line(0)
        assert full is not None
        self._full = full
        self._cap = cap if cap is not None and rule is BatchRule.CAPPED else local_batch
        self._lines: dict[int, tuple[Line | None, Boost]] = {}
        self._nominal_w = power.nominal_w if power else 0.0

    @property
    def healthy_step_s(self) -> float:
        """Seconds of a step with all replicas whole."""
        return self._full.at(self._local_batch)

    def line(self, lost: int) -> tuple[Line | None, Boost]:
        """Line of a replica whose most hit stage lost ``lost``, and the boost of that stage's survivors."""
        if lost not in self._lines:
            self._lines[lost] = self._boosted(lost)
        return self._lines[lost]

    def _boosted(self, lost: int) -> tuple[Line | None, Boost]:
        plain = self._times.line(lost)
        none = Boost(self._nominal_w, 1.0, "need")
        if plain is None or lost == 0 or not self._boost:
            return plain, none
        assert self._power is not None
        wanted_s = self._full.at(self._local_batch)
        low, high = 1.0, 4.0
        for _ in range(40):  # bisection to 1e-12: how much faster the survivors would have to be
            speed = (low + high) / 2
            line = self._times.line(lost, speed)
            assert line is not None
            low, high = (low, speed) if line.at(self._local_batch) <= wanted_s else (speed, high)
        live = self._tp_full - lost
        others = self._domain_size - self._tp_full
        found = self._power.reach([(high, live)], num_others=others, num_dead=lost)
        boost = Boost(found.limits_w[0], found.pace * high, found.limited_by)
        return self._times.line(lost, boost.speed), boost

    def rates(self, classes: Sequence[ReplicaClass]) -> Rates:
        """The rates when these replicas work; a class that gets no sequence waits."""
        lines: list[Line] = []
        nums: list[int] = []
        kept: list[ReplicaClass] = []
        for entry in classes:
            line, _ = self.line(entry.worst)
            if line is not None and entry.num:
                lines.append(line)
                nums.append(entry.num)
                kept.append(entry)
        if not kept:
            return Rates(float("inf"), 0, 0.0, 0.0, 0.0, 0, 0, 0)
        if self._rule is BatchRule.CONSTANT:
            capacity = self._num_sequences
            limits = None
        else:
            limit_s = self._full.at(self._cap)
            limits = [min(line.most(limit_s), self._cap) for line in lines]
            capacity = sum(limit * num for limit, num in zip(limits, nums, strict=True))
        if self._rule is BatchRule.FLEXIBLE:
            assert limits is not None
            step_s = self._full.at(self._local_batch) if any(limits) else float("inf")
            total = min(capacity, self._num_sequences)
            each: list[float] = [float(limit) for limit in limits]
        elif capacity < self._num_sequences:
            assert limits is not None
            step_s, total, each = float("inf"), 0, [0.0] * len(lines)
        else:
            total = self._num_sequences
            step_s, each = split_by_class(total, lines, nums, limits)
        return self._account(kept, lines, each, step_s, total, capacity)

    def _account(
        self,
        classes: Sequence[ReplicaClass],
        lines: Sequence[Line],
        each: Sequence[float],
        step_s: float,
        total: int,
        capacity: int,
    ) -> Rates:
        """Devices that work, the equivalents that are busy, and watts."""
        working, busy, watts, boosted, reduced = 0.0, 0.0, 0.0, 0, 0
        running = total > 0
        for entry, sequences in zip(classes, each, strict=True):
            if running and sequences <= 0:
                continue
            reduced += entry.num if entry.worst else 0
            for lost, num_groups in entry.groups:
                line, boost = self.line(lost)
                assert line is not None
                devices = num_groups * (self._tp_full - lost)
                seconds, limit_w = self._eased(line.at(sequences), step_s, boost) if running else (0.0, 0.0)
                share = min(seconds / step_s, 1.0) if running else 0.0
                working += devices
                busy += devices * share
                if running:
                    boosted += devices if limit_w > self._nominal_w else 0
                    watts += devices * (limit_w * share + self._nominal_w * IDLE_POWER * (1 - share))
                else:
                    watts += devices * self._nominal_w * IDLE_POWER
        return Rates(step_s, total, working, busy, watts, boosted, reduced, capacity)

    def _eased(self, seconds: float, step_s: float, boost: Boost) -> tuple[float, float]:
        """(seconds, limit) of a boosted device that gets no more power than its share of the batch takes."""
        if boost.limit_w <= self._nominal_w or seconds >= step_s:
            return seconds, boost.limit_w
        assert self._power is not None
        speed = max(boost.speed * seconds / step_s, 1.0)
        return seconds * boost.speed / speed, min(self._power.limit_w(speed), boost.limit_w)


def split_by_class(
    total: int, lines: Sequence[Line], nums: Sequence[int], limits: Sequence[int] | None = None
) -> tuple[float, list[float]]:
    """Least seconds in which replicas finish ``total`` whole sequences, and the mean sequences of a replica by class.

    The counterpart of ``plan.batch.split_batch`` for millions of devices: it works on classes of equal replicas, and
    on lines instead of seconds per sequence. A test holds the two together.

    Args:
        total: Sequences to share out.
        lines: Line of each class.
        nums: Replicas of each class.
        limits: Most sequences of a replica of each class; their sum over replicas must reach ``total``.
    """
    classes = range(len(lines))
    start_s = _relaxed_s(total, lines, nums)

    def limit(c: int) -> float:
        return float("inf") if limits is None else limits[c]

    counts = [min(lines[c].most(start_s), limit(c)) for c in classes]
    have = sum(n * count for n, count in zip(nums, counts, strict=True))
    step_s = max(lines[c].at(counts[c]) for c in classes)
    shares = [float(count) for count in counts]
    while have < total:
        c = min((c for c in classes if counts[c] < limit(c)), key=lambda c: lines[c].at(counts[c] + 1))
        counts[c] += 1
        have += nums[c]
        step_s = max(step_s, lines[c].at(counts[c]))
        shares[c] = counts[c] - max(have - total, 0) / nums[c]
    return step_s, shares


def _relaxed_s(total: int, lines: Sequence[Line], nums: Sequence[int]) -> float:
    """Seconds if fractional sequences were allowed: whole ones need at least that. Too slow classes take no part."""
    active = list(range(len(lines)))
    while True:
        rate = sum(nums[c] / lines[c].per_sequence_s for c in active)
        offset = sum(nums[c] * lines[c].fixed_s / lines[c].per_sequence_s for c in active)
        seconds = (total + offset) / rate
        fast = [c for c in active if lines[c].fixed_s < seconds]
        if len(fast) == len(active):
            return seconds
        active = fast
