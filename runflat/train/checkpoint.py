"""Checkpoints: one safetensors shard per device and an index by element, written under any plan, read under any other.

Layout of a run's `checkpoints/`
    step-00000060/index.json      what the step is, and for each file: checksum, size, and which elements it holds
    step-00000060/shard-1-3.safetensors   `weight/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME` of the device 1:3

Each unit is written by one of its holders. A checkpoint is assembled in a folder with a leading dot and becomes visible
by one rename, after everything in it is on disk: what can be seen is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runflat.errors import CheckpointError
from runflat.plan.plan import Place, Plan
from runflat.plan.sync_groups import holders
from runflat.plan.units import ModelSpec, ParamSpec, Range, axis_ranges, merge_ranges, spec_to_json

FORMAT = 1
TENSORS = ("weight", "exp_avg", "exp_avg_sq")
"""What a shard holds per parameter: the weight and AdamW's two moments."""


@dataclass(frozen=True)
class ShardFile:
    """One file of a checkpoint: its checksum and the elements that it holds, as ranges of each kind's axis."""

    name: str
    sha256: str
    num_bytes: int
    axes: Mapping[str, tuple[Range, ...]]
    replicated: bool


@dataclass(frozen=True)
class Progress:
    """Where a run stands: everything that a resumed run needs besides tensors.

    `step` counts committed steps, `optimizer_step` those that were applied (a step with a non-finite gradient is not),
    `num_samples` the samples used, `sample_hash` their hash.
    """

    step: int
    optimizer_step: int
    num_samples: int
    sample_hash: str


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint: its folder, progress, model geometry and files."""

    folder: Path
    generation: int
    progress: Progress
    model: Mapping[str, Any]
    files: tuple[ShardFile, ...]


def written_units(spec: ModelSpec, plan: Plan, place: Place) -> dict[str, tuple[int, ...]]:
    """Units per kind that the device at `place` writes: each unit by one holder, the holders taking turns."""
    return {
        kind: tuple(unit for unit, places in sorted(units.items()) if places[unit % len(places)] == place)
        for kind, units in holders(spec, plan).items()
    }


def file_ranges(param: ParamSpec, axes: Mapping[str, tuple[Range, ...]]) -> tuple[Range, ...]:
    """Ranges of the parameter's partitioned dim that a file with the elements `axes` stores, in storage order."""
    return merge_ranges(
        (segment.offset + start, segment.offset + stop)
        for segment in param.segments
        for start, stop in axes[segment.kind]
    )


def partial_folder(run: Path, step: int, generation: int) -> Path:
    """Where shards of (step, generation) are assembled before the checkpoint is published."""
    return run / "checkpoints" / f".step-{step:08d}-generation-{generation}.partial"


def shard_name(place: Place) -> str:
    """File name of the shard that the device at `place` writes."""
    return f"shard-{place[0]}-{place[1]}.safetensors"


def unit_axes(spec: ModelSpec, units: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Range, ...]]:
    """Elements of each kind's axis that `units` cover."""
    return {kind: axis_ranges(spec.kind(kind), held) for kind, held in units.items()}


def describe_shard(path: Path, axes: Mapping[str, tuple[Range, ...]], replicated: bool) -> ShardFile:
    """The index entry of a shard that has just been written; makes sure that the file is on disk."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        os.fsync(file.fileno())
        while block := file.read(1 << 20):
            digest.update(block)
    return ShardFile(path.name, digest.hexdigest(), path.stat().st_size, axes, replicated)


def shard_to_json(shard: ShardFile) -> dict[str, Any]:
    """JSON form of a shard's index entry."""
    return {
        "name": shard.name,
        "sha256": shard.sha256,
        "num_bytes": shard.num_bytes,
        "axes": {kind: [list(r) for r in ranges] for kind, ranges in shard.axes.items()},
        "replicated": shard.replicated,
    }


def shard_from_json(data: Mapping[str, Any]) -> ShardFile:
    """The index entry that `shard_to_json` wrote."""
    axes = {kind: tuple((int(a), int(b)) for a, b in ranges) for kind, ranges in data["axes"].items()}
    return ShardFile(data["name"], data["sha256"], int(data["num_bytes"]), axes, bool(data["replicated"]))


