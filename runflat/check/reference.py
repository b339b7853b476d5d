"""The unsharded truth: an unmodified transformers model with eager attention, its own masks and its own loss.

Imports nothing of `runflat.parallel`, so that no mistake there can hide here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from runflat.errors import ModelError


@dataclass(frozen=True)
class AdamW:
    """Settings of the reference optimizer; matrices decay, vectors do not."""

    lr: float = 0.02
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 0.5


@dataclass(frozen=True)
class Batch:
    """Token ids and labels [num_sequences, seq_len]; labels of -100 have no target."""

    tokens: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class Outcome:
    """What is compared: clipped gradients of the first step, norms and losses of all, state after the last.

    `grads`, `weights`, `first_moments`, `second_moments` are full tensors by parameter name.
    """

    grads: Mapping[str, torch.Tensor]
    grad_norms: tuple[float, ...]
    losses: tuple[float, ...]
    weights: Mapping[str, torch.Tensor]
    first_moments: Mapping[str, torch.Tensor]
    second_moments: Mapping[str, torch.Tensor]


def reference_model(config: PreTrainedConfig, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    """The model of `config` with random weights in which every parameter matters.

    Norm weights are moved off one and biases off zero: a mistake that multiplies by one or adds zero must show.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            if param.ndim > 1:
                param.copy_(noise / param.shape[1] ** 0.5)
            else:
                param.add_(0.2 * noise)
    model.train()
    return model


def reference_optimizer(model: PreTrainedModel, settings: AdamW) -> torch.optim.AdamW:
    """Torch's own AdamW, parameter by parameter."""
    decayed = [param for param in model.parameters() if param.ndim > 1]
    plain = [param for param in model.parameters() if param.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        foreach=False,
    )


def reference_run(model: PreTrainedModel, batch: Batch, num_steps: int, settings: AdamW) -> Outcome:
    """Train `model` in place for `num_steps` on the same whole `batch`, one process, one shard.

    Raises:
        ModelError: the loss does not depend on some parameter, which then has nothing to compare.
    """
    optimizer = reference_optimizer(model, settings)
    num_targets = int((batch.labels[:, 1:] != -100).sum())
    grads: dict[str, torch.Tensor] = {}
    norms, losses = [], []
    for step in range(num_steps):
        optimizer.zero_grad()
        output = model(input_ids=batch.tokens, labels=batch.labels, use_cache=False, num_items_in_batch=num_targets)
        output.loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)))
        losses.append(float(output.loss.detach()))
        if step == 0:
            grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
            unused = [name for name, _ in model.named_parameters() if name not in grads]
            if unused:
                raise ModelError(
                    f"the loss of {type(model).__name__} does not use its parameter {unused[0]} ({len(unused)} in "
                    "all): a step of it cannot be compared."
                )
        optimizer.step()
    named = dict(model.named_parameters())
    return Outcome(
        grads=grads,
        grad_norms=tuple(norms),
        losses=tuple(losses),
        weights={name: param.detach().clone() for name, param in named.items()},
        first_moments={name: optimizer.state[param]["exp_avg"] for name, param in named.items()},
        second_moments={name: optimizer.state[param]["exp_avg_sq"] for name, param in named.items()},
    )
