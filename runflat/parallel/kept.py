"""AdamW on the pieces of a shard whose moments a device keeps (`zero1`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from runflat.parallel.optimizer import OptimizerSettings, adamw
from runflat.plan.units import MOMENTS, ModelSpec, ParamSpec, merge_ranges, shard_pieces
from runflat.plan.zero import ParamHeld


@dataclass(frozen=True)
class _Run:
    """Elements start..stop-1 of one dim of a parameter's shard, the first of them at `position` of its moments."""

    param: str
    dim: int
    start: int
    stop: int
    position: int

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """The part of a weight's or gradient's shard; a view."""
        return shard.detach().narrow(self.dim, self.start, self.stop - self.start)

    def of_moments(self, moments: torch.Tensor) -> torch.Tensor:
        """The part of a moment; a view."""
        return moments.narrow(self.dim, self.position, self.stop - self.start)


class Kept:
    """The optimizer of the kept pieces: `adamw` updates views of the weights.

    `moments[kind][name]` has the moments of `units[name]`, as a shard of just these units; parameters of which nothing
    is kept are left out.
    """

    def __init__(
        self,
        spec: ModelSpec,
        params: Mapping[str, nn.Parameter],
        held: Mapping[str, Sequence[int]],
        units: ParamHeld,
        settings: OptimizerSettings,
    ):
        """For the shard `params` of the units `held`; moments are zero and no step has been applied."""
        self.units = units
        self._params = dict(params)
        self._runs: list[tuple[_Run, nn.Parameter]] = []
        self.moments: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in MOMENTS}
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for param in spec.params:
            shard = params[param.name].detach()
            runs = kept_runs(spec, param, held, units[param.name])
            if not runs:
                continue
            shape = list(shard.shape)
            shape[runs[0].dim] = sum(run.stop - run.start for run in runs)
            for kind in MOMENTS:
                self.moments[kind][param.name] = torch.zeros(shape, dtype=shard.dtype, device=shard.device)
            for run in runs:
                view = nn.Parameter(run.of(shard))
                self._runs.append((run, view))
                groups[param.decay].append(view)
        self.adamw = adamw(groups[True], groups[False], settings)
        self.install(0)

    def install(self, optimizer_step: int, moments: Mapping[str, Mapping[str, torch.Tensor]] | None = None) -> None:
        """From now on `optimizer_step` steps have been applied, with these `moments` (none: those that there are)."""
        if moments is not None:
            self.moments = {kind: dict(moments[kind]) for kind in MOMENTS}
        for run, view in self._runs:
            self.adamw.state[view] = {
                "step": torch.tensor(float(optimizer_step), dtype=torch.float32),
                **{kind: run.of_moments(self.moments[kind][run.param]) for kind in MOMENTS},
            }

    @property
    def num_bytes(self) -> int:
        """Bytes of the moments."""
        return sum(tensor.nbytes for tensors in self.moments.values() for tensor in tensors.values())

    def bind(self) -> None:
        """The gradients of the shard are other tensors now: update from these."""
        for run, view in self._runs:
            grad = self._params[run.param].grad
            assert grad is not None
            view.grad = run.of(grad)

    def cut(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The kept pieces of shards such as weights or gradients, by name, in the layout of the moments; copies."""
        parts: dict[str, list[torch.Tensor]] = {}
        dims: dict[str, int] = {}
        for run, _ in self._runs:
            parts.setdefault(run.param, []).append(run.of(tensors[run.param]))
            dims[run.param] = run.dim
        return {name: torch.cat(listed, dim=dims[name]) for name, listed in parts.items()}


def kept_runs(
    spec: ModelSpec, param: ParamSpec, held: Mapping[str, Sequence[int]], units: Mapping[str, Sequence[int]]
) -> list[_Run]:
    """Where the kept `units` of a parameter lie in the shard of `held`, neighbours joined."""
    if param.dim is None:
        return [_Run(param.name, 0, 0, param.shape[0], 0)] if any(units.values()) else []
    wanted = {kind: set(listed) for kind, listed in units.items()}
    ranges = merge_ranges((p.start, p.stop) for p in shard_pieces(spec, param, held) if p.unit in wanted[p.kind])
    runs: list[_Run] = []
    position = 0
    for start, stop in ranges:
        runs.append(_Run(param.name, param.dim, start, stop, position))
        position += stop - start
    return runs
