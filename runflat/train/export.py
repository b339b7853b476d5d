"""Model directories, as transformers and what builds on it read them, out of runs.

A run keeps the configuration and the tokenizer of its model in RUN/model from its start, so that an export needs the
run's folder and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from runflat.errors import CheckpointError
from runflat.plan.units import ParamSpec
from runflat.train.checkpoint import Checkpoint
from runflat.train.job import hf_config
from runflat.train.shards import checkpoint_tensors

MAX_FILE_BYTES = 5 * 10**9
"""Weights go into files of at most this size, or of one tensor."""
ELEMENT_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def keep_model(run: Path, fields: dict[str, object], architecture: str, tokenizer: Path | None) -> None:
    """Write RUN/model: the configuration with the given fields, and the tokenizer's files where there is one.

    Args:
        run: folder of the run.
        fields: the transformers configuration, `model_type` among its fields.
        architecture: name of the model's class.
        tokenizer: a tokenizer.json or the directory that has one.
    """
    folder = run / "model"
    folder.mkdir(exist_ok=True)
    config = hf_config(fields)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    if tokenizer is None:
        return
    source = tokenizer if tokenizer.is_dir() else tokenizer.parent
    for name in TOKENIZER_FILES:
        path = tokenizer if name == "tokenizer.json" and tokenizer.is_file() else source / name
        if path.is_file() and not (folder / name).exists():
            shutil.copyfile(path, folder / name)


def export(
    checkpoint: Checkpoint, run: Path, target: Path, dtype: str, wrote: Callable[[str, int], object]
) -> tuple[Path, ...]:
    """Write `checkpoint`'s weights, with the configuration and the tokenizer of `run`, as a model directory.

    One tensor is in memory at a time, apart from the file that is being filled. The directory appears under its name
    when it is complete.

    Args:
        checkpoint: what to export.
        run: the run that it is of.
        target: the directory; there must be none.
        dtype: type of the weights, a key of `ELEMENT_BYTES`.
        wrote: told the name and the bytes of each file of weights when it is there.

    Raises:
        CheckpointError: the run keeps no configuration, `target` is there already or cannot be written, or the
            checkpoint cannot be read.
    """
    kept = run / "model"
    if not (kept / "config.json").is_file():
        raise CheckpointError(f"{kept / 'config.json'} is missing: {run} is not a whole run of this version.")
    if target.exists():
        raise CheckpointError(f"{target} is there already: give the name of a new directory with --to.")
    draft = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        draft.mkdir(parents=True)
        for path in kept.iterdir():
            shutil.copyfile(path, draft / path.name)
        _set_dtype(draft / "config.json", dtype)
        files = _write_weights(checkpoint, draft, dtype, wrote)
        draft.rename(target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}. Give another place with --to.") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return tuple(target / name for name in files)


def _set_dtype(path: Path, dtype: str) -> None:
    fields = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(fields | {"dtype": dtype}, indent=2) + "\n", encoding="utf-8")


def _write_weights(
    checkpoint: Checkpoint, folder: Path, dtype: str, wrote: Callable[[str, int], object]
) -> tuple[str, ...]:
    source, kind = checkpoint_tensors(checkpoint, "weight"), getattr(torch, dtype)
    groups = split(checkpoint.spec.params, ELEMENT_BYTES[dtype], MAX_FILE_BYTES)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, group in enumerate(groups, 1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = {param.name: source(param, whole(param)).to(kind).contiguous() for param in group}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        total_bytes += num_bytes
        wrote(name, num_bytes)
    if len(groups) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return tuple(dict.fromkeys(weight_map.values()))


def split(params: Sequence[ParamSpec], element_bytes: int, max_bytes: int) -> list[list[ParamSpec]]:
    """The parameters in their order, in groups of at most `max_bytes` or of one parameter."""
    groups: list[list[ParamSpec]] = []
    room = -1
    for param in params:
        num_bytes = element_bytes
        for size in param.shape:
            num_bytes *= size
        if num_bytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(param)
        room -= num_bytes
    return groups


def whole(param: ParamSpec) -> tuple[tuple[int, int], ...]:
    """The ranges that are all of a parameter."""
    return () if param.dim is None else ((0, param.shape[param.dim]),)
