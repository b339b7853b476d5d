"""The pieces in which a newcomer's shard is fed: pure geometry."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from runflat.elastic.frames import FeedError
from runflat.parallel.move import Held, Slab, slab_shape
from runflat.plan.units import TENSORS, ModelSpec


def cut_pieces(spec: ModelSpec, slabs: Sequence[Slab], itemsize: int, piece_bytes: int) -> tuple[Slab, ...]:
    """`slabs` in pieces of at most `piece_bytes` (weight and moments), but of at least one unit; in the same order."""
    params = spec.by_name
    pieces: list[Slab] = []
    for slab in slabs:
        if slab.segment < 0:
            pieces.append(slab)
            continue
        one = Slab(slab.param, slab.segment, slab.start, slab.start + 1)
        unit_bytes = len(TENSORS) * itemsize * math.prod(slab_shape(spec, params[slab.param], one))
        step = max(piece_bytes // unit_bytes, 1)
        for start in range(slab.start, slab.stop, step):
            pieces.append(Slab(slab.param, slab.segment, start, min(start + step, slab.stop)))
    return tuple(pieces)


def check_pieces(spec: ModelSpec, held: Held, slabs: Iterable[Slab]) -> bool:
    """Whether `slabs` are all that a device with the units `held` stores, replicated parameters included.

    Raises:
        FeedError: a slab that is no part of the shard, or that overlaps another.
    """
    missing: dict[tuple[str, int], set[int]] = {}
    for param in spec.params:
        for index, segment in enumerate(param.segments):
            missing[param.name, index] = set(held[segment.kind])
        if param.dim is None:
            missing[param.name, -1] = {0}
    for slab in slabs:
        units = {0} if slab.segment < 0 else set(range(slab.start, slab.stop))
        left = missing.get((slab.param, slab.segment), set())
        if not units or not units <= left:
            raise FeedError(f"{slab} is not wanted here, or came twice.")
        left -= units
    return not any(missing.values())
