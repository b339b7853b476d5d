"""Checkpoints whose controller died before it could publish them: the next life of the run does it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runflat.errors import CheckpointError
from runflat.plan.plan import Plan
from runflat.plan.units import ModelSpec
from runflat.train.checkpoint import Progress, ShardFile, newest_checkpoint, shard_from_json
from runflat.train.publishing import PARTIAL, publish


@dataclass(frozen=True)
class Leftover:
    """A folder in which every device of (step, generation) has left its shard and the entry that describes it."""

    step: int
    generation: int
    progress: Progress
    shards: tuple[ShardFile, ...]


def publish_leftovers(run: Path, spec: ModelSpec, warn: Callable[[str], object]) -> Path | None:
    """Publish the newest complete folder that a dead controller left, if it is newer than what is published.

    Workers that lose their controller finish the step, write their shards and leave. A folder in which one is missing
    stays unpublished; so does one of an older life of the run that was resumed from elsewhere since.

    Returns:
        The folder of the new checkpoint, None when there was nothing to publish.
    """
    try:
        published = newest_checkpoint(run, lambda text: None)
        newest = (published.generation, published.progress.step)
    except CheckpointError:
        newest = (-1, -1)
    found = [left for left in _complete(run) if left.generation >= newest[0] and left.step > newest[1]]
    if not found:
        return None
    left = max(found, key=lambda leftover: (leftover.generation, leftover.step))
    folder = publish(run, spec, Plan(left.generation, 0, ()), left.progress, left.shards)
    warn(f"the last controller of {run} died before it could publish the checkpoint of step {left.step}: published now")
    return folder


def _complete(run: Path) -> Iterator[Leftover]:
    for folder in sorted((run / "checkpoints").glob(".step-*")):
        match = PARTIAL.fullmatch(folder.name)
        if match is None:
            continue
        entries = [entry for path in sorted(folder.glob("*.safetensors.json")) if (entry := _entry(path))]
        if not entries or len(entries) != entries[0]["num_devices"]:
            continue
        progress = Progress(**entries[0]["progress"])
        if any(Progress(**entry["progress"]) != progress for entry in entries):
            continue
        shards = tuple(shard_from_json(entry["shard"]) for entry in entries)
        if all(_is_whole(folder / shard.name, shard.num_bytes) for shard in shards):
            yield Leftover(progress.step, int(match[2]), progress, shards)


def _entry(path: Path) -> dict[str, Any] | None:
    """What a worker wrote beside its shard; None when it was killed while it wrote."""
    try:
        entry: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return entry if {"num_devices", "progress", "shard"} <= entry.keys() else None


def _is_whole(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes
