"""Sequence parallelism: between the split layers each device of a replica has a part of a micro-batch's tokens.

The tokens of a micro-batch are one row, sequence after sequence, that is dealt out in equal shares, which differ by at
most one token and may be empty (Megatron-LM's scheme, arXiv 2205.05198, for any degree and length). All-gather and
reduce-scatter are all-to-alls: gloo has no other collective for unequal shares, and so partial products are added in
rank order, once for each token.

Shape suffixes: B batch, T tokens, N = B T tokens in a row, S own share of them, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from runflat.parallel.comms import Group
from runflat.plan.batch import even_shares


class _Gather(torch.autograd.Function):
    """All-gather in forward, reduce-scatter of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, num_tokens: int, group: Group) -> torch.Tensor:
        ctx.group = group
        return _all_gather(own, even_shares(num_tokens, group.size), group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _reduce_scatter(grad, even_shares(grad.shape[0], ctx.group.size), ctx.group), None, None


class _Scatter(torch.autograd.Function):
    """Reduce-scatter in forward, all-gather of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group, ctx.num_tokens = group, partial.shape[0]
        return _reduce_scatter(partial, even_shares(partial.shape[0], group.size), group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_gather(grad, even_shares(ctx.num_tokens, ctx.group.size), ctx.group), None


def _all_gather(own: torch.Tensor, shares: tuple[int, ...], group: Group) -> torch.Tensor:
    """[S, H] of all devices in rank order: [N, H]."""
    whole = own.new_empty((sum(shares), own.shape[1]))
    copies = own.repeat(group.size, 1)
    group.wait([group.launch_all_to_all(whole, copies, shares, [own.shape[0]] * group.size)])
    return whole


def _reduce_scatter(partial: torch.Tensor, shares: tuple[int, ...], group: Group) -> torch.Tensor:
    """The sum over all devices of [N, H], of which this device gets its own rows: [S, H]."""
    own = shares[group.rank]
    addends = partial.new_empty((group.size * own, partial.shape[1]))
    group.wait([group.launch_all_to_all(addends, partial.contiguous(), [own] * group.size, shares)])
    return addends.view(group.size, own, partial.shape[1]).sum(dim=0)


def gather_tokens(own: torch.Tensor, batch_shape: tuple[int, int], group: Group) -> torch.Tensor:
    """The hidden states of all tokens, [B, T, H], from all devices' shares [1, S, H]: for a column-split layer."""
    num_sequences, seq_len = batch_shape
    whole: torch.Tensor = _Gather.apply(own.flatten(0, 1), num_sequences * seq_len, group)
    return whole.view(num_sequences, seq_len, -1)


def scatter_tokens(partial: torch.Tensor, group: Group) -> torch.Tensor:
    """The own share, [1, S, H], of the sum over the group of `partial` [B, T, H], the output of a row-split layer."""
    own: torch.Tensor = _Scatter.apply(partial.flatten(0, 1), group)
    return own.unsqueeze(0)


def spread(own: torch.Tensor, batch_shape: tuple[int, int], group: Group) -> torch.Tensor:
    """[B, T, H] with the share `own` [1, S, H] at its place and zeros elsewhere: for code that looks at the shape."""
    num_sequences, seq_len = batch_shape
    start, stop = _own_range(num_sequences * seq_len, group)
    padded = nn.functional.pad(own[0], (0, 0, start, num_sequences * seq_len - stop))
    return padded.view(num_sequences, seq_len, -1)


def own_tokens(whole: torch.Tensor, group: Group) -> torch.Tensor:
    """The own share, [1, S, H], of hidden states [B, T, H], in memory of its own."""
    start, stop = _own_range(whole.shape[0] * whole.shape[1], group)
    return whole.flatten(0, 1)[start:stop].clone().unsqueeze(0)


def _own_range(num_tokens: int, group: Group) -> tuple[int, int]:
    shares = even_shares(num_tokens, group.size)
    start = sum(shares[: group.rank])
    return start, start + shares[group.rank]
