"""Seconds of one layer, of the embedding and of the head, for one micro-batch on the most loaded device of a stage.

Bytes per token of passes over memory (2-byte activations; h hidden, f local FFN columns, a local heads, s length)
    norms, dropout, residual     20 h forward, 20 h backward; divided by the group with sequence parallelism
    activation function          4 f forward, 6 f backward; gated 6 f and 10 f
    eager softmax and dropout    9 a s forward, 11 a s backward
    loss, per local logit        34 forward, 18 backward: a float32 copy, maximum, difference, exponential, sum,
                                 quotient; the softmax scaled by the incoming gradient, and its 16-bit copy
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from runflat.perf.comm_time import Fabric
from runflat.perf.device_time import Device
from runflat.perf.layout import Layout
from runflat.perf.shape import ModelShape
from runflat.plan.assignment import assign
from runflat.plan.units import Kind, block_size

_ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Share:
    """What the most loaded device of a stage holds: query heads, KV heads, FFN columns, vocabulary rows."""

    heads: int
    kv_heads: int
    ffn: int
    vocab: int


@lru_cache(maxsize=4096)
def share_of(shape: ModelShape, tp_full: int, dead_slots: tuple[int, ...]) -> Share:
    """The largest share of each kind of unit over the live slots, from the runtime's own assignment.

    Raises:
        PlanError: more slots than units of some kind, or no live slot.
    """
    heads = assign(shape.num_heads, tp_full, dead_slots)
    kv = Kind("kv", shape.num_kv_heads, 1, parent="head", group=shape.num_heads // shape.num_kv_heads)
    columns = []
    for size in (shape.ffn_size, shape.vocab_size):
        block = block_size(size, tp_full)
        loads = assign(-(-size // block), tp_full, dead_slots)
        columns.append(min(size, max(len(units) for units in loads) * block))
    return Share(
        max(len(units) for units in heads),
        max(len(kv.units_of_parent(units)) for units in heads),
        columns[0],
        columns[1],
    )


@dataclass(frozen=True)
class Work:
    """Seconds of compute and of visible tensor- and context-parallel communication."""

    matmul_s: float = 0.0
    attention_s: float = 0.0
    memory_s: float = 0.0
    tp_comm_s: float = 0.0
    cp_comm_s: float = 0.0

    def __add__(self, other: Work) -> Work:
        """Both, one after the other."""
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Work)))

    def times(self, factor: float) -> Work:
        """The same work `factor` times."""
        return Work(*(getattr(self, f.name) * factor for f in fields(Work)))

    @property
    def total_s(self) -> float:
        """Sum of the parts."""
        return self.matmul_s + self.attention_s + self.memory_s + self.tp_comm_s + self.cp_comm_s


@dataclass(frozen=True)
class LayerTimer:
    """Times one stage's layers at `tp` live devices, the fullest of which holds `share`."""

    shape: ModelShape
    layout: Layout
    device: Device
    fabric: Fabric
    share: Share
    tp: int

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one context-parallel member."""
        return self.layout.micro_batch * self.layout.seq_len // self.layout.cp

    def layer(self) -> tuple[Work, Work]:
        """Forward and backward of one layer; what recomputation repeats is in backward."""
        forward = self._products_forward() + self._attention(backward=False) + self._passes(backward=False)
        forward += self._collectives(2, "full")
        backward = self._products_backward() + self._attention(backward=True) + self._passes(backward=True)
        backward += self._collectives(2, "backward")
        if self.layout.recompute == "full":
            backward += forward
        elif self.layout.recompute == "selective" and self.layout.attention == "eager":
            backward += self._attention(backward=False)
        return forward, backward

    def head(self) -> tuple[Work, Work]:
        """Forward and backward of the final projection and the loss."""
        rows, hidden = self.share.vocab, self.shape.hidden_size
        product = self.device.matmul_s
        logits = self.tokens * rows
        forward = Work(
            matmul_s=product(self.tokens, rows, hidden, "bf16"), memory_s=self.device.memory_s(34.0 * logits)
        )
        grads = product(self.tokens, hidden, rows, "bf16") + product(rows, hidden, self.tokens, "bf16")
        backward = Work(matmul_s=grads, memory_s=self.device.memory_s(18.0 * logits)) + self._collectives(1, "backward")
        return forward, backward

    def embedding(self) -> tuple[Work, Work]:
        """Forward and backward of the embedding: a lookup, and one collective over the group."""
        passes = self.device.memory_s(4.0 * self.tokens * self.shape.hidden_size)
        return Work(memory_s=passes) + self._collectives(1, "full"), Work(memory_s=passes)

    def _weights(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of the local matrices of a layer."""
        hidden, d = self.shape.hidden_size, self.shape.head_dim
        qkv = (self.share.heads + 2 * self.share.kv_heads) * d
        up = self.share.ffn * (2 if self.shape.gated else 1)
        return (qkv, hidden), (hidden, self.share.heads * d), (up, hidden), (hidden, self.share.ffn)

    def _products_forward(self) -> Work:
        precision = self.layout.precision
        return Work(sum(self.device.matmul_s(self.tokens, out, inp, precision) for out, inp in self._weights()))

    def _products_backward(self) -> Work:
        precision, tokens = self.layout.precision, self.tokens
        seconds = 0.0
        for out, inp in self._weights():
            seconds += self.device.matmul_s(tokens, inp, out, precision) + self.device.matmul_s(
                out, inp, tokens, precision
            )
        return Work(seconds)

    def _attention(self, backward: bool) -> Work:
        seq, d = self.layout.seq_len, self.shape.head_dim
        if self.layout.attention == "flash":
            flops = 2.0 * self.tokens * seq * d * self.share.heads * (2.5 if backward else 1.0)
            seconds = self.device.flash_s(flops)
            return Work(attention_s=seconds, cp_comm_s=self._ring_s(seconds, backward))
        rows, batch = seq // self.layout.cp, self.layout.micro_batch * self.share.heads
        scores = self.device.matmul_s(rows, seq, d, "bf16", batch)
        values = self.device.matmul_s(rows, d, seq, "bf16", batch)
        passes = self.device.memory_s((11.0 if backward else 9.0) * self.tokens * self.share.heads * seq)
        seconds = (scores + values) * (2 if backward else 1) + passes
        return Work(attention_s=seconds, cp_comm_s=self._ring_s(seconds, backward))

    def _ring_s(self, hidden_under_s: float, backward: bool) -> float:
        """Visible seconds of passing keys and values (and their gradients) around the context-parallel ring."""
        cp = self.layout.cp
        if cp == 1:
            return 0.0
        block = 2.0 * self.tokens * self.share.kv_heads * self.shape.head_dim * _ELEMENT_BYTES
        stride = self.layout.tp * (cp - 1)
        sends = (cp - 1) * self.fabric.send_s(block, stride, min(self.layout.tp * cp, self.layout.num_devices))
        return max(0.0, sends * (2 if backward else 1) - hidden_under_s)

    def _passes(self, backward: bool) -> Work:
        group = self.tp if self.layout.sequence_parallel else 1
        activation = (10 if backward else 6) if self.shape.gated else (6 if backward else 4)
        per_token = 20.0 * self.shape.hidden_size / group + activation * self.share.ffn
        return Work(memory_s=self.device.memory_s(per_token * self.tokens))

    def _collectives(self, count: int, overlap: str) -> Work:
        """`count` all-reduces of the hidden state (or as many gather and scatter pairs), less what overlap hides."""
        num_bytes = float(self.tokens * self.shape.hidden_size * _ELEMENT_BYTES)
        seconds = count * self.fabric.all_reduce_s(num_bytes, self.tp)
        if self.layout.overlap_tp == "full" or self.layout.overlap_tp == overlap:
            seconds *= 1 - self.fabric.efficiencies.tp_hidden
        return Work(tp_comm_s=seconds)
