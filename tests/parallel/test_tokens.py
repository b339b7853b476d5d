"""Token shares between the split layers, against sums and slices on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from runflat.check.small import proof_config
from runflat.parallel.comms import Group
from runflat.parallel.layers import TensorParallel, enter_split, leave_split
from runflat.parallel.tokens import own_tokens, spread
from runflat.plan.batch import even_shares

InGroup = Callable[[int, Callable[[int, Group], Any]], list[Any]]

HIDDEN = 3
SHAPES = {"even": (2, 4), "uneven": (3, 5), "one sequence": (1, 9), "some have none": (1, 2), "none but one": (1, 1)}


def seeded(seed: int, *shape: int) -> torch.Tensor:
    """Returns normal float64 numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_enter_and_leave(in_group: InGroup, shape: str, size: int) -> None:
    """Catches a token in the wrong place, an addend left out, a gradient that is not that of the sum over devices."""
    num_sequences, seq_len = SHAPES[shape]
    whole, upstream = seeded(0, num_sequences, seq_len, HIDDEN), seeded(1, num_sequences, seq_len, HIDDEN)
    shares = even_shares(num_sequences * seq_len, size)

    def rank(index: int, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        tp = TensorParallel(group, True, (num_sequences, seq_len))
        start = sum(shares[:index])
        own = whole.flatten(0, 1)[start : start + shares[index]].unsqueeze(0).clone()
        own = own if tp.splits_tokens else whole.clone()
        own.requires_grad_()
        entered = enter_split(own, tp)
        assert torch.equal(entered, whole)
        left = leave_split(entered * (index + 1), tp)
        assert left.shape == own.shape
        torch.testing.assert_close(left, own * sum(range(1, size + 1)), rtol=1e-14, atol=0)
        left.backward(upstream.flatten(0, 1)[start : start + shares[index]].view(own.shape))
        assert own.grad is not None
        return left.detach(), own.grad

    results = in_group(size, rank)
    for part, expected in ((0, whole * sum(range(1, size + 1))), (1, upstream * sum(range(1, size + 1)))):
        rows = torch.cat([result[part].flatten(0, 1) for result in results])
        torch.testing.assert_close(rows, expected.flatten(0, 1), rtol=1e-14, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_spread_and_own(in_group: InGroup, shape: str) -> None:
    """Catches a share that is laid down at one place and taken up at another, or that keeps the whole in memory."""
    num_sequences, seq_len = SHAPES[shape]
    whole = seeded(0, num_sequences, seq_len, HIDDEN)

    def rank(index: int, group: Group) -> torch.Tensor:
        own = own_tokens(whole, group).requires_grad_()
        assert own.untyped_storage().nbytes() == own.nbytes
        laid = spread(own, (num_sequences, seq_len), group)
        again = own_tokens(laid, group)
        assert torch.equal(again, own)
        again.backward(2 * own.detach())
        assert own.grad is not None
        torch.testing.assert_close(own.grad, 2 * own.detach())
        return laid.detach()

    torch.testing.assert_close(sum(in_group(3, rank)), whole)


def test_layers_computed_again_after_another_micro_batch(jobs: Any) -> None:
    """Catches a layer that backward computes again with the shape of the newest micro-batch instead of its own."""
    job, run = jobs
    batches = [torch.arange(12).view(2, 6), torch.arange(5).view(1, 5)]

    def around(model: torch.nn.Module, steps: Any) -> None:
        params = list(model.parameters())

        def loss(batch: torch.Tensor) -> torch.Tensor:
            total: torch.Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
            return total

        together = torch.autograd.grad(loss(batches[0]) + loss(batches[1]), params)
        one, other = (torch.autograd.grad(loss(batch), params) for batch in batches)
        for both, first, second in zip(together, one, other, strict=True):
            torch.testing.assert_close(both, first + second)
        steps()

    sizes = {"dead": ((0, 1),), "num_replicas": 1, "dtype": torch.float64}
    run(job(proof_config("llama-gqa4"), recompute=True, sequence_parallel=True, **sizes), around)
