"""Small models and batches that bite: odd sizes, windows shorter than the sequence, soft-caps, padding ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from runflat.check.reference import Batch
from runflat.errors import ModelError

SMALL_HEAD_DIM = 8
SMALL_FFN = 1000
SMALL_VOCAB = 503
SMALL_WINDOW = 5
SMALL_SEQ_LEN = 16
PADDING_ID = 3

PROOF_SET: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama-gqa": ("llama", {"num_key_value_heads": 8}),
    "llama-gqa4": ("llama", {"num_key_value_heads": 4}),
    "llama-mha": ("llama", {}),
    "qwen2": ("qwen2", {"num_key_value_heads": 8}),
    "qwen3": ("qwen3", {"num_key_value_heads": 4}),
    "mistral": ("mistral", {}),
    "gemma2": ("gemma2", {}),
    "phi3": ("phi3", {"num_key_value_heads": 8, "sliding_window": SMALL_WINDOW}),
}
"""Models that are proven: transformers' type, and what to change in `small_config` for TP 8 (16 query heads)."""


def proof_config(name: str, **overrides: Any) -> PreTrainedConfig:
    """The small configuration of a model of the proof set."""
    model_type, changes = PROOF_SET[name]
    return small_config(architecture(model_type), 8, **{**changes, **overrides})


def architecture(name: str) -> PreTrainedConfig:
    """The default configuration of a transformers model type such as "llama".

    Raises:
        ModelError: transformers does not know the type.
    """
    try:
        config: PreTrainedConfig = AutoConfig.for_model(name)
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"'{name}' is neither a model directory nor a model type of transformers: try llama, qwen2, mistral."
        ) from error
    return config


def small_config(config: PreTrainedConfig, tp: int, **overrides: Any) -> PreTrainedConfig:
    """`config` shrunk to two layers that run in milliseconds, with the same kind of attention.

    The ratio of query to KV heads is kept and there are at least 2 x `tp` query heads; FFN width and vocabulary divide
    by nothing; a sliding window and soft-caps, where the architecture has them, are set so low that they act.

    Raises:
        ModelError: the configuration has no attention heads at its top level, or refuses the small sizes.
    """
    fields: dict[str, Any] = config.to_dict()
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise ModelError(
            f"a model of type '{config.model_type}' has no single number of attention heads, so it cannot be built "
            "small: name a text-only causal LM such as llama, qwen2 or mistral."
        )
    group = heads // int(getattr(config, "num_key_value_heads", None) or heads)
    small_heads = -(-2 * tp // group) * group
    small: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": small_heads,
        "num_key_value_heads": small_heads // group,
        "hidden_size": small_heads * SMALL_HEAD_DIM,
        "intermediate_size": SMALL_FFN,
        "vocab_size": SMALL_VOCAB,
        "max_position_embeddings": 64,
        "pad_token_id": PADDING_ID,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "layer_types": None,
        "tie_word_embeddings": bool(fields.get("tie_word_embeddings", False)),
    }
    if fields.get("head_dim") is not None:
        small["head_dim"] = SMALL_HEAD_DIM
    small.update(_biting(fields))
    small.update(overrides)
    if "hidden_size" not in overrides:
        small["hidden_size"] = small["num_attention_heads"] * SMALL_HEAD_DIM
    dropped = ("dtype", "torch_dtype", "transformers_version", "architectures")
    kept = {k: v for k, v in fields.items() if k not in dropped}
    chosen = {k: v for k, v in small.items() if k in kept or k in overrides or v is not None}
    try:
        return type(config)(**{**kept, **chosen})
    except (StrictDataclassError, ValueError, TypeError, KeyError, NotImplementedError) as error:
        raise ModelError(
            f"a model of type '{config.model_type}' cannot be built small: {error} Use --full to take it as it is."
        ) from error


def _biting(fields: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if fields.get("sliding_window") or "use_sliding_window" in fields:
        values["sliding_window"] = SMALL_WINDOW
    if "use_sliding_window" in fields:
        values.update(use_sliding_window=True, max_window_layers=1)
    if fields.get("attn_logit_softcapping"):
        values["attn_logit_softcapping"] = 0.5
    if fields.get("final_logit_softcapping"):
        values["final_logit_softcapping"] = 1.0
    if fields.get("query_pre_attn_scalar"):
        values["query_pre_attn_scalar"] = SMALL_HEAD_DIM
    return values


def small_batch(vocab_size: int, padding_id: int | None, num_sequences: int, seq_len: int, seed: int) -> Batch:
    """Random tokens with padding ids among them, and a different number of targets in each sequence."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (num_sequences, seq_len), generator=generator)
    if padding_id is not None:
        tokens[torch.rand(tokens.shape, generator=generator) < 0.1] = padding_id
    labels = tokens.clone()
    share = torch.linspace(0.0, 0.6, num_sequences).unsqueeze(1)
    labels[torch.rand(labels.shape, generator=generator) < share] = -100
    return Batch(tokens, labels)
