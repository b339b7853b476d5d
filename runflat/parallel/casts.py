"""How the layers of an unmodified transformers model compute: roundings lifted, activations computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own convention
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

_WITH_DTYPE = frozenset({torch.Tensor.to, F.softmax, torch.softmax, torch.Tensor.softmax})
_CASTING = _WITH_DTYPE | {torch.Tensor.float}


class LiftCasts(TorchFunctionMode):
    """Makes every float64 -> float32 cast inside a forward a no-op; all else is untouched.

    transformers rounds to float32 in norms, in eager attention's softmax and in the loss, also in a float64 model. With
    this mode on both sides, what is left between two runs is the order of summation.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func`, without the cast if it is one of float64 to float32."""
        options = kwargs or {}
        if func in _CASTING and args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func is torch.Tensor.to:
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            options = {k: torch.float64 if v is torch.float32 else v for k, v in options.items()}
        return func(*args, **options)


def lift_forward(model: torch.nn.Module) -> None:
    """Make every later forward of `model` run under `LiftCasts`."""
    forward = model.forward

    def lifted(*args: Any, **kwargs: Any) -> Any:
        with LiftCasts():
            return forward(*args, **kwargs)

    model.forward = lifted  # an instance attribute, on this one model only


def recompute_layers(
    model: PreTrainedModel,
    lift_casts: bool = False,
    keep: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Keep only the inputs of `model`'s layers for backward, which computes each layer again.

    The collectives inside are done again too, on all devices of a replica in the same order. `lift_casts`: the forward
    is lifted (`lift_forward`), so backward's computation must be. `keep` is called in forward; what it returns is the
    context of the same layer's computation in backward.
    """

    @contextmanager
    def again(kept: AbstractContextManager[Any]) -> Iterator[None]:
        with kept, LiftCasts() if lift_casts else nullcontext():
            yield

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), again(keep())

    # Nothing is drawn at random, so that no state of a generator is worth keeping.
    options = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    model.activation_checkpointing_enable(options)
