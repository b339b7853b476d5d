"""Checkpoints: one safetensors shard per device and an index by element, written under any plan, read under any other.

Layout of a run's `checkpoints/`
    step-00000060/index.json      what the step is, and for each file: checksum, size, and which elements it holds
    step-00000060/shard-1-3.safetensors   `weight/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME` of the device 1:3

Each unit is written by one of its holders; where optimizer state is sharded, moments are written by their owners. A
checkpoint is assembled in a folder with a leading dot and becomes visible by one rename, after everything in it is on
disk: what can be seen is complete. Where a step is saved a second time, the old folder stays visible as
step-00000060.replaced until the new one is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runflat.errors import CheckpointError
from runflat.plan.plan import Place, Plan
from runflat.plan.sync_groups import Members, holders
from runflat.plan.units import REPLICATED, Kind, ModelSpec, ParamSpec, Range, Segment, axis_ranges, merge_ranges
from runflat.plan.zero import ParamHeld

FORMAT = 1
REPLACED = ".replaced"
"""End of the name of a folder whose step has been saved again."""
FOLDER = re.compile(rf"step-(\d+)({re.escape(REPLACED)})?")


@dataclass(frozen=True)
class ShardFile:
    """One file of a checkpoint: its checksum and the elements that it holds, as ranges of each kind's axis.

    `moments`: where optimizer state was sharded, those whose moments it holds, by parameter, `REPLICATED` for the whole
    of one that is not cut. Else they are those of the weights.
    """

    name: str
    sha256: str
    num_bytes: int
    axes: Mapping[str, tuple[Range, ...]]
    replicated: bool
    moments: Mapping[str, Mapping[str, tuple[Range, ...]]] | None = None

    def axes_of(self, tensor: str, param: ParamSpec) -> Mapping[str, tuple[Range, ...]]:
        """The elements of one of `TENSORS` of a parameter that is cut."""
        if self.moments is None or tensor == "weight":
            return self.axes
        return self.moments.get(param.name) or dict.fromkeys(param.kinds, ())

    def has_whole(self, tensor: str, param: ParamSpec) -> bool:
        """Whether it has one of `TENSORS` of a parameter that is not cut."""
        if self.moments is None or tensor == "weight":
            return self.replicated
        return param.name in self.moments


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
    """A published checkpoint: its folder, progress, model geometry and files.

    `spec` is the model as the writing layout cut it: the sizes of its FFN and vocabulary units are that layout's.
    """

    folder: Path
    generation: int
    progress: Progress
    spec: ModelSpec
    files: tuple[ShardFile, ...]


def written_units(spec: ModelSpec, plan: Plan, place: Place) -> dict[str, tuple[int, ...]]:
    """Units per kind that the device at `place` writes: each unit by one holder.

    Units with the same holders are dealt to them in equal runs, not in turn, so that a file has few and long ranges.
    """
    written: dict[str, tuple[int, ...]] = {}
    for kind, units in holders(spec, plan).items():
        shared: dict[Members, list[int]] = {}
        for unit, places in sorted(units.items()):
            shared.setdefault(tuple(places), []).append(unit)
        written[kind] = tuple(
            sorted(
                unit
                for places, run in shared.items()
                for index, unit in enumerate(run)
                if places[index * len(places) // len(run)] == place
            )
        )
    return written


def file_ranges(param: ParamSpec, axes: Mapping[str, tuple[Range, ...]]) -> tuple[Range, ...]:
    """Ranges of the parameter's partitioned dim that a file with the elements `axes` stores, in storage order."""
    return merge_ranges(
        (segment.offset + start, segment.offset + stop)
        for segment in param.segments
        for start, stop in axes[segment.kind]
    )


def shard_name(place: Place) -> str:
    """File name of the shard that the device at `place` writes."""
    return f"shard-{place[0]}-{place[1]}.safetensors"


def unit_axes(spec: ModelSpec, units: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Range, ...]]:
    """Elements of each kind's axis that `units` cover."""
    return {kind: axis_ranges(spec.kind(kind), held) for kind, held in units.items()}


def piece_axes(spec: ModelSpec, pieces: ParamHeld) -> dict[str, dict[str, tuple[Range, ...]]]:
    """Elements of each kind's axis that the units of each parameter cover; parameters without units are left out."""
    return {
        name: {kind: ((0, 1),) if kind == REPLICATED else axis_ranges(spec.kind(kind), of) for kind, of in held.items()}
        for name, held in pieces.items()
        if any(held.values())
    }


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def shard_to_json(shard: ShardFile) -> dict[str, Any]:
    """JSON form of a shard's index entry."""
    entry = {
        "name": shard.name,
        "sha256": shard.sha256,
        "num_bytes": shard.num_bytes,
        "axes": _axes_to_json(shard.axes),
        "replicated": shard.replicated,
    }
    if shard.moments is not None:
        entry["moments"] = {name: _axes_to_json(axes) for name, axes in shard.moments.items()}
    return entry


def _axes_to_json(axes: Mapping[str, tuple[Range, ...]]) -> dict[str, list[list[int]]]:
    return {kind: [list(r) for r in ranges] for kind, ranges in axes.items()}


def shard_from_json(data: Mapping[str, Any]) -> ShardFile:
    """The index entry that `shard_to_json` wrote."""
    listed = data.get("moments")
    moments = {name: _axes_from_json(axes) for name, axes in listed.items()} if listed is not None else None
    axes = _axes_from_json(data["axes"])
    return ShardFile(data["name"], data["sha256"], int(data["num_bytes"]), axes, bool(data["replicated"]), moments)


