"""What updates a device's shard: AdamW over all of it, or with `zero1` over the pieces that the device keeps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from runflat.parallel.comms import Comms
from runflat.parallel.grad_sync import GradSync
from runflat.parallel.kept import Kept
from runflat.parallel.move import NOTHING, Held, ShardState, install_moments, read_state
from runflat.parallel.optimizer import OptimizerSettings, build_optimizer
from runflat.parallel.owned_sync import OwnedSync
from runflat.plan.plan import Place, Plan
from runflat.plan.sync_groups import SyncLayout
from runflat.plan.units import ModelSpec, param_ranges
from runflat.plan.zero import Ownership, ParamHeld
from runflat.train.checkpoint import Checkpoint
from runflat.train.shards import OwnMoments, ShardCopy, copy_shard, kept_moments, load_optimizer_state


class Updater:
    """The optimizer of one shard. `kept` are the pieces that it updates, by parameter; None: all."""

    def __init__(
        self,
        spec: ModelSpec,
        params: Mapping[str, nn.Parameter],
        held: Held,
        settings: OptimizerSettings,
        kept: ParamHeld | None,
        state: ShardState = NOTHING,
    ):
        """For the shard `params` of the units `held`, with the moments and the step count of `state`."""
        self.kept = kept
        self._spec = spec
        self._params = dict(params)
        self._held = held
        self._pieces = Kept(spec, params, held, kept, settings) if kept is not None else None
        self.adamw = build_optimizer(spec, params, settings) if self._pieces is None else self._pieces.adamw
        if state.optimizer_step and self._pieces is not None:
            self._pieces.install(state.optimizer_step, state.tensors)
        elif state.optimizer_step:
            install_moments(self.adamw, self._params, state)

    def load(self, saved: Checkpoint) -> None:
        """Take the moments from a checkpoint.

        Raises:
            CheckpointError: it cannot be read.
        """
        if self._pieces is None or self.kept is None:
            ranges = {param.name: param_ranges(self._spec, param, self._held) for param in self._spec.params}
            load_optimizer_state(self.adamw, self._spec, self._params, ranges, saved)
        elif step := saved.progress.optimizer_step:
            example = next(iter(self._params.values()))
            self._pieces.install(step, kept_moments(self._spec, self.kept, saved, example))

    def state(self, optimizer_step: int) -> ShardState:
        """Weights of the shard, and moments of what is updated here; the live tensors, not copies."""
        if self._pieces is None:
            return read_state(self._params, self.adamw)
        weights = {name: param.detach() for name, param in self._params.items()}
        return ShardState({"weight": weights, **self._pieces.moments}, optimizer_step)

    def cut(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What of shards such as weights or gradients is updated here, by name; copies where these are pieces."""
        return dict(tensors) if self._pieces is None else self._pieces.cut(tensors)

    def kept_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Weights and moments of the kept pieces, laid out alike; the weights are copies."""
        assert self._pieces is not None
        return {"weight": self.cut(self._params), **self._pieces.moments}

    def sync(
        self,
        plan: Plan,
        layout: SyncLayout,
        owned: Ownership | None,
        place: Place,
        comms: Comms,
        sources: Mapping[str, tuple[nn.Parameter, ...]],
    ) -> GradSync | OwnedSync:
        """What sums the gradients that are needed here; `owned` is the plan's where pieces are kept."""
        if self._pieces is None or owned is None:
            return GradSync(self._spec, plan, layout, place, comms, self._params, sources)
        sync = OwnedSync(plan, layout, owned, place, comms, self._params, sources)
        self._pieces.bind()
        return sync

    def copy(self, plan: Plan, place: Place, step: int, owned: Ownership | None) -> ShardCopy:
        """A copy of this device's part of a checkpoint of the state after `step`."""
        own = None
        if self._pieces is not None and owned is not None:
            own = OwnMoments(self._pieces.moments, self._pieces.units, owned.owned(place))
        return copy_shard(self._spec, plan, place, step, self._params, self.adamw, own)