def publish(run: Path, spec: ModelSpec, plan: Plan, progress: Progress, shards: Iterable[ShardFile]) -> Path:
    """Make the assembled shards of (step, generation) a checkpoint; returns its folder. Called by one process only.

    Raises:
        CheckpointError: the index or the rename could not be written; older checkpoints are untouched.
    """
    source = partial_folder(run, progress.step, plan.generation)
    target = run / "checkpoints" / f"step-{progress.step:08d}"
    index = {
        "format": FORMAT,
        "generation": plan.generation,
        "progress": vars(progress),
        "model": spec_to_json(spec),
        "files": [shard_to_json(shard) for shard in shards],
    }
    try:
        with (source / "index.json").open("w") as file:
            json.dump(index, file)
            file.flush()
            os.fsync(file.fileno())
        _fsync_folder(source)
        if target.exists():
            # The same step saved again after a resume: the old folder steps aside so that the rename cannot fail.
            shutil.rmtree(target)
        source.rename(target)
        _fsync_folder(target.parent)
    except OSError as error:
        discard(run, progress.step, plan.generation)
        raise CheckpointError(_cannot_save(run, progress.step, error)) from error
    return target


def discard(run: Path, step: int, generation: int) -> None:
    """Remove what has been assembled of (step, generation)."""
    shutil.rmtree(partial_folder(run, step, generation), ignore_errors=True)


def _cannot_save(run: Path, step: int, error: object) -> str:
    return (
        f"the checkpoint of step {step} could not be written under {run}: {error}. Older checkpoints are untouched: "
        f"make room, then go on with runflat train --resume {run}."
    )


def save_failed(run: Path, step: int, reason: str) -> CheckpointError:
    """The error for a device that could not write its shard."""
    return CheckpointError(_cannot_save(run, step, reason))


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def newest_checkpoint(run: Path, warn: Any) -> Checkpoint:
    """The newest complete checkpoint of `run`; broken ones are skipped with a call of `warn(text)`.

    Raises:
        CheckpointError: there is none, or none that is whole. A missing checkpoint is never a fresh start.
    """
    folders = sorted((run / "checkpoints").glob("step-*"), reverse=True)
    if not folders:
        raise CheckpointError(
            f"{run} has no checkpoint: there is no folder step-N under {run / 'checkpoints'}. Name the folder of a run "
            f"that has saved one, or start anew without --resume."
        )
    problems = []
    for folder in folders:
        try:
            return _open_checked(folder)
        except CheckpointError as error:
            problems.append(str(error))
            if folder != folders[-1]:
                warn(f"skipping a broken checkpoint: {error}")
    raise CheckpointError(f"no checkpoint of {run} is whole ({'; '.join(problems)}).")


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in `folder` by its index alone; checksums are not compared.

    Raises:
        CheckpointError: the index is missing or is not one of ours.
    """
    try:
        index = json.loads((folder / "index.json").read_text())
        if index["format"] != FORMAT:
            raise CheckpointError(f"{folder} has format {index['format']}, but this version reads {FORMAT}.")
        return Checkpoint(
            folder,
            int(index["generation"]),
            Progress(**index["progress"]),
            index["model"],
            tuple(shard_from_json(entry) for entry in index["files"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} has no readable index.json: {error}") from error


def _open_checked(folder: Path) -> Checkpoint:
    checkpoint = open_checkpoint(folder)
    for shard in checkpoint.files:
        path = folder / shard.name
        if not path.exists():
            raise CheckpointError(f"{path} is missing.")
        if path.stat().st_size != shard.num_bytes:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes where the index says {shard.num_bytes}.")
        if describe_shard(path, shard.axes, shard.replicated).sha256 != shard.sha256:
            raise CheckpointError(f"{path} does not have the checksum that the index names.")
    return checkpoint


def check_model(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        CheckpointError: names the first parameter that differs.
    """
    shapes: Mapping[str, list[int]] = checkpoint.model["params"]
    for param in spec.params:
        found = shapes.get(param.name)
        if found is None or tuple(found) != param.shape:
            raise CheckpointError(
                f"{checkpoint.folder} is of another model: {param.name} has shape {found} there and "
                f"{list(param.shape)} here. Resume with the model that the run was started with."
            )
    if len(shapes) != len(spec.params):
        raise CheckpointError(
            f"{checkpoint.folder} has {len(shapes)} parameters where the model has {len(spec.params)}."
        )
