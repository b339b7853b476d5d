"""Whether what a run occupies stays flat over its faults: descriptors, threads, sockets, ports, processes, memory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from runflat.check.live import Footprint

COUNTED = ("num_processes", "num_descriptors", "num_threads", "num_sockets", "num_ports")
SPARE_COUNT = 0
"""A run whose devices are all there, and whose last group has been dropped, occupies exactly what it did at first."""
SPARE_BYTES = 64 << 20
"""Of all processes together: how far the medians of two windows of a run without a leak may be apart. Measured on some
3.7 GB: up to 29 MB within the first 40 faults, up to 22 MB over 200 (`benchmarks/chaos`), without a direction."""
WARM_UP = 0.25
"""Part of the faults that no window sees: every process has come to its usual size by then."""
LEAST_SAMPLES = 4
"""With fewer in a window its median says nothing."""


@dataclass(frozen=True)
class Sample:
    """What all processes of a run occupied while all devices were there, after `num_faults` faults."""

    num_faults: int
    footprint: Footprint


def at_rest(before: Footprint, now: Footprint) -> bool:
    """Whether nothing that is counted is more than before; groups that were left go some seconds after their plan."""
    return not _more(before, now)


def leaks(before: Footprint, after: Footprint, samples: Sequence[Sample]) -> list[str]:
    """In words what the run occupies more of after all faults than before the first; memory by windows of `samples`."""
    found = [f"{name.removeprefix('num_')}: {one} before, {other} after" for name, one, other in _more(before, after)]
    windows = memory_windows(samples)
    if windows is not None and windows[1] > windows[0] + SPARE_BYTES:
        found.append(f"memory: {windows[0] / 1e6:.0f} MB in the first half after warm-up, {windows[1] / 1e6:.0f} later")
    return found


def memory_windows(samples: Sequence[Sample]) -> tuple[int, int] | None:
    """Median resident bytes of the first and of the second half of the faults after warm-up; None: too few samples."""
    total = max((sample.num_faults for sample in samples), default=0)
    all_there = max((sample.footprint.num_processes for sample in samples), default=0)
    samples = [sample for sample in samples if sample.footprint.num_processes == all_there]  # else one has just gone
    warm = WARM_UP * total
    middle = (warm + total) / 2
    early = [s.footprint.resident_bytes for s in samples if warm <= s.num_faults < middle]
    late = [s.footprint.resident_bytes for s in samples if s.num_faults >= middle]
    if min(len(early), len(late)) < LEAST_SAMPLES:
        return None
    return round(statistics.median(early)), round(statistics.median(late))


def _more(before: Footprint, after: Footprint) -> list[tuple[str, int, int]]:
    pairs = [(name, getattr(before, name), getattr(after, name)) for name in COUNTED]
    return [(name, one, other) for name, one, other in pairs if other > one + SPARE_COUNT]
