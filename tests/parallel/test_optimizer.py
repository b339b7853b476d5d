"""Schedules, clipping and decay groups, against torch and against figures worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from runflat.parallel.optimizer import OptimizerSettings, apply_update, build_optimizer, clip_coefficient, learning_rate
from runflat.plan.units import ModelSpec, ParamSpec

COSINE = OptimizerSettings(lr=1.0, min_lr_ratio=0.1, schedule="cosine", warmup_steps=4, total_steps=14)
WSD = OptimizerSettings(lr=1.0, min_lr_ratio=0.2, schedule="wsd", warmup_steps=2, total_steps=10, decay_steps=4)
CONSTANT = OptimizerSettings(lr=0.5, schedule="constant", warmup_steps=0, total_steps=3)


@pytest.mark.parametrize(
    ("settings", "step", "expected"),
    [
        (COSINE, 0, 0.25),
        (COSINE, 3, 1.0),
        (COSINE, 4, 1.0),
        (COSINE, 9, 0.55),
        (COSINE, 13, 0.1 + 0.45 * (1 + math.cos(0.9 * math.pi))),
        (COSINE, 14, 0.1),
        (COSINE, 99, 0.1),
        (WSD, 0, 0.5),
        (WSD, 1, 1.0),
        (WSD, 6, 1.0),
        (WSD, 8, 0.6),
        (WSD, 9, 0.4),
        (WSD, 10, 0.2),
        (WSD, 50, 0.2),
        (CONSTANT, 0, 0.5),
        (CONSTANT, 99, 0.5),
    ],
)
def test_schedule(settings: OptimizerSettings, step: int, expected: float) -> None:
    """Catches a schedule that always gives its first value, is off by one, or goes on falling after its end."""
    assert learning_rate(settings, step) == pytest.approx(expected)


def test_warm_up_as_long_as_the_run() -> None:
    """Catches a division by zero where nothing is left for the cosine."""
    settings = OptimizerSettings(lr=1.0, warmup_steps=3, total_steps=3)
    assert [learning_rate(settings, step) for step in range(4)] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])


@pytest.mark.parametrize(("norm", "limit"), [(4.0, 1.0), (0.5, 1.0), (4.0, None), (0.0, 1.0)])
def test_clipping_is_that_of_torch(norm: float, limit: float | None) -> None:
    """Catches clipping that scales small gradients up, or by another rule than torch's."""
    weight = nn.Parameter(torch.zeros(4))
    weight.grad = torch.full((4,), norm / 2)
    if limit is not None:
        nn.utils.clip_grad_norm_([weight], limit)
    assert clip_coefficient(norm, limit) * norm == pytest.approx(float(weight.grad.norm()), rel=1e-5)


def test_update_is_that_of_torch() -> None:
    """Catches decay on vectors, none on matrices, a gradient scale that is forgotten, a learning rate that sticks."""
    spec = ModelSpec(
        "small", (), (ParamSpec("w", (3, 2), "equal", True, 0), ParamSpec("b", (3,), "equal", False, 1)), 2, 1, 1
    )
    settings = OptimizerSettings(weight_decay=0.5)
    ours = {"w": nn.Parameter(torch.ones(3, 2)), "b": nn.Parameter(torch.ones(3))}
    theirs = {name: nn.Parameter(param.detach().clone()) for name, param in ours.items()}
    mine = build_optimizer(spec, ours, settings)
    reference = {
        "w": torch.optim.AdamW([theirs["w"]], betas=(0.9, 0.95), weight_decay=0.5, foreach=False),
        "b": torch.optim.AdamW([theirs["b"]], betas=(0.9, 0.95), weight_decay=0.0, foreach=False),
    }
    for lr in (0.1, 0.03):
        for name, param in ours.items():
            param.grad = torch.arange(1.0, 1 + param.numel()).view(param.shape)
            theirs[name].grad = param.grad * 0.25
            reference[name].param_groups[0]["lr"] = lr
            reference[name].step()
        apply_update(mine, 0.25, lr)
    for name, param in ours.items():
        torch.testing.assert_close(param, theirs[name])
