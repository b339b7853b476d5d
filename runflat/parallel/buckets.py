"""Gradient buckets of one device: the flat buffer, how gradients get into it and out of it, and its collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from runflat.parallel.comms import Group
from runflat.plan.plan import Place
from runflat.plan.sync_groups import Bucket, Members
from runflat.plan.units import Range


@dataclass
class Copy:
    """An entry whose gradient is not a view: the ranges of the local shard's partitioned dim that it covers."""

    grad: torch.Tensor
    dim: int
    ranges: tuple[Range, ...]
    flat: torch.Tensor

    def pack(self) -> None:
        """Gradient to flat buffer."""
        parts = [self.grad.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        self.flat.copy_(torch.cat(parts, dim=self.dim).reshape(-1))

    def unpack(self) -> None:
        """Flat buffer to gradient."""
        shape = list(self.grad.shape)
        shape[self.dim] = sum(stop - start for start, stop in self.ranges)
        source = self.flat.view(shape)
        position = 0
        for start, stop in self.ranges:
            self.grad.narrow(self.dim, start, stop - start).copy_(source.narrow(self.dim, position, stop - start))
            position += stop - start


class LocalBucket:
    """One bucket on this device: its flat buffer and which parameters still owe it a gradient."""

    def __init__(self, bucket: Bucket, place: Place, group: Group | None, flat: torch.Tensor):
        """The part of `place` in `bucket`; without a `group` nothing is sent."""
        self.members: Members = bucket.members
        self.rank = bucket.members.index(place)
        self.group = group
        self.flat = flat
        self.copies: list[Copy] = []
        self.params = {entry.param for entry in bucket.entries}
        self.missing: set[str] = set()
        self.work: Any = None

    def launch(self) -> None:
        """Start the all-reduce; the gradients are final."""
        self.pack()
        self.reduce()

    def pack(self) -> None:
        """Copy what is no view into the flat buffer."""
        for copy in self.copies:
            copy.pack()

    def reduce(self) -> None:
        """Start the all-reduce of the flat buffer as it is."""
        if self.group is not None:
            self.work = self.group.launch_all_reduce(self.flat)

    def finish(self) -> None:
        """The all-reduce has ended: hand the sums to the gradients."""
        for copy in self.copies:
            copy.unpack()
        self.work = None


class Exchange:
    """All small groups at once: every member sends its flat buffer to every other, and all add in member order."""

    def __init__(self, buckets: list[tuple[Bucket, LocalBucket | None]], place: Place, world: Group, new: Any) -> None:
        """Start it: all of `place`'s flat buffers of `buckets` are final."""
        self._mine = [local for _, local in buckets if local is not None]
        self._place = place
        self._members = world.members
        parts: dict[Place, list[LocalBucket]] = {
            peer: [local for local in self._mine if peer in local.members and peer != place] for peer in world.members
        }
        self._parts = parts
        counts = [sum(local.flat.numel() for local in parts[peer]) for peer in world.members]
        outgoing = [local.flat for peer in world.members for local in parts[peer]]
        source = torch.cat(outgoing) if outgoing else new(0)
        self._received = new(sum(counts))
        self.work = world.launch_all_to_all(self._received, source, counts, counts)

    def add_up(self) -> None:
        """Sum own and received buffers in member order: the same order, and so the same bits, on every holder."""
        position = 0
        received: dict[tuple[Place, int], torch.Tensor] = {}
        for peer in self._members:
            for local in self._parts[peer]:
                received[peer, id(local)] = self._received[position : position + local.flat.numel()]
                position += local.flat.numel()
        for local in self._mine:
            own = local.flat.clone()
            addends = [own if peer == self._place else received[peer, id(local)] for peer in local.members]
            total = addends[0].clone()
            for addend in addends[1:]:
                total += addend
            local.flat.copy_(total)
