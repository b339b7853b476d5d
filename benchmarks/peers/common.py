"""What the peers' training loops share: settings, the model cut for tensor parallelism, data, pace, records.

The loops are plain: an unmodified transformers model from a model directory, column and row splits of its linear layers
with one all-reduce each way, AdamW over whole gradients. Nothing of runflat is in them but the order of the samples.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from runflat.train.data import Corpus

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Settings:
    """What a training loop is told. `sequence_s` is the declared time of one sequence on a whole replica."""

    model: str
    corpus: dict[str, Any]
    folder: str
    replicas: int
    tp: int
    sequences: int
    sequence_s: float
    lr: float
    checkpoint_every: int

    def write(self, path: Path) -> None:
        """Store as JSON."""
        path.write_text(json.dumps(asdict(self)))


def read_settings(path: str) -> Settings:
    """Settings as `Settings.write` stored them."""
    return Settings(**json.loads(Path(path).read_text()))


class Pace:
    """Sleeps until the declared time of a step is over, as runflat's emulated devices do.

    Real work is part of the declared time, and what follows the sleep (exchange, update) is absorbed by the next one.
    """

    def __init__(self, step_s: float):
        """Begin now."""
        self._step_s = step_s
        self.rebase()

    def rebase(self) -> None:
        """The time until now was real: it gives no credit."""
        self._end_s = time.monotonic()

    def computed(self) -> None:
        """The computation of a step is done: sleep for what is left of its declared time."""
        self._end_s = max(self._end_s, time.monotonic() - self._step_s) + self._step_s
        time.sleep(max(0.0, self._end_s - time.monotonic()))


class Records:
    """A file of committed steps, one JSON line each, and the process ids of the workers."""

    def __init__(self, settings: Settings, replica: int, slot: int):
        """Say which process this worker is."""
        self._path = Path(settings.folder, "commits", f"{replica}.jsonl")
        self._writes = slot == 0
        pid = Path(settings.folder, "pids", f"{replica}-{slot}.{os.getpid()}")
        pid.write_text(str(os.getpid()))
        pid.rename(pid.with_suffix(""))

    def commit(self, step: int, tokens: int, epoch: int, loss: float) -> None:
        """A step is committed: this replica brought `tokens`; `epoch` changes when the members do."""
        if self._writes:
            with self._path.open("a") as file:
                file.write(json.dumps({"step": step, "tokens": tokens, "epoch": epoch, "loss": loss}) + "\n")


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
    def forward(ctx: Any, hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        hidden = hidden.clone()
        dist.all_reduce(hidden, group=group)
        return hidden

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def build_model(settings: Settings, slot: int, group: dist.ProcessGroup) -> PreTrainedModel:
    """The model directory's model, its attention and feed-forward layers cut for `slot` of the group."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            _cut(block, slot, settings.tp, group)
    model.train()
    return model


def _cut(block: nn.Module, slot: int, tp: int, group: dist.ProcessGroup) -> None:
    for name, linear in block.named_children():
        if name in COLUMNS + ROWS:
            assert linear.bias is None
            part = linear.weight.detach().chunk(tp, 0 if name in COLUMNS else 1)[slot]
            linear.weight = nn.Parameter(part.contiguous().clone())
        if name in ROWS:
            linear.register_forward_hook(lambda _, args, output: _Leave.apply(output, group))

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (_Enter.apply(args[0], group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": _Enter.apply(kwargs["hidden_states"], group)}

    block.register_forward_pre_hook(enter, with_kwargs=True)


def build_optimizer(settings: Settings, model: nn.Module) -> torch.optim.AdamW:
    """The optimizer of all three loops."""
    return torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)


class Batches:
    """A replica's share of each step, in the order of the samples that runflat uses."""

    def __init__(self, settings: Settings, replica: int):
        """Open the tokens."""
        self._corpus = Corpus.from_json(settings.corpus)
        self._settings = settings
        self._replica = replica

    def of(self, step: int) -> torch.Tensor:
        """Tokens [sequences, seq_len] of this replica in `step`."""
        share = self._settings.sequences // self._settings.replicas
        first = step * self._settings.sequences + self._replica * share
        return torch.from_numpy(self._corpus.train_sequences(first, share))
