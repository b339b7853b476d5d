"""Model shapes that ship with runflat: small ones to train, and published ones to plan with.

Each is a JSON file of this folder with the keys of a Hugging Face config.json that decide the shape; what a file does
not say is the default of its `model_type` in transformers.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def preset_names() -> tuple[str, ...]:
    """Names that `read_preset` knows, sorted."""
    files = (entry.name for entry in resources.files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in files if name.endswith(".json")))


def read_preset(name: str) -> dict[str, Any]:
    """Configuration of a shape, `model_type` among its keys.

    Raises:
        KeyError: no such name; `preset_names` lists them.
    """
    if name not in preset_names():
        raise KeyError(name)
    shape: dict[str, Any] = json.loads(resources.files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8"))
    return shape
