"""Gradient exchange between replicas of any degree: flat buckets, launched while backward still runs.

One turn after the other, in one order on all devices: in `direct` a turn is the all-reduce of a bucket; in `reshard`
that of all buckets of one position, with an all-to-all inside the replica before it, whose end is waited for when the
next turn begins, and one after it, when backward is over: under the all-reduces that are still on their way.

Kinds of tensor here
    flat      one buffer per bucket, in wire order: entry after entry, each entry row-major over *its own units only*.
              Wire order depends on the bucket alone, so members whose shards differ agree on it
    gradient  `param.grad`. Where one bucket carries a parameter's whole shard, it is a view of that bucket's flat
              buffer and nothing is copied (always so while nobody is dead and no KV head has two holders); elsewhere
              it is a tensor of its own, copied in and out. Where layers compute with a copy of the parameter in another
            type, the copy's gradient is added to it as soon as a micro-batch has it
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import nn

from runflat.parallel.arrivals import Arrivals
from runflat.parallel.buckets import Copy, Exchange, LocalBucket
from runflat.parallel.comms import Comms, Group
from runflat.parallel.reshard import LocalMoves
from runflat.plan.plan import Place, Plan
from runflat.plan.sync_groups import Bucket, Entry, SyncLayout
from runflat.plan.units import ModelSpec, ParamSpec, merge_ranges, shard_pieces

Carrier = LocalBucket | LocalMoves
Turn = tuple[LocalMoves | None, LocalBucket | None]
"""What is launched together: moves inside the replica, if any, and then the bucket, if this device has one."""


class GradSync:
    """Sums the gradients of one device's shard with those of the other replicas.

    Use: `zero()`, backward for every micro-batch, `arm()` before the last one's backward, then `finish()`. After that
    every `param.grad` is the sum over the global batch, with the same bits on all holders.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        layout: SyncLayout,
        place: Place,
        comms: Comms,
        params: Mapping[str, nn.Parameter],
        sources: Mapping[str, tuple[nn.Parameter, ...]] | None = None,
    ):
        """Allocate the buckets of `place` for `params` (full-model names) and hook what their gradients come from.

        That is `params` themselves, or the `sources` of each: copies that layers compute with, in another type.
        """
        self._comms = comms
        self._params = dict(params)
        self._specs = spec.by_name
        replica = plan.replica(place[0])
        self._held = replica.held(spec.kinds, place[1])
        self._spec = spec
        example = next(iter(params.values()))
        self._new = lambda numel: torch.zeros(numel, dtype=example.dtype, device=example.device)
        self._buckets = [self._local(bucket, place, comms.group(bucket.members)) for bucket in layout.of(place)]
        self._exchange = [
            (bucket, self._local(bucket, place, None) if place in bucket.members else None)
            for bucket in layout.exchange
        ]
        self._moves = self._local_moves(layout, place)
        self._replicated = self._replicated_bucket(layout, plan, place)
        self._turns = self._in_order(layout, place)
        self._contributes_equal = place[1] == replica.live_slots[0]
        self._place = place
        self._bind(layout, place)
        self._next = 0
        self._arriving: LocalMoves | None = None
        self._arrivals = Arrivals(self._params, sources, self._carriers(), self._launch_ready)

    # ---- set-up

    def _local(self, bucket: Bucket, place: Place, group: Group | None) -> LocalBucket:
        return LocalBucket(bucket, place, group, self._new(bucket.numel))

    def _replicated_bucket(self, layout: SyncLayout, plan: Plan, place: Place) -> LocalBucket:
        entries = tuple(Entry(name, 0, (), self._specs[name].numel, plan.places) for name in layout.replicated)
        bucket = Bucket(-1, plan.places, entries)
        return self._local(bucket, place, self._comms.world)

    def _local_moves(self, layout: SyncLayout, place: Place) -> dict[int, LocalMoves]:
        """By position: what moves inside the replica."""
        if self._comms.reshard is None:
            return {}
        summed = {bucket.position: local for bucket, local in zip(layout.of(place), self._buckets, strict=True)}
        return {
            position: LocalMoves(moves, place, self._comms.reshard, summed.get(position), self._new)
            for position, moves in layout.moves(place[0]).items()
        }

    def _in_order(self, layout: SyncLayout, place: Place) -> list[Turn]:
        """The turns of this device: by position, and the replicated parameters at the end."""
        turns: list[tuple[int, Turn]] = [
            (bucket.position, (self._moves.get(bucket.position), local))
            for bucket, local in zip(layout.of(place), self._buckets, strict=True)
        ]
        own = {position for position, _ in turns}
        turns += [(position, (moves, None)) for position, moves in self._moves.items() if position not in own]
        turns.sort(key=lambda turn: turn[0])
        return [*(turn for _, turn in turns), (None, self._replicated)]

    def _bind(self, layout: SyncLayout, place: Place) -> None:
        """Make each gradient a view of its bucket where possible, else a tensor of its own with copies."""
        carried: dict[str, list[tuple[Carrier, int, Entry]]] = {name: [] for name in self._params}
        pairs = list(zip(layout.of(place), self._buckets, strict=True))
        pairs += [(bucket, local) for bucket, local in self._exchange if local is not None]
        for bucket, local in pairs:
            offset = 0
            for entry in bucket.entries:
                if place in entry.holders:
                    carried[entry.param].append((local, offset, entry))
                offset += entry.numel
        for moves in self._moves.values():
            for offset, entry in moves.carried:
                carried[entry.param].append((moves, offset, entry))
        offset = 0
        for name in layout.replicated:
            numel = self._specs[name].numel
            self._params[name].grad = self._replicated.flat[offset : offset + numel].view(self._specs[name].shape)
            offset += numel
        for name, places in carried.items():
            if places:
                self._bind_param(self._specs[name], places)

    def _bind_param(self, spec: ParamSpec, places: list[tuple[Carrier, int, Entry]]) -> None:
        param = self._params[spec.name]
        assert spec.dim is not None
        first, offset, _ = places[0]
        alone = all(local is first for local, _, _ in places) and (len(spec.segments) == 1 or spec.dim == 0)
        # A bucket of `reshard` may hold a segment in several entries, and between them units of other devices.
        in_row = all(a + e.numel == b for (_, a, e), (_, b, _) in pairwise(places))
        if alone and in_row and len(places) == len(spec.segments):
            param.grad = first.flat[offset : offset + param.numel()].view(param.shape)
            return
        param.grad = torch.zeros_like(param)
        pieces = shard_pieces(self._spec, spec, self._held)
        for local, offset, entry in places:
            units = set(entry.units)
            ranges = merge_ranges(
                (piece.start, piece.stop) for piece in pieces if piece.segment == entry.segment and piece.unit in units
            )
            local.copies.append(Copy(param.grad, spec.dim, ranges, local.flat[offset : offset + entry.numel]))

    def _all_local(self) -> list[LocalBucket]:
        exchanged = [local for _, local in self._exchange if local is not None]
        return [*self._buckets, self._replicated, *exchanged]

    def _carriers(self) -> list[Carrier]:
        return [*self._all_local(), *self._moves.values()]

    # ---- a step

    def zero(self) -> None:
        """Clear all gradients and forget an unfinished step."""
        self._arrivals.disarm()
        self._next = 0
        self._arriving = None
        torch._foreach_zero_([carrier.flat for carrier in self._carriers()])
        loose = {id(copy.grad): copy.grad for carrier in self._carriers() for copy in carrier.copies}
        if loose:
            torch._foreach_zero_(list(loose.values()))
        self._arrivals.clear_copies()

    def arm(self) -> None:
        """The next backward is the last of this step: launch each bucket as soon as its gradients are final."""
        self._arrivals.arm()
        self._next = 0

    def _launch_ready(self) -> None:
        """Take the turns whose gradients are final, in order; one that is ready early is held back for the others."""
        while self._next < len(self._turns) and not any(c.missing for c in self._turns[self._next] if c is not None):
            moves, bucket = self._turns[self._next]
            self._next += 1
            self._settle()
            if bucket is self._replicated:
                self._mute_equal()
            if moves is None:
                assert bucket is not None
                bucket.launch()
                continue
            for carrier in (moves, bucket):
                if carrier is not None:
                    carrier.pack()
            moves.send()
            self._arriving = moves

    def _settle(self) -> None:
        """Take in what the last turn moved inside the replica, and start its all-reduce."""
        moves, self._arriving = self._arriving, None
        if moves is None:
            return
        moves.group.wait([moves.work])  # on a GPU its stream alone: the host goes on launching backward
        if moves.bucket is not None:
            moves.add()
            moves.bucket.reduce()

    def _mute_equal(self) -> None:
        """Where all devices of a replica have the same gradient, only the lowest live slot contributes it.

        Dividing by the degree instead would not be exact, and would make bits depend on the plan.
        """
        if not self._contributes_equal:
            for name in self._replicated.params:
                if self._specs[name].rule == "equal":
                    grad = self._params[name].grad
                    assert grad is not None
                    grad.zero_()

    def finish(self) -> None:
        """Wait until all gradients of this device are summed; CommsError when a member is lost.

        Raises:
            RuntimeError: a parameter took no part in the backward pass, so that its bucket was never complete.
        """
        self._arrivals.check()
        received = self._launch_exchange()
        for moves, bucket in self._turns:
            if moves is not None:
                if bucket is not None and bucket.group is not None:
                    bucket.group.wait([bucket.work])
                moves.give_back()
        works = [carrier.work for carrier in self._carriers()]
        self._comms.wait([*works, *([received.work] if received else [])], "gradient sync")
        if received:
            received.add_up()
        for carrier in self._carriers():
            carrier.finish()
        self._arrivals.disarm()

    def _launch_exchange(self) -> Exchange | None:
        if not self._exchange:
            return None
        for _, local in self._exchange:
            if local is not None:
                local.launch()
        return Exchange(self._exchange, self._place, self._comms.world, self._new)

    def squared_norm(self) -> torch.Tensor:
        """This device's part of the squared norm of the summed gradient, float64 scalar.

        Each member of a bucket counts its 1/n of the flat buffer, so that over all devices every element of the model
        counts once, however many devices hold it. Call after `finish()`.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._replicated.flat.device)
        for bucket in self._all_local():
            numel, size = bucket.flat.numel(), len(bucket.members)
            start, stop = bucket.rank * numel // size, (bucket.rank + 1) * numel // size
            total += torch.linalg.vector_norm(bucket.flat[start:stop], dtype=torch.float64) ** 2
        return total

    def gather(self) -> None:
        """Nothing to do: every holder of a unit has updated it itself."""

    def close(self) -> None:
        """Remove the hooks."""
        self._arrivals.close()
