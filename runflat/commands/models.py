"""From what a user calls a model (a directory, an architecture, a named shape) to a transformers configuration."""

from __future__ import annotations

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

    Raises:
        ModelError: the directory has no usable config.json, or the name is unknown.
    """
    folder = Path(name)
    if folder.is_dir():
        return _build(_read_folder(folder), overrides or {}, str(folder))
    if name in preset_names():
        return _build(read_preset(name), overrides or {}, name)
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
        fields: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} is not a model directory: config.json cannot be read ({error}).") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ModelError(f"{path} has no model_type: it is not the configuration of a transformers model.")
    return fields


def _build(fields: Mapping[str, Any], overrides: Mapping[str, Any], name: str) -> PreTrainedConfig:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = str(fields["model_type"])
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"'{name}' is neither a model directory, nor a shape that runflat ships ({', '.join(preset_names())}), "
            f"nor a causal LM of transformers such as llama, qwen2 or mistral."
        )
    merged = {
        key: value for key, value in {**fields, **overrides}.items() if key not in ("model_type", "architectures")
    }
    try:
        config: PreTrainedConfig = AutoConfig.for_model(model_type, **merged)
    except (TypeError, ValueError) as error:
        raise ModelError(f"the configuration of '{name}' is not valid for {model_type}: {error}") from error
    return config
