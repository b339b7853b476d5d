"""From what a user calls a model (a directory, an architecture, a named shape) to a transformers configuration."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runflat.errors import ModelError
from runflat.presets import preset_names, read_preset

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from runflat.config import ModelSection

DEFAULT = "tiny"


def model_config(name: str, overrides: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """The configuration of a model directory, a named shape or a transformers model type, with `overrides` on top.

    A folder that holds a config.json comes first, then a shape that ships with runflat, then a model type. Sizes that
    followed from an overridden one (head size, KV heads of a model without groups, the pattern of layers) follow it.

    Args:
        name: what the user wrote.
        overrides: sizes under the names of a Hugging Face config.json, as `ModelSection.overrides` gives them.

    Raises:
        ModelError: the directory is missing or has no usable config.json, the name is unknown, transformers has no
            causal LM of the type, or refuses a size.
    """
    folder = Path(name)
    if (folder / "config.json").is_file():
        return _build(_read_folder(folder), overrides or {}, name)
    if name in preset_names():
        return _build(read_preset(name), overrides or {}, name)
    if folder.is_dir() and not name.isidentifier():
        raise ModelError(f"the folder {name} has no config.json: name the folder of a Hugging Face model.")
    if folder.is_absolute() or len(folder.parts) > 1 or name.startswith("."):
        raise ModelError(f"the model directory {name} does not exist: name a folder that holds a config.json.")
    return _build({"model_type": name}, overrides or {}, name)


def section_config(section: ModelSection) -> PreTrainedConfig:
    """The configuration that the `model` section of a training configuration asks for.

    Raises:
        ModelError: see `model_config`.
    """
    source = section.preset or section.dir or section.arch or section.from_dir or DEFAULT
    if isinstance(source, Path) and not source.is_dir():
        raise ModelError(f"the model directory {source} does not exist: name a folder that holds a config.json.")
    return model_config(str(source), section.overrides)


def _read_folder(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read as JSON ({error}): it must be a Hugging Face configuration."
        ) from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise ModelError(f"{path} has no model_type: it is not the configuration of a transformers model.")
    return fields


def _build(fields: Mapping[str, Any], overrides: Mapping[str, Any], name: str) -> PreTrainedConfig:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = str(fields["model_type"])
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(model_type, [*preset_names(), *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES], n=1)
        named = f"'{name}'" if name == model_type else f"'{model_type}', the model_type of {name},"
        raise ModelError(
            f"{named} is neither a model directory, nor a shape that runflat ships ({', '.join(preset_names())}), nor "
            f"a model type of transformers{f'; the nearest name is {near[0]}' if near else ''}."
        )
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"{name} has the model type {model_type}, for which transformers has no causal LM: take a type that "
            f"generates text, such as llama, qwen2 or mistral."
        )
    kept = {key: value for key, value in fields.items() if key not in ("model_type", "architectures")}
    config = _config(model_type, kept, name)
    if not _has_heads(config):
        raise ModelError(
            f"{name} has the model type {model_type}, whose configuration has no attention heads of its own: only "
            f"models of one decoder with the same attention in its layers can be sharded, such as llama or qwen2."
        )
    if overrides:
        config = _config(model_type, {**kept, **_followers(config, kept, overrides), **overrides}, name)
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if kv_heads and heads % kv_heads:
        raise ModelError(
            f"{name} has {heads} query heads, not a multiple of its {kv_heads} KV heads: change one of them so that "
            f"each KV head serves the same number of query heads."
        )
    return config


def _has_heads(config: PreTrainedConfig) -> bool:
    """Whether the configuration says of the model as a whole how many heads it has, and how wide it is."""
    try:
        return hasattr(config, "num_attention_heads") and hasattr(config, "hidden_size")
    except RuntimeError:  # they differ from layer to layer
        return False


def _config(model_type: str, fields: Mapping[str, Any], name: str) -> PreTrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.for_model(model_type, **fields)
    except (TypeError, ValueError, AttributeError, ZeroDivisionError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"the configuration of {name} is not valid for {model_type}: {reason}") from error
    return config


def _followers(config: Any, fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Values that followed from sizes which `overrides` changes, and so must change with them."""
    followers: dict[str, Any] = {}
    heads, head_dim = config.num_attention_heads, fields.get("head_dim")
    if head_dim and head_dim * heads == config.hidden_size and {"hidden_size", "num_attention_heads"} & set(overrides):
        followers["head_dim"] = None
    if getattr(config, "num_key_value_heads", None) == heads and "num_attention_heads" in overrides:
        followers["num_key_value_heads"] = overrides["num_attention_heads"]
    num_layers, layer_types = overrides.get("num_hidden_layers"), fields.get("layer_types")
    if num_layers and layer_types:
        followers["layer_types"] = layer_types[:num_layers] if num_layers <= len(layer_types) else None
    padding = getattr(config, "pad_token_id", None)
    if padding is not None and padding >= overrides.get("vocab_size", padding + 1):
        followers["pad_token_id"] = None
    return followers
