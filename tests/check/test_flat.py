"""What a run occupies: flat or not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runflat.check.flat import COUNTED, SPARE_BYTES, Sample, at_rest, leaks, memory_windows
from runflat.check.live import Footprint

BEFORE = Footprint(
    num_descriptors=368, num_threads=92, num_sockets=172, resident_bytes=3_600_000_000, num_ports=33, num_processes=11
)


def samples(early_bytes: int, late_bytes: int) -> list[Sample]:
    """One every five of 200 faults: small at first, then `early_bytes`, in the second half of the rest `late_bytes`."""
    sizes = [3_000_000_000 if n < 50 else early_bytes if n < 125 else late_bytes for n in range(0, 201, 5)]
    return [Sample(5 * n, replace(BEFORE, resident_bytes=size)) for n, size in enumerate(sizes)]


@pytest.mark.parametrize("name", COUNTED)
def test_one_more_of_anything_is_a_leak(name: str) -> None:
    """Catches a rule that lets a descriptor, a thread or a port of a generation that was left stay for ever."""
    after = replace(BEFORE, **{name: getattr(BEFORE, name) + 1})
    assert len(leaks(BEFORE, after, [])) == 1
    assert name.removeprefix("num_") in leaks(BEFORE, after, [])[0]
    assert not at_rest(BEFORE, after)
    assert at_rest(after, BEFORE)
    assert leaks(BEFORE, BEFORE, []) == []


def test_memory_is_compared_after_warm_up() -> None:
    """Catches growth over the faults that no comparison sees, and processes that warm up taken for a leak."""
    size = 3_700_000_000
    assert memory_windows(samples(size, size)) == (size, size)
    assert leaks(BEFORE, BEFORE, samples(size, size + SPARE_BYTES)) == []
    (found,) = leaks(BEFORE, BEFORE, samples(size, size + SPARE_BYTES + 1))
    assert found.startswith("memory: 3700 MB")


def test_memory_without_a_process_that_has_just_died_is_not_compared() -> None:
    """Catches a window that looks small because a worker was gone and nobody knew it yet."""
    size = 3_700_000_000
    fewer = [Sample(s.num_faults, replace(BEFORE, resident_bytes=1, num_processes=10)) for s in samples(size, size)]
    assert memory_windows([*fewer, *samples(size, size), *fewer]) == (size, size)


def test_few_samples_say_nothing_of_memory() -> None:
    """Catches a short run judged by one look at it."""
    assert memory_windows([]) is None
    assert memory_windows(samples(1, 2)[:11][::3]) is None
