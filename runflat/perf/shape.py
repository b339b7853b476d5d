"""The sizes of a decoder-only transformer that decide how long a step takes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from runflat.errors import ModelError

_FOLDER = resources.files("runflat.perf") / "models"


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model. `gated`: the MLP has gate and up (SwiGLU); `tied`: the head reuses the embedding."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    gated: bool = False
    tied: bool = True

    def __post_init__(self) -> None:
        for field in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size"):
            if getattr(self, field) < 1:
                raise ModelError(f"model '{self.name}' has {field} = {getattr(self, field)}: give a positive number.")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"model '{self.name}' has {self.num_heads} query heads and {self.num_kv_heads} KV heads: "
                "the first must be a multiple of the second."
            )

    @property
    def attention_numel(self) -> int:
        """Parameters of one layer's attention projections."""
        return self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def mlp_numel(self) -> int:
        """Parameters of one layer's MLP."""
        return self.hidden_size * self.ffn_size * (3 if self.gated else 2)

    @property
    def vocab_numel(self) -> int:
        """Parameters of one vocabulary matrix."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """Parameters of the whole model; norms and biases, below 0.1 %, are left out."""
        return self.num_layers * (self.attention_numel + self.mlp_numel) + self.vocab_numel * (1 if self.tied else 2)

    def model_flops(self, num_tokens: int, seq_len: int) -> float:
        """FLOPs of forward and backward for `num_tokens`, attention counted dense, as utilisation is usually quoted."""
        products = self.num_layers * (self.attention_numel + self.mlp_numel) + self.vocab_numel
        attention = 2 * seq_len * self.head_dim * self.num_heads * self.num_layers
        return 6.0 * num_tokens * (products + attention)


def model_names() -> tuple[str, ...]:
    """Names of the models that come with the package, sorted."""
    return tuple(
        sorted(entry.name.removesuffix(".json") for entry in _FOLDER.iterdir() if entry.name.endswith(".json"))
    )


def load_model(name: str) -> ModelShape:
    """The model called `name`, or that of a transformers config.json (a path ending in .json, or a folder with one).

    Raises:
        ModelError: no such model or file, or a file without the sizes.
    """
    if name in model_names():
        return _from_config(json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8")), name)
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix != ".json" or not path.is_file():
        raise ModelError(
            f"model '{name}' is not known: use one of {', '.join(model_names())}, or the path of a transformers "
            "config.json."
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ModelError(f"'{path}' is not JSON (line {error.lineno}: {error.msg}): correct it.") from error
    return _from_config(data, name)


_GATED = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "granite"})


def _from_config(data: dict[str, Any], name: str) -> ModelShape:
    """The shape in a transformers configuration; GPT-2's own key names are understood too."""

    def size(*keys: str, default: int | None = None) -> int:
        for key in keys:
            if data.get(key) is not None:
                return int(data[key])
        if default is None:
            raise ModelError(f"the configuration of model '{name}' has no {keys[0]}: give a decoder's config.json.")
        return default

    hidden, heads = size("hidden_size", "n_embd"), size("num_attention_heads", "n_head")
    return ModelShape(
        name=name,
        num_layers=size("num_hidden_layers", "n_layer"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=hidden // heads),
        ffn_size=size("intermediate_size", "n_inner", default=4 * hidden),
        vocab_size=size("vocab_size"),
        gated=bool(data.get("gated_mlp", data.get("model_type") in _GATED)),
        tied=bool(data.get("tie_word_embeddings", False)),
    )
