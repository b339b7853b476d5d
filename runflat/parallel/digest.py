"""Digests of state, bit by bit: which units differ between their holders.

A digest is a sum modulo 2**64 of the elements' bits, each times an odd number that depends on where it lies in its
unit. So one flipped bit always changes it, and exchanged elements do as good as always. It does not depend on what else
the device holds or in which order. Equal digests do not prove that the arithmetic behind a state was right: a wrong
gradient that reaches all holders alike is not seen here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from runflat.parallel.comms import Comms
from runflat.plan.plan import Place
from runflat.plan.units import REPLICATED, Kind, ModelSpec, ParamSpec
from runflat.plan.zero import ParamHeld

SCALARS = "scalars"
NOT_HELD = torch.iinfo(torch.int64).min
"""Stands for a unit that this device does not hold; no digest has this value."""

_BLOCK = 1 << 15  # elements whose 64-bit products exist at a time: they stay in the processor's cache
_BLOCK_CUDA = 1 << 24
_ROW = 4096
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def unit_digests(
    spec: ModelSpec,
    held: Mapping[str, Sequence[int]],
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    scalars: Sequence[float],
) -> torch.Tensor:
    """Digests of a device's state: by kind and unit, then replicated parameters, then scalars; int64 [units + 2].

    Every holder of a unit gets the same value for it whatever else it holds; `NOT_HELD` marks the other units.

    Args:
        spec: the model.
        held: units per kind that the device holds.
        tensors: per kind of tensor ("weight", "exp_avg", ...) the local shard of each parameter by name.
        scalars: what must be equal on all devices besides: optimizer step, learning rate.
    """
    device = next(iter(next(iter(tensors.values())).values())).device
    index = _UnitIndex(spec, held, device)
    digests = torch.zeros(index.size + 2, dtype=torch.int64, device=device)
    _add_up(spec, tensors, index.of, digests)
    numbers = torch.tensor(list(scalars), dtype=torch.float64, device=device).view(torch.int64)
    digests[-1] = (numbers * odd_weights(len(numbers), 4, device)).sum()
    digests.clamp_(min=NOT_HELD + 1)
    digests[:-2][~index.is_held] = NOT_HELD
    return digests


def piece_digests(
    spec: ModelSpec, kept: ParamHeld, tensors: Mapping[str, Mapping[str, torch.Tensor]], device: torch.device
) -> torch.Tensor:
    """Digests of the pieces that a device keeps of sharded optimizer state, by parameter, kind and unit; int64.

    To be put after `unit_digests` of the weights. Owner and mirror of a piece update it on their own, so that they must
    agree; the weights of all other holders come from the owner and say nothing for it. `NOT_HELD` marks what the device
    does not keep.

    Args:
        spec: the model.
        kept: the pieces.
        tensors: weights and moments of just these, by kind of tensor and parameter; parameters without may be missing.
        device: where the digests are to be.
    """
    offsets, size = _piece_offsets(spec)
    digests = torch.zeros(size, dtype=torch.int64, device=device)
    is_kept = torch.zeros(size, dtype=torch.bool, device=device)

    def axes(param: ParamSpec) -> _Axes:
        held = kept.get(param.name, {})
        if param.dim is None:
            count = param.shape[0] if any(held.values()) else 0
            return _joined([(torch.full((count,), offsets[param.name, REPLICATED]), torch.arange(count))], device)
        return _joined(
            [_axis(spec.kind(s.kind), held[s.kind], offsets[param.name, s.kind]) for s in param.segments], device
        )

    for name, kind in offsets:
        units = torch.tensor(kept.get(name, {}).get(kind, ()), dtype=torch.int64)
        is_kept[(units + offsets[name, kind]).to(device)] = True
    _add_up(spec, tensors, axes, digests)
    digests.clamp_(min=NOT_HELD + 1)
    digests[~is_kept] = NOT_HELD
    return digests


_Axes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Per index of a shard's partitioned dim: place among the digests, position in the unit, segment."""


def _add_up(
    spec: ModelSpec,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    axes_of: Callable[[ParamSpec], _Axes],
    digests: torch.Tensor,
) -> None:
    """Add the weighted bits of each tensor to the digests of its units."""
    longest = max(max(param.shape) for param in spec.params)
    before, rows, after = (odd_weights(longest, salt, digests.device) for salt in (1, 2, 3))
    for param in spec.params:
        if not any(param.name in by_name for by_name in tensors.values()):
            continue
        units, positions, segments = axes_of(param)
        for kind, by_name in tensors.items():
            seeds = [_seed(param.name, kind, segment) for segment in range(max(len(param.segments), 1))]
            sums = _axis_sums(_words(by_name[param.name].detach(), param.dim or 0), before, after)
            weights = rows[positions] * torch.tensor(seeds, device=digests.device)[segments]
            digests.index_add_(0, units, sums * weights)


