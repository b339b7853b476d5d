"""What `LiftCasts` lifts, and what it must leave alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from runflat.parallel.casts import LiftCasts, lift_forward

X = torch.rand(3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

LIFTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float": lambda x: x.float(),
    "to, positional": lambda x: x.to(torch.float32),
    "to, keyword": lambda x: x.to(dtype=torch.float32),
    "to, device and dtype": lambda x: x.to("cpu", torch.float32),
    "softmax of functional": lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
    "softmax of torch": lambda x: torch.softmax(x, dim=-1, dtype=torch.float32),
    "softmax of the tensor": lambda x: x.softmax(-1, dtype=torch.float32),
}


@pytest.mark.parametrize("cast", LIFTED)
def test_float64_stays(cast: str) -> None:
    """Catches a cast to float32 that transformers uses and the mode misses, and one that the mode changes for good."""
    assert LIFTED[cast](X).dtype == torch.float32
    with LiftCasts():
        lifted = LIFTED[cast](X)
    assert lifted.dtype == torch.float64
    torch.testing.assert_close(lifted, LIFTED[cast](X).double(), rtol=1e-6, atol=1e-6)
    assert LIFTED[cast](X).dtype == torch.float32


@pytest.mark.parametrize("cast", LIFTED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_other_sources_are_cast(cast: str, dtype: torch.dtype) -> None:
    """Catches a mode that also lifts casts from other types, so that a float32 or bfloat16 model would change."""
    source = torch.tensor([0, 1, 5]).to(dtype)
    with LiftCasts():
        result = LIFTED[cast](source)
    assert result.dtype == torch.float32
    assert torch.equal(result, LIFTED[cast](source))


def test_other_targets_are_cast() -> None:
    """Catches a mode that lifts casts to anything but float32."""
    with LiftCasts():
        for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.bool):
            assert X.to(dtype).dtype == dtype
            assert X.to(dtype=dtype).dtype == dtype
        assert X.half().dtype == torch.float16
        assert F.softmax(X, dim=-1).dtype == torch.float64
        assert torch.zeros(2, dtype=torch.float32).dtype == torch.float32
        assert X.double() is X


def test_only_the_forward_is_lifted() -> None:
    """Catches a mode that stays on after the forward."""

    class Rounding(torch.nn.Module):
        """Rounds as transformers' norms do."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.float()

    plain, lifted = Rounding(), Rounding()
    lift_forward(lifted)
    assert lifted(X).dtype == torch.float64
    assert plain(X).dtype == torch.float32
    assert X.float().dtype == torch.float32
