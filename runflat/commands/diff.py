"""`runflat diff`: how far two checkpoints are apart."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from runflat.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from runflat.check.diff import Comparison

WORST_ROWS = 8
"""Tensors that the table names one by one."""

DESCRIPTION = """Compare two checkpoints of any layouts: norm of the difference over norm of the first, per tensor.

Weights and both moments of AdamW are compared. With --tolerance the exit code is 1 if any tensor is farther apart.

Example: runflat diff runs/whole runs/hurt --tolerance 1e-3
"""


@dataclass(frozen=True)
class DiffArgs:
    """What to compare."""

    run_a: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_A")]
    """Folder of a run, or of one checkpoint; errors are relative to this side."""
    run_b: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_B")]
    """The other one."""
    step: int | None = None
    """Compare the checkpoints of this step instead of each run's newest."""
    tolerance: float | None = None
    """Largest error of any tensor at which the exit code is 0; none: any."""
    json: bool = False
    """Print one JSON object instead of tables."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = tyro.cli(
        DiffArgs, args=argv, prog="runflat diff", description=DESCRIPTION, config=(tyro.conf.FlagCreatePairsOff,)
    )
    if args.tolerance is not None and not (math.isfinite(args.tolerance) and args.tolerance >= 0):
        raise ConfigError(f"--tolerance is {args.tolerance}: it must be a number of at least 0, such as 1e-6.")
    from runflat.check.diff import compare, find_checkpoint

    def warn(text: str) -> None:
        print(f"runflat diff: warning: {text}", file=sys.stderr)

    first, second = (find_checkpoint(path, args.step, warn) for path in (args.run_a, args.run_b))
    comparison = compare(first, second)
    within = args.tolerance is None or comparison.largest <= args.tolerance
    if args.json:
        print(json.dumps(_as_json(comparison, args.tolerance, within), indent=2))
    else:
        _show(comparison, args.tolerance, within)
    return 0 if within else 1


def _as_json(comparison: Comparison, tolerance: float | None, within: bool) -> dict[str, Any]:
    """The comparison for programs; an error that is not finite is null."""

    def number(error: float) -> float | None:
        return error if math.isfinite(error) else None

    error, tensor, name = comparison.ranked[0]
    return {
        "checkpoints": [
            {"folder": str(c.folder), "step": c.progress.step, "sample_hash": c.progress.sample_hash}
            for c in (comparison.first, comparison.second)
        ],
        "tolerance": tolerance,
        "within": within,
        "worst": {"tensor": tensor, "parameter": name, "error": number(error)},
        "whole": {kind: number(comparison.whole(kind)) for kind in comparison.tensors},
        "tensors": {
            kind: {name: number(found.error) for name, found in by_name.items()}
            for kind, by_name in comparison.tensors.items()
        },
    }


def _show(comparison: Comparison, tolerance: float | None, within: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for letter, checkpoint in zip("AB", (comparison.first, comparison.second), strict=True):
        step = checkpoint.progress.step
        console.print(f"{letter}: {checkpoint.folder} (step {step})", markup=False, soft_wrap=True)
    steps, samples = (
        {getattr(c.progress, field) for c in (comparison.first, comparison.second)} for field in ("step", "sample_hash")
    )
    if len(steps) > 1:
        console.print("note: the steps differ; --step compares the same one")
    elif len(samples) > 1:
        console.print("note: the two were trained on different sequences")
    console.print(_kinds(comparison))
    console.print(_worst(comparison))
    error, tensor, name = comparison.ranked[0]
    if error == 0.0:
        console.print("the two are equal to the bit")
    if tolerance is not None and not within:
        console.print(
            f"{tensor} of {name} is {error:.2e} apart, more than the tolerance of {tolerance:.2e}", soft_wrap=True
        )


def _kinds(comparison: Comparison) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title="norm of A - B over norm of A", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("parameter (its worst layer)", overflow="fold")
    for tensor in comparison.tensors:
        table.add_column(tensor, justify="right")
    columns = [comparison.by_kind(tensor) for tensor in comparison.tensors]
    for kind in columns[0]:
        table.add_row(kind, *(f"{column[kind]:.2e}" for column in columns))
    table.add_section()
    table.add_row("the whole", *(f"{comparison.whole(tensor):.2e}" for tensor in comparison.tensors), style="bold")
    return table


def _worst(comparison: Comparison) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title="farthest apart", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("tensor")
    table.add_column("of", overflow="fold")
    table.add_column("error", justify="right")
    for error, tensor, name in comparison.ranked[:WORST_ROWS]:
        table.add_row(tensor, name, f"{error:.2e}")
    return table
