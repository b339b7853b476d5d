"""Gradients that move inside a replica (`reshard`): to the device that sums a unit, and the sums back.

Kinds of tensor here
    flat      what this device sends before the sum and gets back after it: the units that others sum for it
    received  what it gets before the sum and sends back after it: its share of units that it sums for others
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from runflat.parallel.buckets import Copy, LocalBucket
from runflat.parallel.comms import Group
from runflat.plan.plan import Place
from runflat.plan.sync_groups import Entry, Move


class LocalMoves:
    """The moves of one bucket position on one device; all devices of the replica take part in both all-to-alls."""

    def __init__(
        self,
        moves: Sequence[Move],
        place: Place,
        group: Group,
        bucket: LocalBucket | None,
        new: Callable[[int], torch.Tensor],
    ):
        """The part of `place` in `moves`; `bucket` is what it sums at this position, if anything."""
        rank = {member: index for index, member in enumerate(group.members)}
        outgoing = sorted((m for m in moves if m.source == place), key=lambda m: rank[m.target])
        incoming = sorted((m for m in moves if m.target == place), key=lambda m: rank[m.source])
        self.group = group
        self.bucket = bucket
        self.flat = new(sum(move.entry.numel for move in outgoing))
        self.copies: list[Copy] = []
        self.params = {move.entry.param for move in outgoing}
        self.missing: set[str] = set()
        self.carried: list[tuple[int, Entry]] = []
        self.work: Any = None
        self._received = new(sum(move.entry.numel for move in incoming))
        self._num_out, self._num_in = [0] * group.size, [0] * group.size
        position = 0
        for move in outgoing:
            self.carried.append((position, move.entry))
            position += move.entry.numel
            self._num_out[rank[move.target]] += move.entry.numel
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        position = 0
        for move in incoming:
            assert bucket is not None
            numel = move.entry.numel
            summed = bucket.flat[move.offset : move.offset + numel]
            self._parts.append((summed, self._received[position : position + numel]))
            position += numel
            self._num_in[rank[move.source]] += numel

    def pack(self) -> None:
        """Copy what is no view into the flat buffer."""
        for copy in self.copies:
            copy.pack()

    def send(self) -> None:
        """Start the way there: all gradients of this position are final and packed."""
        self.work = self.group.launch_all_to_all(self._received, self.flat, self._num_in, self._num_out)

    def add(self) -> None:
        """The way there has ended: add what came to the bucket, in the order of the senders."""
        for summed, part in self._parts:
            summed += part

    def give_back(self) -> None:
        """Start the way back: the bucket is summed."""
        for summed, part in self._parts:
            part.copy_(summed)
        self.work = self.group.launch_all_to_all(self.flat, self._received, self._num_out, self._num_in)

    def finish(self) -> None:
        """The way back has ended: hand the sums to the gradients."""
        for copy in self.copies:
            copy.unpack()
        self.work = None
