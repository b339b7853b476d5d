"""Three exchanges of `zero1` for the pieces of one bucket: gradients to owners, sums to mirrors, weights to the rest.

Each is one all-to-all over the bucket's group. A message has its pieces in the order of the bucket, each row-major over
its own units only, so that devices whose shards differ agree on it. Addends are summed in the order of the givers, and
a mirror gets the sum itself: owner and mirror update from the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runflat.parallel.comms import Group
from runflat.plan.plan import Place
from runflat.plan.sync_groups import Members
from runflat.plan.units import ModelSpec, Range, merge_ranges, shard_pieces
from runflat.plan.zero import OwnedPiece, exchanges

Tensors = Mapping[str, torch.Tensor]
"""Local shards by name of the parameter: gradients or weights."""


@dataclass(frozen=True)
class Region:
    """Ranges of one dim of a local shard."""

    param: str
    dim: int
    ranges: tuple[Range, ...]

    def read(self, tensors: Tensors) -> torch.Tensor:
        """Its elements, flat; a copy."""
        shard = tensors[self.param].detach()
        parts = [shard.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return torch.cat(parts, dim=self.dim).reshape(-1)

    def write(self, tensors: Tensors, flat: torch.Tensor) -> None:
        """Put the elements that `read` gives in their place."""
        shard = tensors[self.param].detach()
        shape = list(shard.shape)
        shape[self.dim] = sum(stop - start for start, stop in self.ranges)
        position, source = 0, flat.view(shape)
        for start, stop in self.ranges:
            shard.narrow(self.dim, start, stop - start).copy_(source.narrow(self.dim, position, stop - start))
            position += stop - start


class Regions:
    """Where pieces lie in the shard of a device with the units `held`."""

    def __init__(self, spec: ModelSpec, held: Mapping[str, Sequence[int]]):
        """Nothing is looked up yet."""
        self._spec = spec
        self._held = held
        self._params = spec.by_name
        self._known: dict[str, dict[tuple[int, int], Range]] = {}

    def of(self, name: str, segment: int, units: Iterable[int]) -> Region:
        """The region of `units` of one segment of a parameter; the whole of one that is not cut."""
        param = self._params[name]
        if param.dim is None:
            return Region(name, 0, ((0, param.shape[0]),))
        if name not in self._known:
            pieces = shard_pieces(self._spec, param, self._held)
            self._known[name] = {(piece.segment, piece.unit): (piece.start, piece.stop) for piece in pieces}
        known = self._known[name]
        return Region(name, param.dim, merge_ranges(known[segment, unit] for unit in units))


@dataclass(frozen=True)
class _Part:
    piece: OwnedPiece
    region: Region


class Scatter:
    """The pieces of one bucket on one device. `params` are those that owe it a gradient, `missing` those that still do.

    Use in a step: `launch`, `settle` (waits), then `take` once `work` has ended; after the update `spread`, and
    `arrive` once `work` has ended. A bucket whose group is one device has no `group` and no collective.
    """

    def __init__(
        self,
        pieces: Sequence[OwnedPiece],
        place: Place,
        group: Group | None,
        regions: Regions,
        new: Callable[[int], torch.Tensor],
    ):
        """The part of `place` in `pieces`, which every member of `group` must be given alike."""
        self.group = group
        self._place = place
        self._new = new
        self._peers: Members = group.members if group is not None else (place,)
        held = [piece for piece in pieces if place in piece.holders]
        parts = [_Part(piece, regions.of(piece.param, piece.segment, piece.units)) for piece in held]
        # The pieces that have the same givers lie in a row, so that they are summed at once.
        self._parts = sorted(parts, key=lambda part: part.piece.givers)
        self._owned = [part for part in self._parts if part.piece.owner == place]
        self._needs = exchanges(pieces)
        self.params = {part.piece.param for part in parts}
        self.missing: set[str] = set()
        self.work: Any = None
        self.squared: torch.Tensor = new(0).double().sum()
        self._buffers: tuple[torch.Tensor, ...] = ()
        self._received: dict[Place, torch.Tensor] = {}
        self._summed: torch.Tensor = new(0)

    # ---- gradients

    def launch(self, grads: Tensors) -> None:
        """Send gradients to the owners of their pieces; they are final."""
        if self._needs.reduces:
            self._exchange(
                lambda peer: [p for p in self._parts if p.piece.owner == peer and self._place in p.piece.givers],
                lambda peer: [p for p in self._owned if peer in p.piece.givers],
                lambda part: part.region.read(grads),
            )

    def settle(self, grads: Tensors) -> None:
        """What was sent has come: sum it up, and send the sums to the mirrors."""
        received, self._received, self.work = self._received, {}, None
        blocks: dict[Members, list[_Part]] = {}
        for part in self._owned:
            blocks.setdefault(part.piece.givers, []).append(part)
        sums: list[torch.Tensor] = [self._new(0)]
        positions = dict.fromkeys(received, 0)
        for givers, block in blocks.items():
            numel = sum(part.piece.numel for part in block)
            total: torch.Tensor | None = None
            for giver in givers:
                if giver == self._place:
                    addend = torch.cat([part.region.read(grads) for part in block])
                else:
                    addend = received[giver][positions[giver] : positions[giver] + numel]
                    positions[giver] += numel
                total = addend.clone() if total is None else total.add_(addend)
            assert total is not None
            sums.append(total)
        self._summed = torch.cat(sums)
        self.squared = torch.linalg.vector_norm(self._summed, dtype=torch.float64) ** 2
        summed = dict(zip(map(id, self._owned), self._flat(self._owned, self._summed), strict=True))
        for part in self._owned:
            part.region.write(grads, summed[id(part)])
        if self._needs.mirrors:
            self._exchange(
                lambda peer: [p for p in self._owned if p.piece.mirror == peer],
                lambda peer: [p for p in self._parts if p.piece.owner == peer and p.piece.mirror == self._place],
                lambda part: summed[id(part)],
            )

    def take(self, grads: Tensors) -> None:
        """The sums have come: hand those that are mirrored here to the gradients."""
        mirrored = [part for part in self._parts if part.piece.mirror == self._place]
        self._write(grads, mirrored)
        self._summed = self._new(0)

    # ---- weights

    def spread(self, weights: Tensors) -> None:
        """Send the updated weights of owned pieces to the holders that do not keep these."""
        if self._needs.spreads:
            self._exchange(
                lambda peer: [p for p in self._owned if peer in p.piece.holders and peer not in p.piece.keepers],
                lambda peer: [p for p in self._stale() if p.piece.owner == peer],
                lambda part: part.region.read(weights),
            )

    def arrive(self, weights: Tensors) -> None:
        """The weights have come: put them in their place."""
        self._write(weights, self._stale())

    def _stale(self) -> list[_Part]:
        return [part for part in self._parts if self._place not in part.piece.keepers]

    # ---- the all-to-all

    def _exchange(
        self,
        sent: Callable[[Place], list[_Part]],
        received: Callable[[Place], list[_Part]],
        read: Callable[[_Part], torch.Tensor],
    ) -> None:
        assert self.group is not None
        others = {peer: peer != self._place for peer in self._peers}
        outgoing = {peer: sent(peer) if other else [] for peer, other in others.items()}
        incoming = {peer: received(peer) if other else [] for peer, other in others.items()}
        num_out, num_in = ([_numel(parts) for parts in listed.values()] for listed in (outgoing, incoming))
        source = torch.cat([self._new(0), *(read(part) for parts in outgoing.values() for part in parts)])
        target = self._new(sum(num_in))
        self.work = self.group.launch_all_to_all(target, source, num_in, num_out)
        self._buffers = (source, target)
        self._received = dict(zip(self._peers, target.split(num_in), strict=True))

    def _write(self, tensors: Tensors, parts: list[_Part]) -> None:
        """Hand out what has come of `parts`: from each owner in their order."""
        received, self._received = self._received, {}
        for owner, flat in received.items():
            own = [part for part in parts if part.piece.owner == owner]
            for part, piece in zip(own, self._flat(own, flat), strict=True):
                part.region.write(tensors, piece)
        self.work, self._buffers = None, ()

    @staticmethod
    def _flat(parts: list[_Part], flat: torch.Tensor) -> Sequence[torch.Tensor]:
        return flat.split([part.piece.numel for part in parts]) if parts else ()


def _numel(parts: Iterable[_Part]) -> int:
    return sum(part.piece.numel for part in parts)
