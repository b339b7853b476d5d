"""One training step of one device: backward, gradient sync, the all-reduce that is also the barrier, update."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from runflat.parallel.comms import Comms, CommsError
from runflat.parallel.grad_sync import GradSync
from runflat.parallel.loss import num_targets
from runflat.parallel.optimizer import OptimizerSettings, apply_update, clip_coefficient, learning_rate


@dataclass(frozen=True)
class StepResult:
    """What every device knows after a step. `loss` is nats per target token, `grad_norm` the norm before clipping.

    `skipped`: a gradient was not finite, and no device applied the step. `stop`: some device asked to end after this
    step; all see it alike. `compute_s` and `sync_s` are this device's seconds until its gradients were final and until
    all gradients were summed.
    """

    loss: float
    num_target_tokens: int
    grad_norm: float
    lr: float
    skipped: bool
    stop: bool
    compute_s: float
    sync_s: float


@dataclass(frozen=True)
class Trainer:
    """One device's part of the training, under one plan. `reports` is true on one device of each replica."""

    model: PreTrainedModel
    params: Mapping[str, nn.Parameter]
    sync: GradSync
    comms: Comms
    optimizer: torch.optim.AdamW
    settings: OptimizerSettings
    reports: bool


def backward(trainer: Trainer, batches: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> tuple[float, int]:
    """Loss sum and target tokens of this replica's micro-batches; gradients are summed over the replicas after it."""
    loss_sum = torch.zeros((), dtype=torch.float64)
    tokens = 0
    trainer.sync.zero()
    for index, (batch, targets) in enumerate(zip(batches, labels, strict=True)):
        if index == len(batches) - 1:
            trainer.sync.arm()
        loss = trainer.model(input_ids=batch, labels=targets, use_cache=False).loss
        loss.backward()
        loss_sum += loss.detach().double().cpu()
        tokens += num_targets(targets)
    return float(loss_sum), tokens


def train_step(
    trainer: Trainer, batches: Sequence[torch.Tensor], labels: Sequence[torch.Tensor], step: int, stop: bool = False
) -> StepResult:
    """Run step `step` (0-based) on this replica's micro-batches [B, T] and apply it; `stop` asks all to end after it.

    Raises:
        CommsError: a member was lost; nothing of the step has been applied.
    """
    started = time.perf_counter()
    loss_sum, tokens = backward(trainer, batches, labels)
    computed = time.perf_counter()
    trainer.sync.finish()
    synced = time.perf_counter()
    scalars = _end_of_step(trainer, loss_sum, tokens, stop)
    num_tokens, squared = int(scalars[2]), float(scalars[3])
    norm = math.sqrt(squared) / num_tokens if math.isfinite(squared) else math.nan
    skipped = float(scalars[4]) > 0
    lr = learning_rate(trainer.settings, step)
    if not skipped:
        scale = clip_coefficient(norm, trainer.settings.clip_norm) / num_tokens
        apply_update(trainer.optimizer, trainer.params, scale, lr)
    return StepResult(
        loss=float(scalars[1]) / num_tokens,
        num_target_tokens=num_tokens,
        grad_norm=norm,
        lr=lr,
        skipped=skipped,
        stop=float(scalars[5]) > 0,
        compute_s=computed - started,
        sync_s=synced - computed,
    )


def _end_of_step(trainer: Trainer, loss_sum: float, tokens: int, stop: bool) -> torch.Tensor:
    """The step's one small all-reduce: ones, loss sum, tokens, squared norm, non-finite flag, stop.

    It is also the barrier: whoever has its result knows that every device entered it with final gradients. The ones
    must add up to the number of devices before anything changes state.
    """
    squared = float(trainer.sync.squared_norm())
    local = [
        1.0,
        loss_sum if trainer.reports else 0.0,
        float(tokens) if trainer.reports else 0.0,
        squared if math.isfinite(squared) else 0.0,
        0.0 if math.isfinite(squared) else 1.0,
        float(stop),
    ]
    device = next(iter(trainer.params.values())).device
    scalars = torch.tensor(local, dtype=torch.float64, device=device)
    trainer.comms.world.all_reduce(scalars)
    result = scalars.cpu()
    if int(result[0]) != trainer.comms.world.size:
        raise CommsError(
            f"the all-reduce that ends a step counted {result[0]:.0f} devices, not {trainer.comms.world.size}."
        )
    return result
