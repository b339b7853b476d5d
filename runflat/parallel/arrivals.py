"""When the gradient of each parameter of a shard is final: told from hooks while backward still runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn


class Carrier(Protocol):
    """What takes the gradients of some parameters, once those that are still `missing` are final."""

    missing: set[str]

    @property
    def params(self) -> Collection[str]:
        """The parameters, by name."""


class Arrivals:
    """Takes a parameter off what its carriers miss as soon as the last micro-batch has brought all of its gradient.

    Each time `launch` is called, which starts whatever misses nothing any more. Where layers compute with copies of a
    parameter in another type, a copy's gradient is added to it at once.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        sources: Mapping[str, tuple[nn.Parameter, ...]] | None,
        carriers: Sequence[Carrier],
        launch: Callable[[], None],
    ):
        """Hook what the gradients of `params` come from: these themselves, or the `sources` of each."""
        self._params = params
        self._sources = dict(sources) if sources else {name: (param,) for name, param in params.items()}
        self._carriers = carriers
        self._waiting = {name: [carrier for carrier in carriers if name in carrier.params] for name in params}
        self._launch = launch
        self._owed: dict[str, int] | None = None
        self._hooks = [
            source.register_post_accumulate_grad_hook(self._hook(name))
            for name in params
            for source in self._sources[name]
        ]

    def _hook(self, name: str) -> Any:
        param = self._params[name]

        def ready(source: torch.Tensor) -> None:
            if source is not param:
                assert param.grad is not None
                assert source.grad is not None
                param.grad += source.grad
                source.grad = None
            if self._owed is not None:
                self._owed[name] -= 1
                if not self._owed[name]:
                    for carrier in self._waiting[name]:
                        carrier.missing.discard(name)
                    self._launch()

        return ready

    def arm(self) -> None:
        """The next backward is the last of this step."""
        self._owed = {name: len(sources) for name, sources in self._sources.items()}
        for carrier in self._carriers:
            carrier.missing = set(carrier.params)

    def check(self) -> None:
        """Nothing, if all gradients have come; RuntimeError: a parameter took no part in the backward pass."""
        missing = sorted({name for carrier in self._carriers for name in carrier.missing})
        if missing:
            raise RuntimeError(f"no gradient arrived for {', '.join(missing[:5])}: did the loss use all parameters?")

    def disarm(self) -> None:
        """The next backward is not the last of a step."""
        self._owed = None

    def clear_copies(self) -> None:
        """Drop the gradients of copies, which an unfinished step may have left."""
        for name, sources in self._sources.items():
            for source in sources:
                if source is not self._params[name]:
                    source.grad = None

    def close(self) -> None:
        """Remove the hooks, and forget who is told: its groups go with it, without waiting for Python's collector."""
        for hook in self._hooks:
            hook.remove()
        self._launch = _nobody


def _nobody() -> None:
    raise AssertionError("a gradient came after the end")
