"""Tensor x data parallelism by hand, as Megatron-LM does it: a llama of plain tensors, nothing of runflat in a step.

Column- and row-split weights with one all-reduce each way per block, vocabulary-parallel embedding and loss, gradients
that are views of flat buckets, one all-reduce for each bucket from a hook as soon as it is complete. Degrees are equal
and divide everything. The weights are those of transformers' llama: query, key, value, gate and up are products of
their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F  # noqa: N812 - torch's own convention

ROWS = ("o_proj.weight", "down_proj.weight")
BETAS, EPS = (0.9, 0.95), 1e-8


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, and this process's place: `slot` of `tp` in its replica, `dp` replicas in all."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    tp: int
    slot: int
    dp: int


@dataclass(frozen=True)
class Optimizer:
    """AdamW at a constant rate."""

    lr: float
    weight_decay: float
    clip_norm: float


def adamw(weights: Iterable[torch.Tensor], settings: Optimizer) -> torch.optim.AdamW:
    """The optimizer of both loops that are compared: vectors do not decay."""
    matrices, vectors = [], []
    for weight in weights:
        (matrices if weight.ndim > 1 else vectors).append(weight)
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=BETAS,
        eps=EPS,
        foreach=True,
    )


def cut(name: str, full: torch.Tensor, shape: Shape) -> torch.Tensor:
    """The part of a full weight that `shape.slot` holds: vectors whole, row-split ones by columns, others by rows."""
    if full.ndim == 1:
        return full.clone()
    return full.chunk(shape.tp, 1 if name.endswith(ROWS) else 0)[shape.slot].contiguous().clone()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.mark_dirty(partial)
        dist.all_reduce(partial, group=group)
        return partial

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _CrossEntropy(torch.autograd.Function):
    """Sum of token losses of logits [N, V held here]."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, first: int, group: Any) -> torch.Tensor:
        largest = logits.amax(dim=-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        logits = logits - largest.unsqueeze(-1)
        here = (target >= first) & (target < first + logits.shape[-1])
        rows = torch.where(here, target - first, 0)
        wanted = logits.gather(1, rows.unsqueeze(1)).squeeze(1) * here
        exponentials = logits.exp_()
        sums = torch.stack((exponentials.sum(dim=-1), wanted))
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(-1)), rows, here)
        return (sums[0].log() - sums[1]).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        softmax, rows, here = ctx.saved_tensors
        softmax[torch.arange(len(rows)), rows] -= here.to(softmax.dtype)
        return softmax * grad, None, None, None


