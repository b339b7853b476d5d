"""The tensors of checkpoints: copy and write a device's shard, read any ranges of any parameter back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from runflat.errors import CheckpointError
from runflat.parallel.shard import WeightSource, read_slices
from runflat.parallel.staging import host_copy
from runflat.plan.plan import Place, Plan
from runflat.plan.units import MOMENTS, REPLICATED, ModelSpec, ParamSpec, Range, param_ranges, ranges_size, shard_pieces
from runflat.plan.zero import ParamHeld
from runflat.train.checkpoint import (
    Checkpoint,
    ShardFile,
    file_ranges,
    piece_axes,
    shard_name,
    unit_axes,
    written_units,
)
from runflat.train.publishing import partial_folder
from runflat.train.tensor_file import write_tensors

Units = Mapping[str, tuple[int, ...]]
"""Units per kind."""


@dataclass(frozen=True)
class ShardCopy:
    """What one device writes of the checkpoint of (step, generation), copied to host memory: training may go on.

    `units` are those of each kind that it writes, `tensors` by their names in the file. `moments` are the units of each
    parameter whose moments it writes, where these are sharded.
    """

    step: int
    generation: int
    name: str
    units: Mapping[str, tuple[int, ...]]
    replicated: bool
    tensors: Mapping[str, torch.Tensor]
    moments: ParamHeld | None = None


@dataclass(frozen=True)
class OwnMoments:
    """Sharded optimizer state of a device: `tensors[kind][name]` of the units `kept`; it writes the `owned` ones."""

    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    kept: ParamHeld
    owned: ParamHeld


def copy_shard(
    spec: ModelSpec,
    plan: Plan,
    place: Place,
    step: int,
    params: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    own: OwnMoments | None = None,
) -> ShardCopy:
    """A copy of what the device at `place` is to write of the state after `step`; `own`: moments that are sharded."""
    units = written_units(spec, plan, place)
    replicated = place == plan.places[0]
    held = plan.replica(place[0]).held(spec.kinds, place[1])
    written = {**units, REPLICATED: (0,) if replicated else ()}
    tensors: dict[str, torch.Tensor] = {}

    def add(kind: str, param: ParamSpec, tensor: torch.Tensor, held: Units, wanted: Units) -> None:
        ranges = _local_ranges(spec, param, held, wanted)
        if ranges or (param.dim is None and wanted[REPLICATED]):
            tensors[f"{kind}/{param.name}"] = _take(tensor, param, ranges)

    for param in spec.params:
        weight = params[param.name].detach()
        add("weight", param, weight, held, written)
        if own is None:
            for kind, tensor in zip(MOMENTS, _moments(optimizer.state[params[param.name]], weight), strict=True):
                add(kind, param, tensor, held, written)
        elif any(own.owned[param.name].values()):
            for kind in MOMENTS:
                add(kind, param, own.tensors[kind][param.name], own.kept[param.name], own.owned[param.name])
    moments = own.owned if own is not None else None
    return ShardCopy(step, plan.generation, shard_name(place), units, replicated, tensors, moments)


def write_shard(run: Path, spec: ModelSpec, copy: ShardCopy) -> ShardFile:
    """Write a device's part of a checkpoint; returns the index entry when it is on disk.

    Raises:
        OSError: the file could not be written.
    """
    path = partial_folder(run, copy.step, copy.generation) / copy.name
    path.parent.mkdir(parents=True, exist_ok=True)
    checksum, num_bytes = write_tensors(path, copy.tensors)
    moments = piece_axes(spec, copy.moments) if copy.moments is not None else None
    return ShardFile(copy.name, checksum, num_bytes, unit_axes(spec, copy.units), copy.replicated, moments)


def _moments(state: Mapping[str, torch.Tensor], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not state:  # no step has been applied yet
        return torch.zeros_like(like), torch.zeros_like(like)
    return state["exp_avg"], state["exp_avg_sq"]


def _local_ranges(spec: ModelSpec, param: ParamSpec, held: Units, units: Units) -> list[Range]:
    """Ranges of the local shard that hold `units`, in storage order."""
    if param.dim is None:
        return []
    wanted = {kind: set(listed) for kind, listed in units.items()}
    return [(p.start, p.stop) for p in shard_pieces(spec, param, held) if p.unit in wanted[p.kind]]


def _take(tensor: torch.Tensor, param: ParamSpec, ranges: list[Range]) -> torch.Tensor:
    """The ranges, contiguous and on the CPU, in memory of their own."""
    if param.dim is None:
        return host_copy(tensor)
    joined = torch.cat([tensor.narrow(param.dim, start, stop - start) for start, stop in ranges], dim=param.dim)
    return joined if joined.device.type == "cpu" else host_copy(joined)


def checkpoint_tensors(checkpoint: Checkpoint, kind: str) -> WeightSource:
    """Reads ranges of `kind` (weight, exp_avg, exp_avg_sq) of any parameter; only the needed slices are read.

    Raises:
        CheckpointError: a file that cannot be read, or elements that no file has or that two have.
    """
    opened = {shard.name: _open(checkpoint.folder / shard.name) for shard in checkpoint.files}

    def read(param: ParamSpec, ranges: tuple[Range, ...]) -> torch.Tensor:
        try:
            return _read(checkpoint, opened, param, kind, ranges)
        except SafetensorError as error:
            raise CheckpointError(f"{checkpoint.folder} does not hold {kind}/{param.name}: {error}.") from error

    return read


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def _read(
    checkpoint: Checkpoint, opened: Mapping[str, Any], param: ParamSpec, kind: str, ranges: tuple[Range, ...]
) -> torch.Tensor:
    key = f"{kind}/{param.name}"
    if param.dim is None:
        shard = next(shard for shard in checkpoint.files if shard.has_whole(kind, param))
        whole: torch.Tensor = opened[shard.name].get_tensor(key)
        return whole
    pieces: list[tuple[int, torch.Tensor]] = []
    for shard in checkpoint.files:
        overlaps = _overlaps(ranges, file_ranges(param, shard.axes_of(kind, param)))
        if overlaps:
            lazy = opened[shard.name].get_slice(key)
            for position, start, stop in overlaps:
                pieces.append((position, read_slices(lazy, param, ((start, stop),))))
    pieces.sort(key=lambda piece: piece[0])
    position = 0
    for start, piece in pieces:
        if start != position:
            break
        position += piece.shape[param.dim]
    if position != ranges_size(ranges) or position != sum(piece.shape[param.dim] for _, piece in pieces):
        raise CheckpointError(f"{checkpoint.folder} does not hold each element of {param.name} exactly once.")
    return torch.cat([piece for _, piece in pieces], dim=param.dim)


def _overlaps(wanted: tuple[Range, ...], stored: tuple[Range, ...]) -> list[tuple[int, int, int]]:
    """(position in the wanted elements, start, stop in the stored ones) of every common run."""
    found = []
    position = 0
    for first, last in wanted:
        offset = 0
        for start, stop in stored:
            low, high = max(first, start), min(last, stop)
            if low < high:
                found.append((position + low - first, offset + low - start, offset + high - start))
            offset += stop - start
        position += last - first
    return found


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    spec: ModelSpec,
    params: Mapping[str, nn.Parameter],
    ranges_of: Mapping[str, tuple[Range, ...]],
    checkpoint: Checkpoint,
) -> None:
    """Fill AdamW's state for the local shard from `checkpoint`."""
    step = checkpoint.progress.optimizer_step
    if not step:
        return
    first, second = checkpoint_tensors(checkpoint, "exp_avg"), checkpoint_tensors(checkpoint, "exp_avg_sq")
    for param in spec.params:
        weight = params[param.name]
        ranges = ranges_of[param.name]
        optimizer.state[weight] = {
            "step": torch.tensor(float(step), dtype=torch.float32),
            "exp_avg": first(param, ranges).to(device=weight.device, dtype=weight.dtype),
            "exp_avg_sq": second(param, ranges).to(device=weight.device, dtype=weight.dtype),
        }


def kept_moments(
    spec: ModelSpec, kept: ParamHeld, checkpoint: Checkpoint, like: torch.Tensor
) -> dict[str, dict[str, torch.Tensor]]:
    """Moments of the `kept` units of each parameter, by kind and name, on the device of `like` and of its type."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for kind in MOMENTS:
        read = checkpoint_tensors(checkpoint, kind)
        found[kind] = {
            param.name: read(param, param_ranges(spec, param, kept[param.name])).to(
                device=like.device, dtype=like.dtype
            )
            for param in spec.params
            if any(kept[param.name].values())
        }
    return found
