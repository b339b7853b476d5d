"""Make a meta-device model real on one device: only the shard that the plan gives it is ever allocated."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from runflat.errors import CheckpointError
from runflat.parallel.comms import Group
from runflat.parallel.layers import (
    INDEXED,
    RowLinear,
    VocabularyRows,
    parallel_embedding,
    register_indexed_attention,
    to_tensor_parallel,
)
from runflat.parallel.loss import VocabParallelLoss
from runflat.parallel.tp_plan import MODULE_RULES, ModuleRule, ShardingRules
from runflat.plan.units import ModelSpec, ParamSpec, Range, param_ranges

Held = Mapping[str, tuple[int, ...]]
WeightSource = Callable[[ParamSpec, tuple[Range, ...]], torch.Tensor]
"""Gives the elements of a parameter that lie in the ranges of its partitioned dim (the whole of a replicated one)."""


def cut(full: torch.Tensor, param: ParamSpec, ranges: tuple[Range, ...]) -> torch.Tensor:
    """The part of the full tensor that lies in `ranges` of the partitioned dim, as a tensor of its own."""
    if param.dim is None:
        return full.clone()
    return torch.cat([full.narrow(param.dim, start, stop - start) for start, stop in ranges], dim=param.dim)


def initial_weights(model: PreTrainedModel, seed: int) -> WeightSource:
    """Initial weights that are the same under any plan: each parameter is drawn from a generator of (seed, name).

    Matrices are normal with the configuration's `initializer_range` (the padding row of the embedding zero), as
    transformers initialises linear layers and embeddings; vectors take the value that the model's own initialisation
    gives them. The full tensor exists on the CPU in float32 for one parameter at a time.
    """
    std = float(getattr(model.config, "initializer_range", None) or 0.02)
    modules = dict(model.named_modules())

    def draw(param: ParamSpec, ranges: tuple[Range, ...]) -> torch.Tensor:
        owner = modules[param.name.rpartition(".")[0]]
        if len(param.shape) > 1:
            digest = hashlib.sha256(f"{seed}:{param.name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            full = torch.empty(param.shape, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=generator)
            if isinstance(owner, nn.Embedding) and owner.padding_idx is not None:
                full[owner.padding_idx].zero_()
        elif isinstance(owner, nn.Linear | RowLinear):
            full = torch.zeros(param.shape, dtype=torch.float32)
        else:
            full = _vector(model, owner, param)
        return cut(full, param, ranges)

    return draw


def _vector(model: PreTrainedModel, owner: nn.Module, param: ParamSpec) -> torch.Tensor:
    """A norm's weight or bias as the model's own initialisation sets it."""
    single = copy.deepcopy(owner).to_empty(device="cpu")
    model._init_weights(single)
    value: torch.Tensor = getattr(single, param.name.rpartition(".")[2]).detach()
    return value.to(torch.float32)


def tensor_weights(tensors: Mapping[str, torch.Tensor]) -> WeightSource:
    """Weights cut from full tensors by name."""
    return lambda param, ranges: cut(tensors[param.name], param, ranges)


def safetensors_weights(folder: Path) -> WeightSource:
    """Weights read lazily from a model directory in transformers' safetensors format; only the needed slices are read.

    Raises:
        CheckpointError: no safetensors file, a missing tensor, or one of another shape.
    """
    files = _tensor_files(folder)

    def read(param: ParamSpec, ranges: tuple[Range, ...]) -> torch.Tensor:
        name = param.name if param.name in files else param.name.partition(".")[2]
        if name not in files:
            raise CheckpointError(f"{folder} has no tensor '{param.name}': it is not a checkpoint of this model.")
        with safe_open(str(files[name]), framework="pt") as opened:
            lazy = opened.get_slice(name)
            if tuple(lazy.get_shape()) != param.shape:
                raise CheckpointError(f"{folder}: '{name}' has shape {lazy.get_shape()}, not {list(param.shape)}.")
            return read_slices(lazy, param, ranges)

    return read


def read_slices(lazy: Any, param: ParamSpec, ranges: tuple[Range, ...]) -> torch.Tensor:
    """The `ranges` of a lazily opened safetensors slice along the parameter's partitioned dim."""
    if param.dim is None:
        whole: torch.Tensor = lazy[:]
        return whole
    if param.dim == 0:
        return torch.cat([lazy[start:stop] for start, stop in ranges], dim=0)
    return torch.cat([lazy[:, start:stop] for start, stop in ranges], dim=1)


