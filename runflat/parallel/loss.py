"""Cross-entropy over a vocabulary that is spread over the devices of a replica; full logits are never gathered."""

from __future__ import annotations

from typing import Any

import torch

from runflat.parallel.comms import Group
from runflat.parallel.layers import TensorParallel, VocabularyRows

IGNORE_INDEX = -100
"""Label of a token that has no target (transformers' convention)."""


class _ParallelCrossEntropy(torch.autograd.Function):
    """Sum over tokens of -log softmax(logits)[target], with logits [N, V] split by V."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, rows: torch.Tensor, held: torch.Tensor, valid: torch.Tensor, group: Group
    ) -> torch.Tensor:
        largest = logits.amax(dim=-1)
        group.all_reduce(largest, "max")
        exponentials = (logits - largest.unsqueeze(-1)).exp_()
        target = logits.gather(1, rows.unsqueeze(1)).squeeze(1) - largest
        sums = torch.stack((exponentials.sum(dim=-1), torch.where(held, target, torch.zeros_like(target))))
        group.all_reduce(sums)
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(-1)), rows, held, valid)
        losses = sums[0].log() - sums[1]
        return torch.where(valid, losses, torch.zeros_like(losses)).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        softmax, rows, held, valid = ctx.saved_tensors
        result = softmax.clone()
        result[torch.arange(result.shape[0], device=result.device), rows] -= held.to(result.dtype)
        return result * (valid.to(result.dtype) * grad).unsqueeze(1), None, None, None, None


class VocabParallelLoss:
    """Stands in for `model.loss_function`: the *sum* of token losses, not their mean.

    The caller divides by the number of target tokens of the global batch, which one replica cannot know.
    """

    def __init__(self, vocabulary: VocabularyRows, tp: TensorParallel):
        """`vocabulary` are the rows of the LM head held here."""
        self._vocabulary = vocabulary
        self._tp = tp

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Loss sum of `logits` [B, T, V held here] against `labels` [B, T], shifted by one; a scalar.

        It is computed in float32 (float64 if the logits are), equal on all devices of the replica.
        """
        kept = logits[:, :-1].reshape(-1, logits.shape[-1])
        kept = kept.float() if kept.dtype in (torch.float16, torch.bfloat16) else kept
        targets = labels[:, 1:].reshape(-1)
        valid = targets != IGNORE_INDEX
        rows, held = self._vocabulary.rows(torch.where(valid, targets, 0))
        total: torch.Tensor = _ParallelCrossEntropy.apply(kept, rows, held & valid, valid, self._tp.group)
        return total


def num_targets(labels: torch.Tensor) -> int:
    """Number of tokens of `labels` [B, T] that have a target after the shift."""
    return int((labels[:, 1:] != IGNORE_INDEX).sum())
