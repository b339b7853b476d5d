"""Tensor-parallel pieces that stand in for, or hook into, the layers of an unmodified transformers model.

Shape suffixes: B batch, T tokens, H hidden, V vocabulary rows held here, N flattened tokens.
f and g are the conjugate operators of Megatron-LM (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own convention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from runflat.parallel.comms import Group
from runflat.parallel.tokens import gather_tokens, scatter_tokens, spread
from runflat.plan.units import Range

INDEXED = {"eager": "runflat_indexed_eager", "sdpa": "runflat_indexed_sdpa"}
"""Attention implementations with one KV head per query head, picked by index, by the implementation they call."""


@dataclass
class TensorParallel:
    """The TP group that a model's layers use: one cell shared by all, so that a generation can change it.

    With `sequence_parallel` hidden states are whole inside the split layers only. `batch_shape` is then [B, T] of the
    micro-batch that is computed.
    """

    group: Group
    sequence_parallel: bool = False
    batch_shape: tuple[int, int] = (0, 0)

    @property
    def splits_tokens(self) -> bool:
        """Whether a device has only a part of the tokens between the split layers."""
        return self.sequence_parallel and self.group.size > 1

    def keep(self) -> AbstractContextManager[None]:
        """A context in which the micro-batch of now is that which is computed, whatever has come since."""
        return _computing(self, self.batch_shape)


@contextmanager
def _computing(tp: TensorParallel, batch_shape: tuple[int, int]) -> Iterator[None]:
    before, tp.batch_shape = tp.batch_shape, batch_shape
    try:
        yield
    finally:
        tp.batch_shape = before


class _ToTensorParallel(torch.autograd.Function):
    """f: identity in forward, all-reduce of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        # A copy: autograd may still use the incoming gradient elsewhere.
        total = grad.clone(memory_format=torch.contiguous_format)
        ctx.group.all_reduce(total)
        return total, None


class _FromTensorParallel(torch.autograd.Function):
    """g: all-reduce in forward, in place, identity in backward."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.mark_dirty(partial)
        group.all_reduce(partial)
        return partial

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def to_tensor_parallel(hidden: torch.Tensor, group: Group) -> torch.Tensor:
    """`hidden`, replicated over the group, as the input of a column-split layer."""
    if group.size == 1:
        return hidden
    result: torch.Tensor = _ToTensorParallel.apply(hidden, group)
    return result


def from_tensor_parallel(partial: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over the group of `partial`, the output of a row-split layer: contiguous, and nobody else's."""
    if group.size == 1:
        return partial
    result: torch.Tensor = _FromTensorParallel.apply(partial, group)
    return result


def enter_split(hidden: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """`hidden` between the split layers as the input of one that is split by columns: all tokens."""
    if tp.splits_tokens:
        return gather_tokens(hidden, tp.batch_shape, tp.group)
    return to_tensor_parallel(hidden, tp.group)


def leave_split(partial: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """The sum of `partial`, the output of a row-split layer, as it is between the split layers."""
    if tp.splits_tokens:
        return scatter_tokens(partial, tp.group)
    return from_tensor_parallel(partial, tp.group)


class RowLinear(nn.Module):
    """A linear layer split by input columns: partial products are summed over the group, then the bias is added."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, tp: TensorParallel):
        """Take over the (sharded) `weight` [out, local in] and the replicated `bias` [out]."""
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.in_features = weight.shape[1]
        self.out_features = weight.shape[0]
        self._tp = tp

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, T, local in] -> [B, T, out], equal on all devices of the group (or [1, S, out], its tokens)."""
        total = leave_split(F.linear(hidden, self.weight), self._tp)
        return total if self.bias is None else total + self.bias


class VocabularyRows:
    """The vocabulary rows that a device holds: translation between token ids and local row numbers."""

    def __init__(self, vocab_size: int, device: torch.device):
        """No row is held yet."""
        self.row_of_token = torch.full((vocab_size,), -1, dtype=torch.long, device=device)

    def hold(self, ranges: tuple[Range, ...]) -> None:
        """From now on the rows in `ranges` are held, in this storage order."""
        device = self.row_of_token.device
        self.row_of_token.fill_(-1)
        position = 0
        for start, stop in ranges:
            self.row_of_token[start:stop] = torch.arange(position, position + stop - start, device=device)
            position += stop - start

    def rows(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Local row per token (0 where not held), and a mask of the held ones; same shape as `tokens`."""
        rows = self.row_of_token[tokens]
        held = rows >= 0
        return torch.where(held, rows, 0), held


def parallel_embedding(
    module: nn.Embedding, vocabulary: VocabularyRows, tp: TensorParallel, dtype: torch.dtype | None = None
) -> None:
    """Make `module`, whose weight is cut to the held rows, look up tokens of the whole vocabulary.

    Hooks around the module's own forward keep whatever a subclass does (a scale, say). Tokens held elsewhere give zeros
    here; the sum over the group is the embedding, in `dtype` (none: that of the weight). With sequence parallelism each
    device has that of its own tokens, and zeros elsewhere: a model takes positions and masks from its shape.
    """
    padding = module.padding_idx
    masks: list[torch.Tensor] = []

    def before(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        rows, held = vocabulary.rows(args[0])
        tp.batch_shape = (rows.shape[0], rows.shape[1])
        masks.append(held)
        # The padding row's gradient is dropped by torch's own lookup, where that row is held.
        row = -1 if padding is None else int(vocabulary.row_of_token[padding])
        module.padding_idx = None if row < 0 else row
        return (rows,)

    def after(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        partial = output * masks.pop().unsqueeze(-1).to(output.dtype)
        total = leave_split(partial.to(dtype or output.dtype), tp)
        return spread(total, tp.batch_shape, tp.group) if tp.splits_tokens else total

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _indexed(base: str) -> Any:
    """An attention function that gives every query head its own KV head by index, then calls the `base` implementation.

    All keywords pass through, so that nothing (soft-cap, window, scale) can be dropped here.
    """

    def attention(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        index: Any = module.runflat_kv_index
        if base == "eager":
            function = sys.modules[type(module).__module__].eager_attention_forward
        else:
            function = ALL_ATTENTION_FUNCTIONS[base]
        return function(module, query, key.index_select(1, index), value.index_select(1, index), *args, **kwargs)

    return attention


def register_indexed_attention() -> None:
    """Make the indexed attention functions known to transformers, for attention and for masks.

    An implementation that is registered for attention only silently gets no mask.
    """
    for base, name in INDEXED.items():
        AttentionInterface.register(name, _indexed(base))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