def compare(spec: ModelSpec, digests: torch.Tensor, comms: Comms) -> list[tuple[str, int]]:
    """The (kind, unit) that are not the same on all their holders; (REPLICATED, 0) and (SCALARS, 0) for the rest.

    One all-reduce over the world; all devices get the same answer. Which holder is wrong cannot be told from it.

    Raises:
        CommsError: a member was lost.
    """
    # max(d) and max(~d) = ~min(d) in one reduction: the complement turns the order round and cannot overflow. A device
    # that does not hold a unit contributes the least value to both.
    both = torch.cat([digests, torch.where(digests == NOT_HELD, NOT_HELD, ~digests)])
    comms.wait([comms.world.launch_all_reduce(both, "max")], "comparison of digests")
    largest, smallest = both[: len(digests)], ~both[len(digests) :]
    differ = (largest != smallest) & (largest != NOT_HELD)
    positions = differ.nonzero().flatten().tolist()
    names = _names(spec) if positions else []
    return [names[position] for position in positions]


def votes(
    spec: ModelSpec, digests: torch.Tensor, differ: Sequence[tuple[str, int]], comms: Comms
) -> dict[tuple[str, int], dict[Place, int]]:
    """For each (kind, unit) of `differ`, as `compare` gave it, the digest of each of its holders, by place.

    One all-reduce over the world; all devices get the same answer.

    Raises:
        CommsError: a member was lost.
    """
    position_of = {name: position for position, name in enumerate(_names(spec))}
    own = digests[[position_of[name] for name in differ]]
    table = torch.full((comms.world.size, len(differ)), NOT_HELD, dtype=torch.int64, device=digests.device)
    table[comms.world.rank] = own
    comms.wait([comms.world.launch_all_reduce(table, "max")], "votes on digests")
    columns = table.t().tolist()
    return {
        name: {place: digest for place, digest in zip(comms.world.members, column, strict=True) if digest != NOT_HELD}
        for name, column in zip(differ, columns, strict=True)
    }


def _names(spec: ModelSpec) -> list[tuple[str, int]]:
    """What each digest is of, in order; those of kept pieces are there only where optimizer state is sharded."""
    units = [(kind.name, unit) for kind in spec.kinds for unit in range(kind.num_units)]
    return [*units, (REPLICATED, 0), (SCALARS, 0), *_piece_names(spec)]


