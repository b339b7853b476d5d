"""How many sequences each replica gets (design: a step)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from runflat.errors import PlanError


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


def micro_batches(num_sequences: int, micro_batch: int) -> tuple[int, ...]:
    """Sizes of a replica's micro-batches: as even as possible, none above `micro_batch` sequences."""
    count = -(-num_sequences // micro_batch)
    size, larger = divmod(num_sequences, count)
    return tuple(size + (index < larger) for index in range(count))
