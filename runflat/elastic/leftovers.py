"""Publish what the workers of a run whose controller died have left: complete folders that nobody could publish."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runflat.plan.plan import Plan
from runflat.plan.units import ModelSpec
from runflat.train.checkpoint import PARTIAL, Progress, publish, shard_from_json


def publish_leftovers(run: Path, spec: ModelSpec, say: Callable[[str], Any]) -> None:
    """Publish the newest complete folder of shards of `run`, if it is newer than its newest checkpoint.

    A folder is complete when every device of its plan has written its shard and the entry that goes into the index.
    Checksums are compared when the checkpoint is opened.
    """
    folder = run / "checkpoints"
    if not folder.is_dir():
        return
    published = [int(path.name.partition("-")[2]) for path in folder.glob("step-*") if path.name[5:].isdigit()]
    candidates = sorted(
        (int(match[1]), path) for path in folder.iterdir() if (match := PARTIAL.fullmatch(path.name)) is not None
    )
    for step, path in reversed(candidates):
        if step <= max(published, default=0):
            return
        entries = [json.loads(entry.read_text()) for entry in path.glob("*.safetensors.json")]
        if not entries or len(entries) != entries[0]["num_devices"]:
            continue
        generation = int(path.name.partition("generation-")[2].partition(".")[0])
        progress = Progress(**entries[0]["progress"])
        shards = [shard_from_json(entry["shard"]) for entry in entries]
        publish(run, spec, Plan(generation, 0, ()), progress, sorted(shards, key=lambda shard: shard.name))
        say(f"the controller of {run} died before it published step {step}; that checkpoint is complete and is used")
        return
