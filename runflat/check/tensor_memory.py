"""Bytes of the tensors that are alive, counted call by call: what a computation needs, whatever the allocator does."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """While it is entered, `peak_bytes` is the most that tensors made in this thread since then have held at once.

    Views count once, with what they look at. What an operation needs inside itself and frees before it returns is not
    seen.
    """

    def __init__(self) -> None:
        """Nothing has been made yet."""
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func` and count what it has made."""
        before = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _key(leaf) not in before | self._known:
                self._made(leaf.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _made(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live_bytes += num_bytes
        weakref.finalize(storage, self._gone, key, num_bytes).atexit = False

    def _gone(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live_bytes -= num_bytes


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
