"""Vocabulary-parallel loss and embedding, and row layers, against torch on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runflat.parallel.comms import Group
from runflat.parallel.layers import RowLinear, TensorParallel, VocabularyRows, parallel_embedding
from runflat.parallel.loss import VocabParallelLoss, num_targets

InGroup = Callable[[int, Callable[[int, Group], Any]], list[Any]]
Rows = tuple[tuple[int, int], ...]

VOCAB, HIDDEN = 11, 6
SPLITS: dict[str, tuple[Rows, ...]] = {
    "even": (((0, 6),), ((6, 11),)),
    "scattered": (((0, 2), (7, 9)), ((2, 4), (10, 11)), ((4, 7), (9, 10))),
    "alone": (((0, 11),),),
    "one holds nearly nothing": (((0, 4), (5, 11)), ((4, 5),)),
}


def seeded(*shape: int) -> torch.Tensor:
    """Returns normal float64 numbers, the same for the same shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def rows_of(ranges: Rows) -> tuple[VocabularyRows, torch.Tensor]:
    """Returns the rows of a device, and the indices of the full vocabulary that they are."""
    vocabulary = VocabularyRows(VOCAB, torch.device("cpu"))
    vocabulary.hold(ranges)
    return vocabulary, torch.cat([torch.arange(*part) for part in ranges])


@pytest.mark.parametrize("size", [1.0, 1e4], ids=["small logits", "huge logits"])
@pytest.mark.parametrize("split", SPLITS)
def test_loss_equals_cross_entropy(in_group: InGroup, split: str, size: float) -> None:
    """Catches a wrong shift, ignored labels that count, overflow, a target that no or two devices count."""
    logits = size * seeded(2, 5, VOCAB)
    labels = torch.tensor([[1, 0, 10, -100, 4], [9, -100, 4, 7, 2]])
    full = logits.clone().requires_grad_()
    expected = F.cross_entropy(full[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    (3 * expected).backward()
    assert num_targets(labels) == 6

    def rank(index: int, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        vocabulary, held = rows_of(SPLITS[split][index])
        local = logits[..., held].clone().requires_grad_()
        loss = VocabParallelLoss(vocabulary, TensorParallel(group))(local, labels, vocab_size=VOCAB)
        (3 * loss).backward()
        assert local.grad is not None
        assert full.grad is not None
        torch.testing.assert_close(local.grad, full.grad[..., held], rtol=1e-12, atol=1e-12)
        return loss.detach()

    losses = in_group(len(SPLITS[split]), rank)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    torch.testing.assert_close(losses[0], expected.detach(), rtol=1e-12, atol=1e-12)


def test_loss_of_low_precision_logits(in_group: InGroup) -> None:
    """Catches a loss that is summed in bfloat16."""
    logits = seeded(1, 9, VOCAB).to(torch.bfloat16)
    labels = torch.arange(9).unsqueeze(0)

    def rank(index: int, group: Group) -> torch.Tensor:
        vocabulary, held = rows_of(SPLITS["even"][index])
        return VocabParallelLoss(vocabulary, TensorParallel(group))(logits[..., held], labels)

    expected = F.cross_entropy(logits[0, :-1].double(), labels[0, 1:], reduction="sum")
    for loss in in_group(2, rank):
        assert loss.dtype == torch.float32
        assert float(loss) == pytest.approx(float(expected), rel=1e-6)


class Scaled(nn.Embedding):
    """An embedding whose forward does something more, as gemma's does."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * 3.0


@pytest.mark.parametrize("padding", [None, 0, 4, 10])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
def test_embedding_equals_lookup(in_group: InGroup, split: str, padding: int | None, kind: type[nn.Embedding]) -> None:
    """Catches a token looked up in the wrong row, a foreign token's gradient, a padding row that learns."""
    tokens = torch.tensor([[0, 4, 10, 4], [7, 3, 0, 9]])
    weight, upstream = seeded(VOCAB, HIDDEN), seeded(2, 4, HIDDEN)
    whole = kind(VOCAB, HIDDEN, padding_idx=padding, dtype=torch.float64)
    whole.weight.data = weight.clone()
    expected = whole(tokens)
    expected.backward(upstream)

    def rank(index: int, group: Group) -> None:
        vocabulary, held = rows_of(SPLITS[split][index])
        module = kind(VOCAB, HIDDEN, padding_idx=padding, dtype=torch.float64)
        module.weight = nn.Parameter(weight[held].clone())
        parallel_embedding(module, vocabulary, TensorParallel(group))
        for _ in range(2):  # twice, so that state left by the first pass shows
            module.weight.grad = None
            output = module(tokens)
            output.backward(upstream)
            torch.testing.assert_close(output, expected, rtol=1e-12, atol=0)
            torch.testing.assert_close(module.weight.grad, whole.weight.grad[held], rtol=1e-12, atol=0)

    in_group(len(SPLITS[split]), rank)


@pytest.mark.parametrize("bias", [False, True])
def test_row_layer_equals_linear(in_group: InGroup, bias: bool) -> None:
    """Catches a bias that is added once per device, or an input gradient of another device's columns."""
    splits = (torch.tensor([0, 3]), torch.tensor([1, 4, 5]), torch.tensor([2]))
    whole = nn.Linear(HIDDEN, 4, bias=bias, dtype=torch.float64)
    hidden = seeded(2, 3, HIDDEN).requires_grad_()
    expected = whole(hidden)
    expected.sum().backward()

    def rank(index: int, group: Group) -> None:
        columns = splits[index]
        own_bias = nn.Parameter(whole.bias.detach().clone()) if bias else None
        weight = nn.Parameter(whole.weight.detach()[:, columns].clone())
        local = hidden.detach()[..., columns].requires_grad_()
        output = RowLinear(weight, own_bias, TensorParallel(group))(local)
        output.sum().backward()
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(local.grad, hidden.grad[..., columns], rtol=1e-12, atol=0)
        torch.testing.assert_close(weight.grad, whole.weight.grad[:, columns], rtol=1e-12, atol=0)
        if own_bias is not None:
            torch.testing.assert_close(own_bias.grad, whole.bias.grad, rtol=1e-12, atol=0)

    in_group(3, rank)