def _piece_names(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    for param in spec.params:
        for kind in param.kinds:
            words = f"kept {param.name}" if kind == REPLICATED else f"kept {param.name} {kind}"
            yield from ((words, unit) for unit in range(_num_units(spec, kind)))


def _piece_offsets(spec: ModelSpec) -> tuple[dict[tuple[str, str], int], int]:
    """Where the digests of each (parameter, kind) begin, and how many there are."""
    offsets: dict[tuple[str, str], int] = {}
    size = 0
    for param in spec.params:
        for kind in param.kinds:
            offsets[param.name, kind] = size
            size += _num_units(spec, kind)
    return offsets, size


def _num_units(spec: ModelSpec, kind: str) -> int:
    return 1 if kind == REPLICATED else spec.kind(kind).num_units


def checksum(words: torch.Tensor) -> int:
    """Checksum of a flat int64 tensor, as a signed 64-bit number; every single flipped bit changes it."""
    num_rows = len(words) // _ROW
    columns = odd_weights(_ROW, 5, words.device)
    head = _weighted_rows(words[: num_rows * _ROW].view(num_rows, _ROW), columns)
    tail = (words[num_rows * _ROW :] * columns[: len(words) % _ROW]).sum()
    rows = odd_weights(num_rows + 1, 6, words.device)
    return int((head * rows[:num_rows]).sum() + tail * rows[num_rows])


def odd_weights(count: int, salt: int, device: torch.device) -> torch.Tensor:
    """Odd pseudo-random numbers, int64 [count]: the same on every machine for the same `salt`."""
    x = torch.arange(count, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15)
    x += _signed(salt * 0x632BE59BD9B4E019)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return x | 1


def _signed(value: int) -> int:
    """The signed 64-bit number with the bits of `value`."""
    return (value & (1 << 64) - 1) - (1 << 64 if value & (1 << 63) else 0)


def _seed(name: str, kind: str, segment: int) -> int:
    """An odd number for one segment of one tensor of a parameter."""
    digest = hashlib.blake2b(f"{name}/{kind}/{segment}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True) | 1


def _words(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The bits of `tensor` as integers [A, L, B] around its dim `dim`.

    Several small elements make one 64-bit word where B allows it: B is not partitioned, so all holders do the same.
    """
    num_before, num_after = tensor.shape[:dim].numel(), tensor.shape[dim + 1 :].numel()
    flat = tensor.contiguous()
    if flat.storage_offset():  # a view may start where no 64-bit word may
        flat = flat.clone()
    whole_words = num_after * flat.element_size() % 8 == 0
    bits = flat.view(-1).view(torch.int64 if whole_words else _BITS[flat.element_size()])
    return bits.view(num_before, tensor.shape[dim], -1)


def _blocks(num_rows: int, num_columns: int, device: torch.device) -> Iterator[slice]:
    size = _BLOCK_CUDA if device.type == "cuda" else _BLOCK
    step = max(size // max(num_columns, 1), 1)
    return (slice(start, start + step) for start in range(0, num_rows, step))


def _weighted_rows(bits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Per row of `bits` [R, C]: the sum of its elements times `weights` [>= C], int64 [R]."""
    num_rows, num_columns = bits.shape
    sums = torch.empty(num_rows, dtype=torch.int64, device=bits.device)
    for block in _blocks(num_rows, num_columns, bits.device):
        torch.sum(bits[block] * weights[:num_columns], dim=1, out=sums[block])
    return sums


def _weighted_columns(bits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Per column of `bits` [R, C]: the sum of its elements times `weights` [>= R], int64 [C]."""
    sums = torch.zeros(bits.shape[1], dtype=torch.int64, device=bits.device)
    for block in _blocks(bits.shape[0], bits.shape[1], bits.device):
        sums += (bits[block] * weights[: bits.shape[0]][block, None]).sum(dim=0)
    return sums


def _axis_sums(words: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Weighted sums of `words` [A, L, B] over A and B, int64 [L]."""
    num_before, size, num_after = words.shape
    sums = words.view(num_before * size, num_after)
    sums = _weighted_rows(sums, after) if num_after > 1 else sums
    sums = sums.view(num_before, size)
    return _weighted_columns(sums, before) if num_before > 1 else sums[0].to(torch.int64)


class _UnitIndex:
    """For each index of a shard's partitioned dim: its unit's place among the digests and where in the unit it is."""

    def __init__(self, spec: ModelSpec, held: Mapping[str, Sequence[int]], device: torch.device):
        self._axes: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.size = sum(kind.num_units for kind in spec.kinds)
        self.is_held = torch.zeros(self.size, dtype=torch.bool, device=device)
        offset = 0
        for kind in spec.kinds:
            places, positions = _axis(kind, held[kind.name], offset)
            self._axes[kind.name] = places.to(device), positions.to(device)
            self.is_held[places.to(device)] = True
            offset += kind.num_units

    def of(self, param: ParamSpec) -> _Axes:
        """(place among the digests, position in the unit, segment) per index of the local shard of `param`.

        A replicated parameter counts as one unit, partitioned along its first dim.
        """
        if param.dim is None:
            positions = torch.arange(param.shape[0], device=self.is_held.device)
            return torch.full_like(positions, self.size), positions, torch.zeros_like(positions)
        return _joined([self._axes[segment.kind] for segment in param.segments], self.is_held.device)


def _axis(kind: Kind, units: Sequence[int], offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(place among the digests, position in the unit) per index of a segment that has `units` of `kind`."""
    sizes = torch.tensor([kind.size_of((unit,)) for unit in units], dtype=torch.int64)
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    places = (torch.tensor(units, dtype=torch.int64) + offset).repeat_interleave(sizes)
    return places, torch.arange(len(starts)) - starts


def _joined(axes: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> _Axes:
    """The axes of a parameter's segments, one after the other."""
    places = torch.cat([places for places, _ in axes]).to(device)
    positions = torch.cat([positions for _, positions in axes]).to(device)
    segments = torch.cat([torch.full_like(places, at) for at, (places, _) in enumerate(axes)]).to(device)
    return places, positions, segments
