"""One training step of one device, in the parts that recovery needs to tell apart.

`backward` and `finish` leave this device with final gradients; `barrier` is the all-reduce whose result proves that
every device has them; `apply` changes state and commits. A device that has final gradients of a step can still apply it
later with the scalars of a peer that has seen the barrier's result: that is how recovery rolls forward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from runflat.parallel.comms import Comms, CommsError
from runflat.parallel.grad_sync import GradSync
from runflat.parallel.loss import num_targets
from runflat.parallel.optimizer import OptimizerSettings, apply_update, clip_coefficient, learning_rate
from runflat.parallel.owned_sync import OwnedSync

Sums = GradSync | OwnedSync
"""What sums gradients: for all holders, or with `zero1` for those that keep a unit's optimizer state."""


@dataclass(frozen=True)
class Scalars:
    """Sums over all devices at the end of a step: what `apply` needs besides this device's gradients.

    `num_devices` counts who took part; `non_finite` and `stop` are above zero when any device said so; `switch` counts
    the devices that have the order to go over to another plan.
    """

    num_devices: float
    loss_sum: float
    num_targets: float
    squared_norm: float
    non_finite: float
    stop: float
    switch: float

    @property
    def all_switch(self) -> bool:
        """Whether all go over after this step: the order reaches one device before the other, and none may go alone."""
        return self.switch == self.num_devices

    def to_list(self) -> list[float]:
        """The values in field order, for a message."""
        return list(astuple(self))


@dataclass(frozen=True)
class StepResult:
    """What every device knows after a step. `loss` is nats per target token, `grad_norm` the norm before clipping.

    `skipped`: a gradient was not finite, and no device applied the step. `compute_s` and `sync_s` are this device's
    seconds until its gradients were final and until all gradients were summed.
    """

    loss: float
    num_target_tokens: int
    grad_norm: float
    lr: float
    skipped: bool
    compute_s: float = 0.0
    sync_s: float = 0.0


@dataclass(frozen=True)
class Trainer:
    """One device's part of the training, under one plan. `reports` is true on one device of each replica.

    `phase` is called with the name of each part of a step as it begins, `refresh` when all of `params` is up to date.
    """

    model: PreTrainedModel
    params: Mapping[str, nn.Parameter]
    sync: Sums
    comms: Comms
    optimizer: torch.optim.AdamW
    settings: OptimizerSettings
    reports: bool
    phase: Callable[[str], None] = lambda name: None
    refresh: Callable[[], None] = lambda: None


def backward(trainer: Trainer, batches: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> tuple[float, int]:
    """Loss sum and target tokens of this replica's micro-batches [B, T]; the exchange of gradients is under way."""
    loss_sum, tokens = 0.0, 0
    for index, (batch, targets) in enumerate(zip(batches, labels, strict=True)):
        trainer.phase("forward")
        loss = trainer.model(input_ids=batch, labels=targets, use_cache=False).loss
        loss_sum += accumulate(trainer, loss, first=index == 0, last=index == len(batches) - 1)
        tokens += num_targets(targets)
    return loss_sum, tokens


def accumulate(trainer: Trainer, loss: torch.Tensor, *, first: bool, last: bool) -> float:
    """Add the gradients of a micro-batch's loss sum; returns the sum.

    The `first` clears those of an older step, the `last` has the exchange begin while it still computes.
    """
    if first:
        trainer.sync.zero()
    if last:
        trainer.sync.arm()
    trainer.phase("backward")
    loss.backward()
    trainer.comms.catch_up("backward")
    return float(loss.detach())


def barrier(trainer: Trainer, loss_sum: float, tokens: int, stop: bool = False, switch: bool = False) -> Scalars:
    """The step's one small all-reduce, which is also the barrier.

    Whoever has its result knows that every device entered it with final gradients. The ones must add up to the number
    of devices before anything changes state.

    Raises:
        CommsError: a device was lost, or somebody else's numbers came in.
    """
    squared = float(trainer.sync.squared_norm())
    finite = math.isfinite(squared)
    own = Scalars(
        num_devices=1.0,
        loss_sum=loss_sum if trainer.reports else 0.0,
        num_targets=float(tokens) if trainer.reports else 0.0,
        squared_norm=squared if finite else 0.0,
        non_finite=0.0 if finite else 1.0,
        stop=float(stop),
        switch=float(switch),
    )
    device = next(iter(trainer.params.values())).device
    values = torch.tensor(own.to_list(), dtype=torch.float64, device=device)
    trainer.comms.reduce(values)
    total = Scalars(*values.cpu().tolist())
    if int(total.num_devices) != trainer.comms.world.size:
        raise CommsError(
            f"the all-reduce that ends a step counted {total.num_devices:.0f} devices, not {trainer.comms.world.size}."
        )
    return total


def apply(optimizer: torch.optim.AdamW, settings: OptimizerSettings, scalars: Scalars, step: int) -> StepResult:
    """Clip by the true global norm and update: step `step` (0-based) is committed when this returns."""
    tokens = scalars.num_targets
    norm = math.sqrt(scalars.squared_norm) / tokens
    skipped = scalars.non_finite > 0
    lr = learning_rate(settings, step)
    if not skipped:
        apply_update(optimizer, clip_coefficient(norm, settings.clip_norm) / tokens, lr)
    return StepResult(scalars.loss_sum / tokens, int(tokens), math.nan if skipped else norm, lr, skipped)


def train_step(
    trainer: Trainer, batches: Sequence[torch.Tensor], labels: Sequence[torch.Tensor], step: int
) -> StepResult:
    """All parts of step `step` (0-based) in a row.

    Raises:
        CommsError: a member was lost; nothing of the step has been applied.
    """
    started = time.perf_counter()
    loss_sum, tokens = backward(trainer, batches, labels)
    computed = time.perf_counter()
    trainer.phase("sync")
    trainer.sync.finish()
    synced = time.perf_counter()
    trainer.phase("commit")
    scalars = barrier(trainer, loss_sum, tokens)
    trainer.phase("update")
    result = apply(trainer.optimizer, trainer.settings, scalars, step)
    trainer.sync.gather()
    trainer.refresh()
    return StepResult(
        **{**vars(result), "compute_s": computed - started, "sync_s": synced - computed},
    )
