"""Making checkpoints visible: assembled in a hidden folder, synced, renamed; called by one process only.

Everything that can be seen under its name is complete, whenever this process is killed or the machine loses power.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runflat.errors import CheckpointError
from runflat.plan.plan import Plan
from runflat.plan.units import ModelSpec
from runflat.train.checkpoint import (
    FORMAT,
    REPLACED,
    Progress,
    ShardFile,
    folder_order,
    published_folders,
    seal,
    shard_to_json,
)

PARTIAL = re.compile(r"\.step-(\d+)-generation-(\d+)\.partial")
REMOVED = ".removed"
"""End of the name of a folder that is being removed."""


def partial_folder(run: Path, step: int, generation: int) -> Path:
    """Where shards of (step, generation) are assembled before the checkpoint is published."""
    return run / "checkpoints" / f".step-{step:08d}-generation-{generation}.partial"


def publish(run: Path, spec: ModelSpec, plan: Plan, progress: Progress, shards: Iterable[ShardFile]) -> Path:
    """Make the assembled shards of (step, generation) a checkpoint; returns its folder. Called by one process only.

    Whenever it is interrupted, every checkpoint that was complete before still can be found. What older generations
    left half assembled of this step and earlier ones is removed.

    Raises:
        CheckpointError: the index or the rename could not be written; older checkpoints are untouched.
    """
    source = partial_folder(run, progress.step, plan.generation)
    target = run / "checkpoints" / f"step-{progress.step:08d}"
    try:
        with (source / "index.json").open("w") as file:
            json.dump(_sealed(spec, plan.generation, progress, shards), file)
            file.flush()
            os.fsync(file.fileno())
        _fsync_folder(source)
        _put_in_place(source, target)
    except OSError as error:
        discard(run, progress.step, plan.generation)
        raise CheckpointError(_cannot_save(run, progress.step, error)) from error
    _tidy(target.parent, progress.step, plan.generation)
    return target


def _tidy(checkpoints: Path, step: int, generation: int) -> None:
    """Remove what was replaced, and what older generations left half assembled of `step` and earlier ones."""
    for folder in checkpoints.iterdir():
        match = PARTIAL.fullmatch(folder.name)
        overtaken = match is not None and int(match[1]) <= step and int(match[2]) <= generation
        if overtaken or (folder.suffix == REPLACED and folder.with_suffix("").exists()):
            shutil.rmtree(folder, ignore_errors=True)


def keep_newest(run: Path, step: int, keep: int) -> None:
    """Remove checkpoints of `run` but the `keep` newest up to `step`, which has just been published; 0 keeps all.

    Later steps are not touched: they are there where a run went on from an older checkpoint, their own being broken.
    A folder is hidden by a rename before it is removed, so that nobody takes what is left of it for a checkpoint.
    What cannot be removed stays.
    """
    if not keep:
        return
    folders = published_folders(run)
    steps = sorted({number for number, _ in map(folder_order, folders) if number <= step})
    for folder in folders:
        if folder_order(folder)[0] in steps[:-keep]:
            with contextlib.suppress(OSError):
                folder.rename(folder.with_name(f".{folder.name}{REMOVED}"))
    for folder in (run / "checkpoints").glob(f".step-*{REMOVED}"):
        shutil.rmtree(folder, ignore_errors=True)


def _sealed(spec: ModelSpec, generation: int, progress: Progress, shards: Iterable[ShardFile]) -> dict[str, Any]:
    """The index, with a checksum of itself."""
    body = {
        "format": FORMAT,
        "generation": generation,
        "progress": vars(progress),
        "model": asdict(spec),
        "files": [shard_to_json(shard) for shard in shards],
    }
    return body | {"sha256": seal(body)}


def _put_in_place(source: Path, target: Path) -> None:
    """Rename the assembled folder; one that is there already (a step saved again) steps aside, visibly, until then."""
    aside = target.with_suffix(REPLACED)
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    source.rename(target)
    _fsync_folder(target.parent)
    _fsync_folder(target.parent.parent)  # the first save has made the folder of all


def discard(run: Path, step: int, generation: int) -> None:
    """Remove what has been assembled of (step, generation)."""
    shutil.rmtree(partial_folder(run, step, generation), ignore_errors=True)


def _cannot_save(run: Path, step: int, error: object) -> str:
    return f"the checkpoint of step {step} could not be written under {run}: {error}. {how_to_go_on(run)}"


def how_to_go_on(run: Path) -> str:
    """What is left of a run whose files could not be written, and what to do, in a sentence."""
    try:
        newest = published_folders(run)[-1]
    except CheckpointError:
        return "It has no checkpoint yet: make room, then start it again with another --run."
    return f"Checkpoints up to {newest.name} are untouched: make room, then go on with runflat train --resume {run}."


def save_failed(run: Path, step: int, reason: str) -> CheckpointError:
    """The error for a device that could not write its shard."""
    return CheckpointError(_cannot_save(run, step, reason))


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
