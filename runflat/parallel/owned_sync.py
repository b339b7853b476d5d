"""Gradient exchange with `zero1`: each device gets the sums of the pieces that it keeps, and later all weights.

Buckets and their order are those of `grad_sync`. In a bucket's turn gradients go to the owners of their pieces. Sums go
on to the mirrors when the group's next bucket has its turn, or when backward is over: everywhere in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from runflat.parallel.arrivals import Arrivals
from runflat.parallel.comms import Comms, Group
from runflat.parallel.scatter import Regions, Scatter
from runflat.plan.plan import Place, Plan
from runflat.plan.sync_groups import SyncLayout
from runflat.plan.zero import OwnedPiece, Ownership


class OwnedSync:
    """Sums the gradients of the pieces that one device keeps, and brings it the weights of those that it does not.

    Use: as `GradSync`. After `finish()` `param.grad` is final for the pieces that are kept, and only there; the update
    of these is followed by `gather()`.
    """

    def __init__(
        self,
        plan: Plan,
        layout: SyncLayout,
        owned: Ownership,
        place: Place,
        comms: Comms,
        params: Mapping[str, nn.Parameter],
        sources: Mapping[str, tuple[nn.Parameter, ...]] | None = None,
    ):
        """Give each of `params` (full-model names) of `place` a gradient, and hook what their gradients come from."""
        self._comms = comms
        self._params = dict(params)
        for param in self._params.values():
            param.grad = torch.zeros_like(param)
        self._grads = {name: param.grad for name, param in self._params.items() if param.grad is not None}
        regions = Regions(owned.spec, plan.replica(place[0]).held(owned.spec.kinds, place[1]))
        example = next(iter(params.values()))

        def scatter(pieces: tuple[OwnedPiece, ...], group: Group | None) -> Scatter:
            return Scatter(pieces, place, group, regions, example.detach().new_empty)

        self._turns = [
            scatter(pieces, comms.group(bucket.members))
            for bucket, pieces in zip(layout.buckets, owned.buckets, strict=True)
            if place in bucket.members
        ]
        self._turns.append(scatter(owned.replicated, comms.world))
        self._exchange = scatter(owned.exchange, comms.world) if owned.exchange else None
        self._open: dict[int, Scatter] = {}
        self._next = 0
        self._arrivals = Arrivals(self._params, sources, self._all(), self._launch_ready)

    def _all(self) -> list[Scatter]:
        return [*self._turns, *([self._exchange] if self._exchange is not None else [])]

    # ---- a step

    def zero(self) -> None:
        """Clear all gradients and forget an unfinished step."""
        self._arrivals.disarm()
        self._next = 0
        self._open = {}
        torch._foreach_zero_(list(self._grads.values()))
        self._arrivals.clear_copies()

    def arm(self) -> None:
        """The next backward is the last of this step: launch each bucket as soon as its gradients are final."""
        self._arrivals.arm()
        self._next = 0

    def _launch_ready(self) -> None:
        while self._next < len(self._turns) and not self._turns[self._next].missing:
            self._launch(self._turns[self._next])
            self._next += 1

    def _launch(self, scatter: Scatter) -> None:
        """Start a bucket, after the sums of its group's last one have been sent on."""
        before = self._open.pop(id(scatter.group), None)
        if before is not None:
            self._settle(before)
        scatter.launch(self._grads)
        self._open[id(scatter.group)] = scatter

    def _settle(self, scatter: Scatter) -> None:
        self._comms.wait([scatter.work], "gradient sync")
        scatter.settle(self._grads)

    def finish(self) -> None:
        """Wait until the gradients of all that this device keeps are summed; CommsError when a member is lost.

        Raises:
            RuntimeError: a parameter took no part in the backward pass, so that its bucket was never complete.
        """
        self._arrivals.check()
        if self._exchange is not None:
            self._launch(self._exchange)
        for scatter in self._open.values():
            self._settle(scatter)
        self._open = {}
        for scatter in self._all():
            self._comms.wait([scatter.work], "gradient sync")
            scatter.take(self._grads)
        self._arrivals.disarm()

    def squared_norm(self) -> torch.Tensor:
        """This device's part of the squared norm of the summed gradient, float64 scalar: that of what it owns.

        Call after `finish()`.
        """
        return torch.stack([scatter.squared for scatter in self._all()]).sum()

    def gather(self) -> None:
        """After the update of what is kept: bring all other weights up to date; CommsError when a member is lost."""
        weights = {name: param.detach() for name, param in self._params.items()}
        before: Scatter | None = None
        for scatter in [*self._all(), None]:
            if scatter is not None:
                scatter.spread(weights)
            if before is not None:  # one bucket at a time is on its way while the next one is packed
                self._comms.wait([before.work], "gathering weights")
                before.arrive(weights)
            before = scatter

    def close(self) -> None:
        """Remove the hooks."""
        self._arrivals.close()
