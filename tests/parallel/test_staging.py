"""Copies through two small buffers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from runflat.parallel.staging import host_copy, staged_copy

SHAPES = [(), (0,), (1,), (64,), (7, 13), (3, 0, 2), (5, 2, 9)]


@pytest.mark.parametrize("stage_bytes", [8, 64, 1000, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_byte_arrives(shape: tuple[int, ...], dtype: torch.dtype, stage_bytes: int) -> None:
    """Catches a buffer that is filled again before it is copied on, and a last piece that is too long or missing."""
    tensor = torch.randn(shape).mul(100).to(dtype)
    copied = staged_copy(tensor, stage_bytes)
    assert copied.dtype == dtype
    assert copied.shape == tensor.shape
    assert torch.equal(copied, tensor)


@pytest.mark.parametrize("copy", [host_copy, lambda tensor: staged_copy(tensor, 16)])
def test_a_copy_has_memory_of_its_own_in_order(copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Catches a copy that follows the next steps, and one that keeps strides which a file cannot have."""
    tensor = torch.arange(12.0).view(3, 4).t()
    copied = copy(tensor)
    assert copied.is_contiguous()
    before = tensor.clone()
    tensor.zero_()
    assert torch.equal(copied, before)
