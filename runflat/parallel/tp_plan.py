"""From an unmodified transformers model to a ModelSpec: which parameters are cut, into which units.

The model's own `tp_plan` says which linear layers are split by columns and by rows. What it does not say stands in the
declarative tables below, by module class, and is checked against the weights' shapes. No code asks for a model's name.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from runflat.errors import ModelError
from runflat.plan.units import Kind, ModelSpec, ParamSpec, Segment, block_size

COLUMN = ("colwise", "colwise_gather_output")
ROW = ("rowwise", "rowwise_split_input")
VOCABULARY = ("colwise_gather_output", "embedding_rowwise", "colwise")
PARTIAL = "replicated_with_grad_allreduce"
STYLES = {*COLUMN, *ROW, *VOCABULARY, PARTIAL}


@dataclass(frozen=True)
class ModuleRule:
    """What a plan does not say about one module class.

    `fused`: kinds of the consecutive segments of a fused linear child. `reads_config_heads`: its forward takes the
    number of query heads from the configuration instead of from the weight's shape.
    """

    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    reads_config_heads: bool = False


_GATE_AND_UP = ModuleRule(fused={"gate_up_proj": ("ffn", "ffn")})
MODULE_RULES = {
    "Phi3Attention": ModuleRule(fused={"qkv_proj": ("head", "kv", "kv")}, reads_config_heads=True),
    "Phi3MLP": _GATE_AND_UP,
    "GlmMLP": _GATE_AND_UP,
    "Glm4MLP": _GATE_AND_UP,
}
EMBEDDING_CLASSES = (
    "Embedding",
    *(f"{family}TextScaledWordEmbedding" for family in ("Gemma", "Gemma2", "Gemma3", "VaultGemma")),
)
"""Input embeddings whose forward is a lookup and an elementwise scale; no plan of the tested models names them."""

_UNBUILDABLE = (
    *(ValueError, KeyError, TypeError, AttributeError, AssertionError),
    *(ImportError, ArithmeticError, RuntimeError, StrictDataclassError),
)
"""What transformers raises where the fields of a configuration do not fit together."""
_BUILD_LOCK = threading.Lock()  # transformers sets torch's default dtype while it builds, which is process-wide


def build_meta_model(config: PreTrainedConfig, dtype: torch.dtype, attention: str | None = None) -> PreTrainedModel:
    """The causal LM of `config` with all parameters on the meta device: no memory is allocated.

    Raises:
        ModelError: transformers has no causal LM for the configuration, or refuses it.
    """
    try:
        with _BUILD_LOCK, torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention
            )
    except _UNBUILDABLE as error:
        raise ModelError(f"transformers cannot build a causal LM of type '{config.model_type}': {error}") from error
    return model


@dataclass(frozen=True)
class Block:
    """A module whose linear children are split: `kind` of its units, its column and row children by name."""

    path: str
    kind: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]


@dataclass(frozen=True)
class ShardingRules:
    """Everything that `shard.py` needs to cut and hook the model, and the spec that planning works on.

    `first_layer` is where tokens are dealt out to the devices of a replica; None: all of them have all tokens.
    """

    spec: ModelSpec
    blocks: tuple[Block, ...]
    embedding: str
    lm_head: str
    first_layer: str | None = None


def read_rules(
    model: PreTrainedModel, tp_full: int, ffn_block: int | None = None, sequence_parallel: bool = False
) -> ShardingRules:
    """How `model` (on any device, also meta) is cut for full degree `tp_full`.

    With `sequence_parallel` each device of a replica has a part of the tokens between the split layers, so that its
    gradient of a parameter there is an addend.

    Raises:
        ModelError: the model cannot be sharded; the message names the module and the reason.
    """
    reader = _Reader(model, tp_full, ffn_block, sequence_parallel)
    return reader.read()


def config_heads(config: Any) -> tuple[int, int, int]:
    """(query heads, KV heads, head size) of a transformers configuration.

    Raises:
        ModelError: they differ from layer to layer.
    """
    try:
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    except RuntimeError as error:
        raise ModelError(
            f"the attention heads of a model of type '{config.model_type}' differ from layer to layer: only models "
            "whose layers are alike can be sharded, such as llama, qwen2 or mistral."
        ) from error
    return heads, kv_heads, head_dim


class _Reader:
    """One pass over a model; collects parameters' specs and refuses what it does not understand."""

    def __init__(self, model: PreTrainedModel, tp_full: int, ffn_block: int | None, sequence_parallel: bool):
        self.model = model
        self.sequence_parallel = sequence_parallel
        self.tp_full = tp_full
        self.ffn_block = ffn_block
        self.config: Any = model.config
        self.heads, self.kv_heads, self.head_dim = config_heads(model.config)
        self.modules = dict(model.named_modules())
        self.styles = self._styles()
        self.sizes: dict[str, int] = {}
        self.segments: dict[str, tuple[int, tuple[Segment, ...]]] = {}
        self.partial: set[str] = set()

    def read(self) -> ShardingRules:
        self._refuse_what_cannot_be_sharded()
        blocks = tuple(self._block(path) for path in self._block_paths())
        if not blocks:
            raise ModelError(
                f"{self._name} has no tensor-parallel plan: transformers declares no split for its layers."
            )
        embedding, lm_head = self._vocabulary()
        self._partial_norms(blocks)
        first = self._first_layer(blocks) if self.sequence_parallel else None
        return ShardingRules(self._spec(blocks), blocks, embedding, lm_head, first)

    @property
    def _name(self) -> str:
        return type(self.model).__name__

    def _styles(self) -> dict[str, str]:
        """Style per module path, from the plan's patterns ('*' stands for a layer number)."""
        plan = dict(getattr(self.model, "tp_plan", None) or {})
        found: dict[str, str] = {}
        for pattern, style in plan.items():
            if style not in STYLES:
                raise ModelError(
                    f"{self._name}: the plan's style '{style}' for '{pattern}' is not supported "
                    f"(supported: {', '.join(sorted(STYLES))}); mixture-of-experts layers cannot be sharded yet."
                )
            regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
            found.update({path: style for path in self.modules if regex.fullmatch(path)})
        return found

    def _refuse_what_cannot_be_sharded(self) -> None:
        for name, value in vars(self.config).items():
            if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, int | float) and value > 0:
                raise ModelError(
                    f"{self._name}: {name} is {value}, but dropout is not supported "
                    "(devices would drop different elements): set it to 0."
                )
        for path, module in self.modules.items():
            if isinstance(module, nn.Dropout) and module.p > 0:
                raise ModelError(f"{self._name}: module {path} drops with p={module.p}: set dropout to 0.")
        for path, style in self.styles.items():
            if style in COLUMN + ROW and type(self.modules[path]) is not nn.Linear:
                kind = type(self.modules[path]).__name__
                raise ModelError(f"{self._name}: module {path} is split by the plan but is a {kind}, not a Linear.")

    def _block_paths(self) -> Iterator[str]:
        seen: set[str] = set()
        for path, style in self.styles.items():
            parent = path.rpartition(".")[0]
            if style in ROW and parent not in seen:
                seen.add(parent)
                yield parent

    def _block(self, path: str) -> Block:
        names = [name for name, _ in self.modules[path].named_children()]
        styled = {name: self.styles.get(f"{path}.{name}") for name in names}
        rows = tuple(name for name, style in styled.items() if style in ROW)
        columns = tuple(name for name, style in styled.items() if style in COLUMN)
        is_attention = hasattr(self.modules[path], "head_dim")
        kind = "head" if is_attention else "ffn"
        size = self.heads * self.head_dim if is_attention else self._linear(path, rows[0]).in_features
        self._set_size(kind, size, path)
        if is_attention and self.heads % self.kv_heads:
            raise ModelError(f"{self._name}: {self.heads} query heads do not divide by {self.kv_heads} KV heads.")
        if is_attention and self.kv_heads < self.heads:
            self._set_size("kv", self.kv_heads * self.head_dim, path)
        for name in rows:
            linear = self._linear(path, name)
            if linear.in_features != size:
                raise ModelError(f"{self._name}: {path}.{name} takes {linear.in_features} columns, not {size}.")
            self.segments[f"{path}.{name}.weight"] = (1, (Segment(kind, 0),))
        for name in columns:
            segments = self._column_segments(path, name, kind)
            self.segments[f"{path}.{name}.weight"] = (0, segments)
            if self._linear(path, name).bias is not None:
                self.segments[f"{path}.{name}.bias"] = (0, segments)
        return Block(path, kind, columns, rows)

    def _linear(self, path: str, name: str) -> nn.Linear:
        module = self.modules[f"{path}.{name}"]
        assert isinstance(module, nn.Linear)
        return module

    def _set_size(self, kind: str, size: int, path: str) -> None:
        if self.sizes.setdefault(kind, size) != size:
            raise ModelError(
                f"{self._name}: module {path} has {size} '{kind}' elements where earlier layers have "
                f"{self.sizes[kind]}; layers of different width cannot share an assignment."
            )

    def _column_segments(self, path: str, name: str, kind: str) -> tuple[Segment, ...]:
        rule = MODULE_RULES.get(type(self.modules[path]).__name__, ModuleRule())
        out = self._linear(path, name).out_features
        if name in rule.fused:
            kinds = rule.fused[name]
        elif self.styles[f"{path}.{name}"] == "colwise_gather_output":
            raise ModelError(
                f"{self._name}: the plan gathers the output of {path}.{name} and no rule says how it is laid out "
                "(a fused weight, or a norm over the whole query width): this module cannot be sharded yet."
            )
        else:
            kinds = ("kv",) if kind == "head" and out == self.sizes.get("kv") else (kind,)
        kinds = tuple("head" if k == "kv" and "kv" not in self.sizes else k for k in kinds)
        offsets = [sum(self.sizes[k] for k in kinds[:index]) for index in range(len(kinds) + 1)]
        if offsets[-1] != out:
            raise ModelError(f"{self._name}: {path}.{name} has {out} rows where its layout says {offsets[-1]}.")
        return tuple(Segment(k, offset) for k, offset in zip(kinds, offsets, strict=False))

    def _vocabulary(self) -> tuple[str, str]:
        embedding: Any = self.model.get_input_embeddings()
        head: Any = self.model.get_output_embeddings()
        paths = {id(module): path for path, module in self.modules.items()}
        if type(embedding).__name__ not in EMBEDDING_CLASSES:
            raise ModelError(f"{self._name}: input embedding {type(embedding).__name__} has no rule.")
        if type(head) is not nn.Linear:
            raise ModelError(f"{self._name}: LM head {type(head).__name__} has no rule: it must be a Linear.")
        embedding_path, head_path = paths[id(embedding)], paths[id(head)]
        self._set_size("vocab", int(embedding.weight.shape[0]), embedding_path)
        self._set_size("vocab", head.out_features, head_path)
        for path in (embedding_path, head_path):
            self.segments[f"{path}.weight"] = (0, (Segment("vocab", 0),))
        if head.bias is not None:
            self.segments[f"{head_path}.bias"] = (0, (Segment("vocab", 0),))
        return embedding_path, head_path

    def _partial_norms(self, blocks: tuple[Block, ...]) -> None:
        """Parameters inside a split block must be covered: split, a row bias, or a per-head norm of the plan."""
        for block in blocks:
            for name, param in self.modules[block.path].named_parameters():
                full = f"{block.path}.{name}"
                owner, _, leaf = name.rpartition(".")
                if full in self.segments or (owner in block.rows and leaf == "bias"):
                    continue
                per_head = block.kind == "head" and tuple(param.shape) == (self.head_dim,)
                if self.styles.get(f"{block.path}.{owner}") != PARTIAL or not per_head:
                    raise ModelError(
                        f"{self._name}: parameter {full} of shape {tuple(param.shape)} works on split activations and "
                        f"no rule covers it (a norm must be per head, of size {self.head_dim}): it cannot be sharded."
                    )
                self.partial.add(full)

    def _first_layer(self, blocks: tuple[Block, ...]) -> str:
        found = re.match(r"(.*?\.\d+)\.", blocks[0].path)
        if found is None:
            raise ModelError(
                f"{self._name}: module {blocks[0].path} is in no list of layers, so there is no place where tokens "
                "could be dealt out: train without sequence parallelism."
            )
        return found.group(1)

    def _spec(self, blocks: tuple[Block, ...]) -> ModelSpec:
        multiplied = {f"{block.path}.{name}.weight" for block in blocks for name in (*block.columns, *block.rows)}
        shared = {id(p): name for name, p in self.model.named_parameters()}
        head: Any = self.model.get_output_embeddings()
        multiplied.add(shared[id(head.weight)])
        params = []
        for order, (name, param) in enumerate(self.model.named_parameters()):
            dim, segments = self.segments.get(name, (None, ()))
            if dim is None and param.ndim > 1:
                raise ModelError(
                    f"{self._name}: {name} of shape {tuple(param.shape)} is in no plan: a matrix cannot be replicated."
                )
            partial = self.sequence_parallel or name in self.partial
            rule = "sharded" if dim is not None else "partial" if partial else "equal"
            params.append(
                ParamSpec(
                    name=name,
                    shape=tuple(param.shape),
                    rule=rule,  # type: ignore[arg-type]  # one of the literals by construction
                    decay=param.ndim > 1,
                    order=order,
                    matmuls=int(name in multiplied),
                    dim=dim,
                    segments=segments,
                )
            )
        return ModelSpec(
            name=self._name,
            kinds=self._kinds(),
            params=tuple(params),
            hidden_size=int(self.config.hidden_size),
            num_layers=sum(block.kind == "head" for block in blocks),
            head_dim=self.head_dim,
        )

    def _kinds(self) -> tuple[Kind, ...]:
        kinds = []
        if "head" in self.sizes:
            kinds.append(Kind("head", self.sizes["head"], self.head_dim))
        if "kv" in self.sizes:
            kinds.append(Kind("kv", self.sizes["kv"], self.head_dim, "head", self.heads // self.kv_heads))
        if "ffn" in self.sizes:
            size = self.sizes["ffn"]
            kinds.append(Kind("ffn", size, self.ffn_block or block_size(size, self.tp_full)))
        kinds.append(Kind("vocab", self.sizes["vocab"], block_size(self.sizes["vocab"], self.tp_full)))
        return tuple(kinds)
