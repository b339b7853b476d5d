"""Move state where weights and moments do not lie alike (`zero1`): one exchange over the world, piece by piece.

A device stores the weights of all its units, and of each parameter the moments of its kept pieces only. Both lie in the
order in which any shard lies: segment after segment, and inside of one by ascending units.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from runflat.parallel.comms import Comms
from runflat.parallel.move import (
    Held,
    Moved,
    ShardState,
    Slab,
    Written,
    read_parts,
    relayout_param,
    slab_shape,
    write_parts,
)
from runflat.parallel.post import LIMIT_BYTES, exchange, num_words, seal, unseal
from runflat.plan.piece_moves import TENSORS_OF, PieceMove, by_param
from runflat.plan.units import REPLICATED, TENSORS, ModelSpec, ParamSpec, shard_shape
from runflat.plan.zero import ParamHeld


@dataclass(frozen=True)
class Layout:
    """Where units lie in a device's tensors: weights as in any shard with the units `held`, moments as `kept`."""

    held: Held
    kept: ParamHeld

    @classmethod
    def alike(cls, spec: ModelSpec, held: Mapping[str, tuple[int, ...]]) -> Layout:
        """Of a device whose moments lie as its weights do."""
        return cls(held, by_param(spec, held))

    def of(self, tensor: str, param: ParamSpec) -> Held:
        """The units, by kind, of one tensor of `param`."""
        return self.held if tensor == "weight" else self.kept.get(param.name, {})

    def has(self, tensor: str, param: ParamSpec) -> bool:
        """Whether there is anything of one tensor of `param`."""
        return tensor == "weight" or any(self.kept.get(param.name, {}).values())

    def written(self, spec: ModelSpec) -> Iterator[tuple[str, ParamSpec, tuple[int, ...]]]:
        """(tensor, parameter, shape) of all that there is, in the one order of the model."""
        for param in spec.params:
            for tensor in TENSORS:
                if self.has(tensor, param):
                    yield tensor, param, shard_shape(spec, param, self.of(tensor, param))


@dataclass(frozen=True)
class PieceChange:
    """One change of plan as `device` sees it: what moves, the same on all, and how its state lies before and after.

    `devices` are those of the new plan by rank.
    """

    spec: ModelSpec
    moves: tuple[PieceMove, ...]
    devices: Sequence[str]
    device: str
    old: Layout
    new: Layout
    dtype: torch.dtype
    torch_device: torch.device

    @cached_property
    def letters(self) -> Mapping[tuple[str, str], tuple[Written, ...]]:
        """What each message carries, by (source, target)."""
        params = self.spec.by_name
        found: dict[tuple[str, str], list[Written]] = {}
        for move in self.moves:
            slabs = piece_slabs(params[move.param], move.kind, move.start, move.stop)
            parts = [(tensor, slab) for slab in slabs for tensor in TENSORS_OF[move.what]]
            found.setdefault((move.source, move.target), []).extend(parts)
        return {pair: tuple(parts) for pair, parts in sorted(found.items())}

    def numel(self, parts: Sequence[Written]) -> int:
        """Elements of a message."""
        params = self.spec.by_name
        return sum(math.prod(slab_shape(self.spec, params[slab.param], slab)) for _, slab in parts)


def piece_slabs(param: ParamSpec, kind: str, start: int, stop: int) -> tuple[Slab, ...]:
    """The slabs of units start..stop-1 of `kind` in `param`: one per segment that has them."""
    if kind == REPLICATED:
        return (Slab(param.name),)
    return tuple(
        Slab(param.name, index, start, stop) for index, segment in enumerate(param.segments) if segment.kind == kind
    )


def execute_piece_moves(change: PieceChange, state: ShardState, comms: Comms, limit_bytes: int = LIMIT_BYTES) -> Moved:
    """Exchange what `change` moves and lay the state out anew. Called by all devices of the new plan, on its groups.

    `state` is untouched, so that a failure loses nothing. What is received takes the place of what was there.

    Raises:
        CommsError: a member was lost, or a message came damaged or from another step; the text names source and target.
    """
    lengths = {pair: num_words(change.numel(parts) * change.dtype.itemsize) for pair, parts in change.letters.items()}
    out = {
        target: _pack(change, parts, lengths[source, target], state)
        for (source, target), parts in change.letters.items()
        if source == change.device
    }
    into = {
        source: torch.empty(lengths[source, target], dtype=torch.int64, device=change.torch_device)
        for source, target in change.letters
        if target == change.device
    }
    exchange(change.devices, lengths, out, into, change.torch_device, comms, limit_bytes)
    step = state.optimizer_step if state.tensors["weight"] else None
    received: dict[str, dict[str, dict[Slab, torch.Tensor]]] = {tensor: {} for tensor in TENSORS}
    num_bytes = 0
    for source, words in into.items():
        step = unseal(source, change.device, words, step)
        parts = change.letters[source, change.device]
        num_bytes += change.numel(parts) * change.dtype.itemsize
        for tensor, slab, part in read_parts(change.spec, parts, words.view(change.dtype)):
            received[tensor].setdefault(slab.param, {})[slab] = part
    tensors = {tensor: relayout_pieces(change, tensor, state.tensors[tensor], received[tensor]) for tensor in TENSORS}
    return Moved(ShardState(tensors, state.optimizer_step if step is None else step), num_bytes)


def relayout_pieces(
    change: PieceChange,
    tensor: str,
    tensors: Mapping[str, torch.Tensor],
    received: Mapping[str, Mapping[Slab, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """One of `TENSORS` of each parameter in the new layout; parameters of which there is nothing are left out."""
    return {
        param.name: relayout_param(
            change.spec,
            param,
            change.old.of(tensor, param) if param.name in tensors else {kind: () for kind in param.kinds},
            change.new.of(tensor, param),
            tensors.get(param.name),
            received.get(param.name, {}),
        )
        for param in change.spec.params
        if change.new.has(tensor, param)
    }


def _pack(change: PieceChange, parts: Sequence[Written], length: int, state: ShardState) -> torch.Tensor:
    """The message on the wire: its parts row-major, then step count and checksum; int64."""
    words = torch.zeros(length, dtype=torch.int64, device=change.torch_device)
    write_parts(change.spec, parts, change.old.of, state, words.view(change.dtype))
    seal(words, state.optimizer_step)
    return words
