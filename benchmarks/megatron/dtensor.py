"""The same training with torch's DTensor: `parallelize_module` on transformers' llama, and bucketed all-reduces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from plain import Optimizer, adamw
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F  # noqa: N812 - torch's own convention
from transformers import AutoModelForCausalLM, PreTrainedConfig


class DTensorTrainer:
    """The training step of a model that `parallelize_module` has split."""

    def __init__(
        self,
        config: PreTrainedConfig,
        weights: Mapping[str, torch.Tensor],
        mesh: DeviceMesh,
        bucket_bytes: int,
        settings: Optimizer,
        num_tokens: int,
    ):
        """Split the model over the last axis of `mesh`; `num_tokens` have a target, in the whole batch."""
        self._model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self._model.load_state_dict(dict(weights))
        self._model.train()
        tp = mesh["tp"]
        parallelize_module(self._model, tp, _plan(config.num_hidden_layers))
        self._settings, self._num_tokens = settings, num_tokens
        self._group, self._tp_size, self._tp = mesh["dp"].get_group(), tp.size(), tp
        params = list(self._model.parameters())
        self._params = params
        self._buckets: list[list[nn.Parameter]] = [[]]
        for param in reversed(params):
            self._buckets[-1].append(param)
            if sum(_local(part).nbytes for part in self._buckets[-1]) >= bucket_bytes:
                self._buckets.append([])
        self._buckets = [bucket for bucket in self._buckets if bucket]
        self._last = False
        for index, bucket in enumerate(self._buckets):
            for param in bucket:
                param.register_post_accumulate_grad_hook(lambda param, index=index: self._ready(param, index))
        self._optimizer = adamw(params, settings)

    def _ready(self, param: nn.Parameter, index: int) -> None:
        if not self._last:
            return
        if isinstance(param, DTensor) and param.grad.placements != param.placements:
            param.grad = param.grad.redistribute(placements=param.placements)  # the embedding's is not split by rows
        self._left[index] -= 1
        if not self._left[index]:
            flat = torch.cat([_local_grad(param).reshape(-1) for param in self._buckets[index]])
            self._works.append((index, flat, dist.all_reduce(flat, group=self._group, async_op=True)))

    def step(self, batches: Sequence[torch.Tensor]) -> float:
        """One step on this replica's micro-batches; returns the mean loss of the whole batch."""
        self._left = [len(bucket) for bucket in self._buckets]
        self._works: list[tuple[int, torch.Tensor, Any]] = []
        self._last = False
        self._optimizer.zero_grad()
        loss_sum = 0.0
        for index, batch in enumerate(batches):
            with loss_parallel():
                logits = self._model(input_ids=batch, use_cache=False).logits
                logits = DTensor.from_local(logits[:, :-1].flatten(0, 1), self._tp, [Shard(-1)], run_check=False)
                loss = F.cross_entropy(logits, batch[:, 1:].reshape(-1), reduction="sum")
                self._last = index == len(batches) - 1
                loss.backward()
            loss_sum += float(loss.detach().full_tensor())
        for index, flat, work in self._works:
            work.wait()
            offset = 0
            for param in self._buckets[index]:
                grad = _local_grad(param)
                grad.copy_(flat[offset : offset + grad.numel()].view(grad.shape))
                offset += grad.numel()
        squared = sum(
            float(_local_grad(param).double().square().sum()) / (self._tp_size if param.ndim == 1 else 1)
            for param in self._params
        )
        replicas = dist.get_world_size() // self._tp_size
        sums = torch.tensor([squared / replicas, loss_sum / self._tp_size], dtype=torch.float64)
        dist.all_reduce(sums)
        norm = float(sums[0]) ** 0.5 / self._num_tokens
        scale = min(1.0, self._settings.clip_norm / (norm + 1e-6)) / self._num_tokens
        torch._foreach_mul_([_local_grad(param) for param in self._params], scale)
        self._optimizer.step()
        return float(sums[1]) / self._num_tokens


def _plan(num_layers: int) -> dict[str, Any]:
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(),
    }
    for layer in range(num_layers):
        name = f"model.layers.{layer}"
        plan |= {f"{name}.self_attn.{kind}_proj": ColwiseParallel() for kind in "qkv"}
        plan |= {f"{name}.mlp.{kind}_proj": ColwiseParallel() for kind in ("gate", "up")}
        plan |= {f"{name}.self_attn.o_proj": RowwiseParallel(), f"{name}.mlp.down_proj": RowwiseParallel()}
    return plan


def _local(param: nn.Parameter) -> torch.Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def _local_grad(param: nn.Parameter) -> torch.Tensor:
    grad = param.grad
    assert grad is not None
    return grad.to_local() if isinstance(grad, DTensor) else grad
