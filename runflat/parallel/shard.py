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
    TensorParallel,
    VocabularyRows,
    enter_split,
    parallel_embedding,
    register_indexed_attention,
)
from runflat.parallel.loss import VocabParallelLoss
from runflat.parallel.tokens import own_tokens
from runflat.parallel.tp_plan import MODULE_RULES, ModuleRule, ShardingRules
from runflat.plan.units import ParamSpec, Range, param_ranges

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
    """The `ranges` of a lazily opened safetensors slice along the partitioned dim, in memory of their own."""
    if param.dim is None:
        whole: torch.Tensor = lazy[:]
        return whole.clone()  # the slice is a view of the mapped file
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


class ShardedModel:
    """One device's part of a model: an unmodified transformers model whose parameters are shards.

    `params` are its parameters by full-model name, `held` the units they consist of. Where it computes in another type
    than they have (bf16 beside float32), the layers hold copies, which `refresh` brings up to date. The embedding looks
    up in `params` themselves: summed up in bf16 over the uses of a token, its gradient would be off by per cents.
    `sources` are, by name, what the layers hold.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rules: ShardingRules,
        held: Held,
        group: Group,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        compute_dtype: torch.dtype | None = None,
    ):
        """Turn the meta-device `model` into this device's part of it, in place.

        Buffers are built, parameters are filled from `source`, row-split layers are replaced, and hooks put the
        collectives where the plan wants them. `group` is the replica's TP group, `dtype` the type of `params`; the
        model was built in `compute_dtype` (none: the same).
        """
        register_indexed_attention()
        self.model = model
        self.rules = rules
        self.tp = TensorParallel(group, rules.first_layer is not None)
        self._dtype = compute_dtype or dtype
        self._config = model.config
        self._attention = str(model.config._attn_implementation)
        self._vocabulary = VocabularyRows(rules.spec.kind("vocab").size, device)
        _build_buffers(model, device)
        params = {
            param.name: nn.Parameter(
                source(param, param_ranges(rules.spec, param, held)).to(device=device, dtype=dtype).contiguous()
            )
            for param in rules.spec.params
        }
        self._names = _parameter_names(model)
        self._split_rows()
        self._hook()
        self.hold(held, params)

    def hold(self, held: Held, params: Mapping[str, nn.Parameter]) -> None:
        """From now on this device holds the units `held`, whose values are `params` (by full-model name)."""
        self.held = dict(held)
        self.params = dict(params)
        modules = dict(self.model.named_modules())
        copies: dict[str, nn.Parameter] = {}
        for name, shared in self._names.items():
            owner, _, leaf = name.rpartition(".")
            param = self.params[shared]
            if param.dtype != self._dtype and owner != self.rules.embedding:
                param = copies.setdefault(shared, nn.Parameter(param.detach().to(self._dtype)))
            setattr(modules[owner], leaf, param)
        self._copies: list[torch.Tensor] = list(copies.values())
        self._originals: list[torch.Tensor] = [self.params[name] for name in copies]
        embedding = f"{self.rules.embedding}.weight"
        self.sources: dict[str, tuple[nn.Parameter, ...]] = {
            name: (copies.get(name, param),) for name, param in self.params.items()
        }
        if embedding in copies:  # tied: the LM head holds a copy of what the embedding looks up in
            self.sources[embedding] = (copies[embedding], self.params[embedding])
        for block in self.rules.blocks:
            for child in (*block.columns, *block.rows):
                _set_features(modules[f"{block.path}.{child}"])
        _set_features(modules[self.rules.lm_head])
        self._split_attention()
        spec = next(param for param in self.rules.spec.params if param.name == embedding)
        self._vocabulary.hold(param_ranges(self.rules.spec, spec, held))

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy `params`, which have been updated, to what the layers compute with; nothing to do where that is them."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._originals)

    def _split_rows(self) -> None:
        for block in self.rules.blocks:
            parent = self.model.get_submodule(block.path)
            for name in block.rows:
                linear: Any = parent.get_submodule(name)
                setattr(parent, name, RowLinear(linear.weight, linear.bias, self.tp))

    def _hook(self) -> None:
        for block in self.rules.blocks:
            _hook_input(self.model.get_submodule(block.path), self.tp, enter_split)
        _hook_input(self.model.get_submodule(self.rules.lm_head), self.tp, enter_split)
        if self.rules.first_layer is not None:
            _hook_input(self.model.get_submodule(self.rules.first_layer), self.tp, _deal_out)
        embedding = self.model.get_submodule(self.rules.embedding)
        assert isinstance(embedding, nn.Embedding)
        parallel_embedding(embedding, self._vocabulary, self.tp, self._dtype)
        self.model.loss_function = VocabParallelLoss(self._vocabulary, self.tp)

    def _split_attention(self) -> None:
        """Local head counts; and, where KV groups are unequal, KV heads picked by index."""
        kinds = {kind.name: kind for kind in self.rules.spec.kinds}
        heads, kv = self.held["head"], kinds.get("kv")
        kv_heads = self.held["kv"] if kv else heads
        kv_of_head = [kv_heads.index(head // kv.group if kv else head) for head in heads]
        per_kv = [kv_of_head.count(index) for index in range(len(kv_heads))]
        regular = len(set(per_kv)) == 1
        self._config._attn_implementation = self._attention if regular else INDEXED[self._attention]
        local = copy.deepcopy(self._config)
        local.num_attention_heads, local.num_key_value_heads = len(heads), len(kv_heads)
        modules: Iterable[Any] = self.model.modules()
        for module in modules:
            if not hasattr(module, "num_key_value_groups"):
                continue
            module.num_key_value_groups = per_kv[0] if regular else 1
            module.runflat_kv_index = torch.tensor(kv_of_head, device=self._vocabulary.row_of_token.device)
            for name, count in (("num_heads", len(heads)), ("num_key_value_heads", len(kv_heads))):
                if hasattr(module, name):
                    setattr(module, name, count)
            if MODULE_RULES.get(type(module).__name__, ModuleRule()).reads_config_heads:
                module.config = local


def _parameter_names(model: PreTrainedModel) -> dict[str, str]:
    """Every name of every parameter, with the one under which a tied one is known."""
    shared = {id(param): name for name, param in model.named_parameters()}
    return {name: shared[id(param)] for name, param in model.named_parameters(remove_duplicate=False)}


def _set_features(linear: Any) -> None:
    linear.out_features, linear.in_features = linear.weight.shape


def _build_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Non-persistent buffers (rotary frequencies, embedding scales) are computed by the model's own initialisation."""
    for module in model.modules():
        if module._buffers:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device=device)
            model._init_weights(module)


def _deal_out(hidden: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    return own_tokens(hidden, tp.group) if tp.splits_tokens else hidden


def _hook_input(
    module: nn.Module, tp: TensorParallel, change: Callable[[torch.Tensor, TensorParallel], torch.Tensor]
) -> None:
    """Put `change` on the hidden states that enter `module`: once per block, however many column layers read them."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (change(args[0], tp), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"], tp)}

    module.register_forward_pre_hook(before, with_kwargs=True)
