"""When the gradient of each parameter of a shard is final: told from hooks while backward still runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


class Arrivals:
    """Calls `final(name)` as soon as the last micro-batch has brought all of a parameter's gradient.

    Where layers compute with copies of a parameter in another type, a copy's gradient is added to it at once.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        sources: Mapping[str, tuple[nn.Parameter, ...]] | None,
        final: Callable[[str], None],
    ):
        """Hook what the gradients of `params` come from: these themselves, or the `sources` of each."""
        self._params = params
        self._sources = dict(sources) if sources else {name: (param,) for name, param in params.items()}
        self._final = final
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
                    self._final(name)

        return ready

    def arm(self) -> None:
        """The next backward is the last of this step."""
        self._owed = {name: len(sources) for name, sources in self._sources.items()}

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
        self._final = _told_nobody


def _told_nobody(name: str) -> None:
    raise AssertionError(f"a gradient of {name} came after the end")
