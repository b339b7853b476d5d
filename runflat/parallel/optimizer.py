"""AdamW on a device's shard, its learning-rate schedule, and the end of a step: clip by the global norm, update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from runflat.plan.units import ModelSpec

Schedule = Literal["cosine", "wsd", "constant"]


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its schedule. `decay_steps` counts for `wsd` only; `clip_norm` of None does not clip."""

    lr: float = 3e-4
    min_lr_ratio: float = 0.1
    schedule: Schedule = "cosine"
    warmup_steps: int = 0
    total_steps: int = 1
    decay_steps: int = 0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float | None = 1.0


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """Learning rate of step `step` (0-based): linear warm-up, then the schedule down to lr x min_lr_ratio.

    `cosine` falls over the rest of the run; `wsd` (warm-up, stable, decay) stays flat and falls linearly over the last
    `decay_steps`; `constant` stays flat.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    low = settings.lr * settings.min_lr_ratio
    if settings.schedule == "cosine":
        length = max(settings.total_steps - settings.warmup_steps, 1)
        done = min((step - settings.warmup_steps) / length, 1.0)
        return low + (settings.lr - low) * 0.5 * (1 + math.cos(math.pi * done))
    if settings.schedule == "wsd" and settings.decay_steps:
        left = (settings.total_steps - step) / settings.decay_steps
        return low + (settings.lr - low) * min(max(left, 0.0), 1.0)
    return settings.lr


def build_optimizer(
    spec: ModelSpec, params: Mapping[str, nn.Parameter], settings: OptimizerSettings
) -> torch.optim.AdamW:
    """AdamW over the shard, weight decay on matrices only."""
    decayed = [params[param.name] for param in spec.params if param.decay]
    return adamw(decayed, [params[param.name] for param in spec.params if not param.decay], settings)


def adamw(decayed: list[nn.Parameter], plain: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW with weight decay on `decayed` only; either list may be empty.

    The foreach form updates element by element with the same arithmetic wherever an element lies, so that all holders
    of a unit keep the same bits (the fused form does not).
    """
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        foreach=True,
    )


def clip_coefficient(norm: float, clip_norm: float | None) -> float:
    """Factor that brings a gradient of `norm` down to `clip_norm` (torch's `clip_grad_norm_` rule)."""
    if clip_norm is None:
        return 1.0
    return min(1.0, clip_norm / (norm + 1e-6))


def apply_update(optimizer: torch.optim.AdamW, gradient_scale: float, lr: float) -> None:
    """Scale the gradients of all that `optimizer` updates by `gradient_scale`, set the learning rate and update."""
    grads = [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    if grads:
        torch._foreach_mul_(grads, gradient_scale)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
