"""The split of the batch is the best one, and micro-batches are even."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runflat.errors import PlanError
from runflat.plan.batch import even_shares, micro_batches, split_batch


@given(st.integers(1, 8), st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_split_is_optimal(num_sequences: int, seconds: list[int]) -> None:
    """Catches a split by proportion and rounding, which can leave one replica with one sequence too many."""
    found = split_batch(num_sequences, seconds)
    assert sum(found) == num_sequences
    best = min(
        max(count * each for count, each in zip(counts, seconds, strict=True))
        for counts in itertools.product(range(num_sequences + 1), repeat=len(seconds))
        if sum(counts) == num_sequences
    )
    assert max(count * each for count, each in zip(found, seconds, strict=True)) == best


def test_split_of_equal_replicas() -> None:
    """Catches a remainder that does not go to the first replicas, so that two processes could disagree."""
    assert split_batch(11, [2.0, 2.0, 2.0, 2.0]) == (3, 3, 3, 2)


def test_slow_replica_gets_nothing() -> None:
    """Catches a sequence that is forced on a replica which would then hold up all others."""
    assert split_batch(4, [1.0, 1.0, 8.0]) == (2, 2, 0)


def test_empty_batch() -> None:
    """Catches a batch of nothing that is planned."""
    with pytest.raises(PlanError, match="batch of 0 sequences"):
        split_batch(0, [1.0])


@given(st.integers(1, 100), st.integers(1, 100))
def test_micro_batches(num_sequences: int, micro_batch: int) -> None:
    """Catches a sequence that falls between two micro-batches, and a last one that is nearly empty."""
    sizes = micro_batches(num_sequences, micro_batch)
    assert sum(sizes) == num_sequences
    assert max(sizes) <= micro_batch
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-num_sequences // micro_batch)


@given(st.integers(0, 100), st.integers(1, 20))
def test_even_shares(total: int, num_shares: int) -> None:
    """Catches a token that no or two devices have, and shares that differ by more than one."""
    shares = even_shares(total, num_shares)
    assert (len(shares), sum(shares)) == (num_shares, total)
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)
