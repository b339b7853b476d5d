"""How many sequences each replica gets (design: a step)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from enum import StrEnum

from runflat.errors import PlanError


class BatchRule(StrEnum):
    """What becomes of the global batch when replicas are hit."""

    CONSTANT = "constant"
    """Sequences are redistributed and steps get longer."""
    CAPPED = "capped"
    """Each replica has a limit; training pauses while the limits do not add up to the batch."""
    FLEXIBLE = "flexible"
    """Hit replicas do fewer sequences and the batch shrinks."""


def split_batch(num_sequences: int, seconds_per_sequence: Sequence[float]) -> tuple[int, ...]:
    """Sequences per replica, summing to `num_sequences`, that minimise the slowest replica's time.

    Each sequence goes to the replica that would finish it first; for a sum of equal pieces this greedy rule is optimal.
    Ties go to the replica with the lower index. A replica so slow that it gets no sequence should leave the plan.

    Args:
        num_sequences: sequences of the global batch.
        seconds_per_sequence: time of one sequence on each replica, in any common unit.
    """
    if num_sequences < 1:
        raise PlanError(f"a global batch of {num_sequences} sequences cannot be split: use at least one sequence.")
    counts = [0] * len(seconds_per_sequence)
    heap = [(seconds, replica) for replica, seconds in enumerate(seconds_per_sequence)]
    heapq.heapify(heap)
    for _ in range(num_sequences):
        _, replica = heapq.heappop(heap)
        counts[replica] += 1
        heapq.heappush(heap, ((counts[replica] + 1) * seconds_per_sequence[replica], replica))
    return tuple(counts)


def share_batch(
    rule: BatchRule, num_sequences: int, cap: int, seconds_per_sequence: Sequence[float], full_s: float
) -> tuple[tuple[int, ...], bool]:
    """Sequences of each replica under a batch rule, and whether the job must pause.

    Args:
        rule: what becomes of the batch.
        num_sequences: sequences of the whole batch in health.
        cap: most sequences of a full replica; not used by the constant rule.
        seconds_per_sequence: seconds of one sequence on each working replica.
        full_s: the same for a full replica.
    """
    if rule is BatchRule.CONSTANT:
        return split_batch(num_sequences, seconds_per_sequence), False
    # A replica's limit is what it finishes in the time that a full one needs for the cap; 1e-9 forgives rounding.
    limits = tuple(int(cap * full_s / seconds + 1e-9) for seconds in seconds_per_sequence)
    if rule is BatchRule.FLEXIBLE:
        # Where the batch does not divide, some healthy replicas do one fewer; the batch never exceeds the target.
        surplus = max(sum(limits) - num_sequences, 0)
        if not any(limits):  # a batch of nothing trains nothing: the fastest does one, later than a full one would
            fastest = min(range(len(limits)), key=lambda index: seconds_per_sequence[index])
            return tuple(int(index == fastest) for index in range(len(limits))), False
        return tuple(limit - (index < surplus) for index, limit in enumerate(limits)), False
    return _fill(num_sequences, seconds_per_sequence, limits), sum(limits) < num_sequences


def _fill(num_sequences: int, seconds_per_sequence: Sequence[float], limits: Sequence[int]) -> tuple[int, ...]:
    """Like `split_batch`, but no replica exceeds its limit; stops when all are full."""
    wished = split_batch(num_sequences, seconds_per_sequence)
    counts = [min(wish, limit) for wish, limit in zip(wished, limits, strict=True)]
    while sum(counts) < min(num_sequences, sum(limits)):
        open_ = [index for index, limit in enumerate(limits) if counts[index] < limit]
        counts[min(open_, key=lambda index: (counts[index] + 1) * seconds_per_sequence[index])] += 1
    return tuple(counts)


def micro_batches(num_sequences: int, micro_batch: int) -> tuple[int, ...]:
    """Sizes of a replica's micro-batches: as even as possible, none above `micro_batch` sequences."""
    return even_shares(num_sequences, -(-num_sequences // micro_batch))


def even_shares(total: int, num_shares: int) -> tuple[int, ...]:
    """`total` in shares that differ by at most one, the larger ones first; they may be 0."""
    size, larger = divmod(total, num_shares)
    return tuple(size + (index < larger) for index in range(num_shares))