def _tensor_files(folder: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    index = folder / "model.safetensors.index.json"
    try:
        if index.exists():
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            return {name: folder / file for name, file in weight_map.items()}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(str(path), framework="pt") as opened:
                files.update(dict.fromkeys(opened.keys(), path))
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"cannot read the weights in {folder}: {error}") from error
    if not files:
        raise CheckpointError(f"{folder} has no .safetensors file: point to a directory saved by transformers.")
    return files


def shard_model(
    model: PreTrainedModel,
    rules: ShardingRules,
    held: Held,
    group: Group,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, nn.Parameter]:
    """Turn the meta-device `model` into this device's part of it, in place; returns its parameters by full-model name.

    Buffers are built, parameters are filled from `source`, row-split layers are replaced, and hooks put the collectives
    where the plan wants them. `group` is the replica's TP group, `held` the units of this device per kind.
    """
    register_indexed_attention()
    _build_buffers(model, device)
    params = {
        param.name: nn.Parameter(
            source(param, param_ranges(rules.spec, param, held)).to(device=device, dtype=dtype).contiguous()
        )
        for param in rules.spec.params
    }
    _install(model, params)
    _split_blocks(model, rules, group)
    _split_attention(model, rules.spec, held)
    _split_vocabulary(model, rules, held, group, device)
    return params


def _build_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Non-persistent buffers (rotary frequencies, embedding scales) are computed by the model's own initialisation."""
    for module in model.modules():
        if module._buffers:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device=device)
            model._init_weights(module)


def _install(model: PreTrainedModel, params: Mapping[str, nn.Parameter]) -> None:
    shared = {id(param): name for name, param in model.named_parameters()}
    modules = dict(model.named_modules())
    for name, param in list(model.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        setattr(modules[owner], leaf, params[shared[id(param)]])


def _split_blocks(model: PreTrainedModel, rules: ShardingRules, group: Group) -> None:
    for block in rules.blocks:
        parent = model.get_submodule(block.path)
        for name in block.columns:
            column: Any = parent.get_submodule(name)
            column.out_features = column.weight.shape[0]
        for name in block.rows:
            linear: Any = parent.get_submodule(name)
            setattr(parent, name, RowLinear(linear.weight, linear.bias, group))
        _hook_input(parent, group)
    head: Any = model.get_submodule(rules.lm_head)
    head.out_features = head.weight.shape[0]
    _hook_input(head, group)


def _hook_input(module: nn.Module, group: Group) -> None:
    """Put f on the hidden states that enter `module`: once per block, however many column layers read them."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (to_tensor_parallel(args[0], group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": to_tensor_parallel(kwargs["hidden_states"], group)}

    module.register_forward_pre_hook(before, with_kwargs=True)


def _split_attention(model: PreTrainedModel, spec: ModelSpec, held: Held) -> None:
    """Local head counts; and, where KV groups are unequal, KV heads picked by index."""
    kinds = {kind.name: kind for kind in spec.kinds}
    heads = held["head"]
    kv = kinds.get("kv")
    kv_heads = held["kv"] if kv else heads
    kv_of_head = [kv_heads.index(head // kv.group if kv else head) for head in heads]
    per_kv = [kv_of_head.count(index) for index in range(len(kv_heads))]
    regular = len(set(per_kv)) == 1
    implementation = str(model.config._attn_implementation)
    if not regular:
        model.config._attn_implementation = INDEXED[implementation]
    local = copy.deepcopy(model.config)
    local.num_attention_heads, local.num_key_value_heads = len(heads), len(kv_heads)
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if not hasattr(module, "num_key_value_groups"):
            continue
        module.num_key_value_groups = per_kv[0] if regular else 1
        module.runflat_kv_index = torch.tensor(kv_of_head)
        for name, count in (("num_heads", len(heads)), ("num_key_value_heads", len(kv_heads))):
            if hasattr(module, name):
                setattr(module, name, count)
        if MODULE_RULES.get(type(module).__name__, ModuleRule()).reads_config_heads:
            module.config = local


def _split_vocabulary(
    model: PreTrainedModel, rules: ShardingRules, held: Held, group: Group, device: torch.device
) -> None:
    spec = rules.spec
    embedding = model.get_submodule(rules.embedding)
    assert isinstance(embedding, nn.Embedding)
    param = next(p for p in spec.params if p.name == f"{rules.embedding}.weight")
    vocabulary = VocabularyRows(param_ranges(spec, param, held), spec.kind("vocab").size, device)
    parallel_embedding(embedding, vocabulary, group)
    model.loss_function = VocabParallelLoss(vocabulary, group)