def _axes_from_json(data: Mapping[str, Any]) -> dict[str, tuple[Range, ...]]:
    return {kind: tuple((int(a), int(b)) for a, b in ranges) for kind, ranges in data.items()}


def seal(body: Mapping[str, Any]) -> str:
    """The checksum that an index has of itself."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def newest_checkpoint(run: Path, warn: Callable[[str], object]) -> Checkpoint:
    """The newest complete checkpoint of `run`; broken ones are skipped with a call of `warn(text)`.

    Raises:
        CheckpointError: there is none, or none that is whole. A missing checkpoint is never a fresh start.
    """
    problems: list[str] = []
    for folder in reversed(published_folders(run)):
        try:
            checkpoint = open_checked(folder)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            warn(f"skipping a broken checkpoint: {problem}")
        return checkpoint
    raise CheckpointError(f"no checkpoint of {run} is whole: {' '.join(problems)} Go on from another run.")


def checkpoint_of_step(run: Path, step: int) -> Checkpoint:
    """The checkpoint of `run` after `step` steps, whole.

    Raises:
        CheckpointError: there is none of that step, or it is broken.
    """
    steps = {folder_order(folder)[0]: folder for folder in published_folders(run)}
    if step not in steps:
        known = ", ".join(map(str, sorted(steps)))
        raise CheckpointError(f"{run} has no checkpoint of step {step}: there are those of the steps {known}.")
    return open_checked(steps[step])


def published_folders(run: Path) -> list[Path]:
    """Folders of published checkpoints, oldest first, at least one.

    Raises:
        CheckpointError: there is none.
    """
    folder = run / "checkpoints"
    found = sorted((path for path in folder.glob("step-*") if FOLDER.fullmatch(path.name)), key=folder_order)
    if not found:
        reason = f"there is no folder step-N under {folder}" if run.is_dir() else "there is no such folder"
        raise CheckpointError(f"{run} has no checkpoint: {reason}. Name the folder of a run that has saved one.")
    return found


def folder_order(folder: Path) -> tuple[int, bool]:
    """By step; a folder that was replaced comes before the one that took its place."""
    match = FOLDER.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), match[2] is None


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in `folder` by its index alone; the shards' checksums are not compared.

    Raises:
        CheckpointError: the index is missing, damaged, or not one of ours.
    """
    try:
        index = json.loads((folder / "index.json").read_text())
        if index["format"] != FORMAT:
            raise CheckpointError(f"{folder} has format {index['format']}, but this version reads {FORMAT}.")
        if index.pop("sha256") != seal(index):
            raise CheckpointError(f"{folder / 'index.json'} does not have the checksum that it names.")
        return Checkpoint(
            folder,
            int(index["generation"]),
            Progress(**index["progress"]),
            _spec_from_json(index["model"]),
            tuple(shard_from_json(entry) for entry in index["files"]),
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{folder} has no readable index.json ({reason}).") from error


def _spec_from_json(data: Mapping[str, Any]) -> ModelSpec:
    """The spec whose `asdict` went through JSON."""
    params = (
        ParamSpec(
            **entry
            | {"shape": tuple(entry["shape"]), "segments": tuple(Segment(**segment) for segment in entry["segments"])}
        )
        for entry in data["params"]
    )
    return ModelSpec(**dict(data) | {"kinds": tuple(Kind(**kind) for kind in data["kinds"]), "params": tuple(params)})


def open_checked(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`; each shard has the size and the checksum that the index names.

    Raises:
        CheckpointError: something is missing or damaged.
    """
    checkpoint = open_checkpoint(folder)
    for shard in checkpoint.files:
        path = folder / shard.name
        try:
            size = path.stat().st_size
            damaged = size == shard.num_bytes and _checksum(path) != shard.sha256
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
        if size != shard.num_bytes:
            raise CheckpointError(f"{path} has {size} bytes where the index says {shard.num_bytes}.")
        if damaged:
            raise CheckpointError(f"{path} does not have the checksum that the index names.")
    return checkpoint


def check_model(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        CheckpointError: names the first thing that differs.
    """
    difference = model_difference(checkpoint.spec, spec)
    if difference:
        raise CheckpointError(
            f"{checkpoint.folder} is of another model: {difference}. Resume with the model that the run was started "
            f"with."
        )


def model_difference(there: ModelSpec, here: ModelSpec) -> str:
    """The first thing in which two models differ, empty where they are the same. How units were cut does not count."""
    if there.name != here.name:
        return f"it is a {there.name} there and a {here.name} here"
    theirs, ours = (spec.by_name for spec in (there, here))
    for name in [*ours, *theirs]:
        shapes = [list(params[name].shape) if name in params else None for params in (theirs, ours)]
        if shapes[0] != shapes[1]:
            return f"{name} has shape {shapes[0]} there and {shapes[1]} here"
    for name in ours:
        if (theirs[name].dim, theirs[name].segments) != (ours[name].dim, ours[name].segments):
            return f"{name} is cut differently there"
    heads = [(spec.head_dim, [(k.name, k.size, k.parent, k.group) for k in spec.kinds]) for spec in (there, here)]
    return "" if heads[0] == heads[1] else f"its heads are of size {there.head_dim} there and {here.head_dim} here"