class Llama:
    """This process's part of a llama; `weights` by the names that transformers gives them."""

    def __init__(self, shape: Shape, weights: Mapping[str, torch.Tensor], group: dist.ProcessGroup):
        """Cut the full `weights`; `group` is the replica's."""
        self.shape = shape
        self.weights = {name: cut(name, full, shape).requires_grad_() for name, full in weights.items()}
        self._group = group
        self._frequencies = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Sum over tokens [B, T] of the loss of the next one."""
        shape = self.shape
        hidden = self._embed(tokens)
        angles = torch.arange(tokens.shape[1]).float().unsqueeze(1) * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)
        rotation = angles.cos(), angles.sin()
        for layer in range(shape.num_layers):
            name = f"model.layers.{layer}"
            hidden = hidden + self._attention(
                f"{name}.self_attn", self._norm(f"{name}.input_layernorm", hidden), rotation
            )
            hidden = hidden + self._feed_forward(f"{name}.mlp", self._norm(f"{name}.post_attention_layernorm", hidden))
        hidden = _Enter.apply(self._norm("model.norm", hidden), self._group)
        logits = F.linear(hidden, self.weights["lm_head.weight"])
        first = shape.slot * shape.vocab_size // shape.tp
        kept = logits[:, :-1].reshape(-1, logits.shape[-1])
        total: torch.Tensor = _CrossEntropy.apply(kept, tokens[:, 1:].reshape(-1), first, self._group)
        return total

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = self.weights["model.embed_tokens.weight"]
        first = self.shape.slot * len(weight)
        here = (tokens >= first) & (tokens < first + len(weight))
        looked_up = F.embedding(torch.where(here, tokens - first, 0), weight) * here.unsqueeze(-1)
        hidden: torch.Tensor = _Leave.apply(looked_up, self._group)
        return hidden

    def _norm(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.shape.norm_eps)
        return self.weights[f"{name}.weight"] * (hidden * scale)

    def _attention(self, name: str, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        shape = self.shape
        hidden = _Enter.apply(hidden, self._group)
        heads = [
            F.linear(hidden, self.weights[f"{name}.{kind}_proj.weight"])
            .unflatten(-1, (-1, shape.head_dim))
            .transpose(1, 2)
            for kind in "qkv"
        ]
        query, key = (_rotated(states, *rotation) for states in heads[:2])
        group = shape.num_heads // shape.num_kv_heads
        key, value = (states.repeat_interleave(group, dim=1) for states in (key, heads[2]))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out = F.linear(mixed.transpose(1, 2).flatten(2), self.weights[f"{name}.o_proj.weight"])
        total: torch.Tensor = _Leave.apply(out, self._group)
        return total

    def _feed_forward(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        hidden = _Enter.apply(hidden, self._group)
        gate, up = (F.linear(hidden, self.weights[f"{name}.{kind}_proj.weight"]) for kind in ("gate", "up"))
        total: torch.Tensor = _Leave.apply(
            F.linear(F.silu(gate) * up, self.weights[f"{name}.down_proj.weight"]), self._group
        )
        return total


def _rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


class Buckets:
    """Gradients as views of flat buckets, in the order of backward; each is summed over the replicas when complete."""

    def __init__(self, weights: Mapping[str, torch.Tensor], bucket_bytes: int, group: dist.ProcessGroup):
        """`group` are the processes that hold the same part in the other replicas."""
        self._group = group
        self._flats: list[torch.Tensor] = []
        self._left: list[int] = []
        self._sizes: list[int] = []
        self._works: list[Any] = []
        self.last = False
        filling: list[torch.Tensor] = []
        for weight in reversed(weights.values()):
            filling.append(weight)
            if sum(part.nbytes for part in filling) >= bucket_bytes:
                self._bind(filling)
                filling = []
        if filling:
            self._bind(filling)

    def _bind(self, weights: Sequence[torch.Tensor]) -> None:
        flat, index, offset = torch.zeros(sum(part.numel() for part in weights)), len(self._flats), 0
        for weight in weights:
            weight.grad = flat[offset : offset + weight.numel()].view(weight.shape)
            offset += weight.numel()
            weight.register_post_accumulate_grad_hook(lambda _: self._ready(index))
        self._flats.append(flat)
        self._sizes.append(len(weights))

    def _ready(self, index: int) -> None:
        if self.last:
            self._left[index] -= 1
            if not self._left[index]:
                self._works.append(dist.all_reduce(self._flats[index], group=self._group, async_op=True))

    def zero(self) -> None:
        """A step begins."""
        torch._foreach_zero_(self._flats)
        self._left, self._works, self.last = list(self._sizes), [], False

    def wait(self) -> None:
        """Until all sums are there."""
        for work in self._works:
            work.wait()


class PlainTrainer:
    """The hand-written training step."""

    def __init__(
        self, model: Llama, bucket_bytes: int, settings: Optimizer, replicas: dist.ProcessGroup, num_tokens: int
    ):
        """`replicas` hold the same part as this process; `num_tokens` have a target, in the whole batch."""
        self._model = model
        self._settings = settings
        self._num_tokens = num_tokens
        self._replicas = replicas
        self._buckets = Buckets(model.weights, bucket_bytes, replicas)
        matrices = [weight for weight in model.weights.values() if weight.ndim > 1]
        vectors = [weight for weight in model.weights.values() if weight.ndim == 1]
        self._matrices, self._vectors = matrices, vectors
        self._optimizer = adamw(model.weights.values(), settings)

    def step(self, batches: Sequence[torch.Tensor]) -> float:
        """One step on this replica's micro-batches; returns the mean loss of the whole batch."""
        self._buckets.zero()
        loss_sum = 0.0
        for index, batch in enumerate(batches):
            loss = self._model.loss(batch)
            self._buckets.last = index == len(batches) - 1
            loss.backward()
            loss_sum += float(loss.detach())
        self._buckets.wait()
        shape = self._model.shape
        # Vectors are whole on every device of a replica: each counts its part of them.
        squares = torch.stack([self._squared(self._matrices), self._squared(self._vectors) / shape.tp])
        sums = torch.tensor([float(squares.sum()) / shape.dp, loss_sum / shape.tp], dtype=torch.float64)
        dist.all_reduce(sums)
        norm = math.sqrt(float(sums[0])) / self._num_tokens
        scale = min(1.0, self._settings.clip_norm / (norm + 1e-6)) / self._num_tokens
        torch._foreach_mul_([weight.grad for weight in self._model.weights.values()], scale)
        self._optimizer.step()
        return float(sums[1]) / self._num_tokens

    @staticmethod
    def _squared(weights: Sequence[torch.Tensor]) -> torch.Tensor:
        norms = torch._foreach_norm([weight.grad for weight in weights])
        return torch.stack(norms).double().square().sum()
