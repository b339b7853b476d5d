"""`runflat diff`: two checkpoints of any layouts compared tensor by tensor, one tensor of each in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from runflat.check.verify import kind_of
from runflat.errors import CheckpointError
from runflat.plan.units import TENSORS, ParamSpec
from runflat.train.checkpoint import (
    Checkpoint,
    checkpoint_of_step,
    model_difference,
    newest_checkpoint,
    open_checked,
)
from runflat.train.shards import checkpoint_tensors


@dataclass(frozen=True)
class Difference:
    """Norm of a difference, and norm of the first side."""

    distance: float
    size: float

    @property
    def error(self) -> float:
        """Norm of the difference over the norm of the first side; infinite where that is zero or one is not finite."""
        if self.distance == 0.0:
            return 0.0
        return self.distance / self.size if self.size > 0.0 and math.isfinite(self.distance) else math.inf


@dataclass(frozen=True)
class Comparison:
    """Two checkpoints and, for `weight`, `exp_avg` and `exp_avg_sq`, the difference of each parameter by name."""

    first: Checkpoint
    second: Checkpoint
    tensors: Mapping[str, Mapping[str, Difference]]

    def whole(self, tensor: str) -> float:
        """Error of all parameters as one long vector."""
        parts = self.tensors[tensor].values()
        return Difference(math.hypot(*(p.distance for p in parts)), math.hypot(*(p.size for p in parts))).error

    def by_kind(self, tensor: str) -> dict[str, float]:
        """Largest error per kind of parameter, over its layers."""
        errors: dict[str, float] = {}
        for name, difference in self.tensors[tensor].items():
            errors[kind_of(name)] = max(errors.get(kind_of(name), 0.0), difference.error)
        return errors

    @property
    def ranked(self) -> list[tuple[float, str, str]]:
        """(error, tensor, parameter) of everything, the worst first; equal ones stay in the model's order."""
        every = [(d.error, tensor, name) for tensor, found in self.tensors.items() for name, d in found.items()]
        return sorted(every, key=lambda entry: -entry[0])

    @property
    def largest(self) -> float:
        """Error of the worst tensor."""
        return self.ranked[0][0]


def find_checkpoint(path: Path, step: int | None, warn: Callable[[str], object]) -> Checkpoint:
    """The checkpoint that `path` names: a checkpoint's own folder, or a run's newest one or that of `step`.

    Raises:
        CheckpointError: there is none, it is damaged, or `step` contradicts a checkpoint's own folder.
    """
    if (path / "index.json").is_file():
        checkpoint = open_checked(path)
        if step not in (None, checkpoint.progress.step):
            raise CheckpointError(
                f"{path} is a checkpoint of step {checkpoint.progress.step}, not {step}: leave --step."
            )
        return checkpoint
    return newest_checkpoint(path, warn) if step is None else checkpoint_of_step(path, step)


def compare(first: Checkpoint, second: Checkpoint) -> Comparison:
    """Weights and both moments of two checkpoints of one model, whatever layouts wrote them.

    Raises:
        CheckpointError: they are of different models, or one cannot be read.
    """
    difference = model_difference(first.spec, second.spec)
    if difference:
        raise CheckpointError(
            f"{first.folder} (there) and {second.folder} (here) cannot be compared, they are of different models: "
            f"{difference}. Name two checkpoints of one model."
        )
    tensors: dict[str, dict[str, Difference]] = {}
    for tensor in TENSORS:
        sources = [checkpoint_tensors(checkpoint, tensor) for checkpoint in (first, second)]
        tensors[tensor] = {}
        for param in first.spec.params:
            one, other = (source(param, _all_of(param)).double() for source in sources)
            tensors[tensor][param.name] = Difference(float((one - other).norm()), float(one.norm()))
    return Comparison(first, second, tensors)


def _all_of(param: ParamSpec) -> tuple[tuple[int, int], ...]:
    return () if param.dim is None else ((0, param.shape[param.dim]),)
