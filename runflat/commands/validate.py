"""`runflat validate`: the step-time model against published measurements."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

if TYPE_CHECKING:
    from rich.table import Table

    from runflat.perf.fitting import Check

DESCRIPTION = """Compare predicted with published step times, row by row.

Three predictions stand beside each row: all rows in the fit; the row's publication left out of the fit; and a constant
share of the peak (the best single one), for comparison. The exit code is 1 if the errors are above the limits: mean 5 %
in sample, 8 % left out, largest 20 % in sample.

Example: runflat validate measured_step_times.csv
"""

MEAN_LIMIT, LEFT_OUT_LIMIT, LARGEST_LIMIT = 0.05, 0.08, 0.20


@dataclass(frozen=True)
class ValidateArgs:
    """What to compare with."""

    table: tyro.conf.Positional[Path]
    """CSV file of published steps (columns: runflat/perf/published.py)."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = tyro.cli(ValidateArgs, args=argv, prog="runflat validate", description=DESCRIPTION)
    from rich.console import Console

    from runflat.perf.efficiency import load_efficiencies
    from runflat.perf.fitting import cross_validate, errors
    from runflat.perf.published import read_rows

    checks = cross_validate(read_rows(args.table), load_efficiencies())
    console = Console()
    console.print(_rows(checks))
    console.print(_summary(checks))
    inside, left_out = errors(checks, "seconds"), errors(checks, "seconds_left_out")
    good = inside.mean <= MEAN_LIMIT and left_out.mean <= LEFT_OUT_LIMIT and inside.largest <= LARGEST_LIMIT
    print("within the limits" if good else "above the limits")
    return 0 if good else 1


_KINDS = {"fit": "seconds", "left out": "seconds_left_out", "const": "constant_s", "c. left out": "constant_left_out_s"}
"""Columns and the prediction that each shows: ours and constant utilisation, in sample and left out."""


def _rows(checks: list[Check]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title="published and predicted step times; errors in %", box=box.SIMPLE, padding=(0, 0, 0, 1))
    table.add_column("row", no_wrap=True)
    for name in ("m.b. x chunks", "published s", "predicted s", *_KINDS):
        table.add_column(name, justify="right")
    for check in checks:
        percent = [f"{100 * check.error(getattr(check, kind)):+.1f}" for kind in _KINDS.values()]
        size = f"{check.micro_batch} x {check.virtual}"
        table.add_row(check.row.name, size, f"{check.row.seconds:.3f}", f"{check.seconds:.3f}", *percent)
    return table


def _summary(checks: list[Check]) -> Table:
    from rich import box
    from rich.table import Table

    from runflat.perf.fitting import errors

    table = Table(title="mean and largest absolute error in %", box=box.SIMPLE, padding=(0, 0, 0, 1))
    table.add_column("publication (rows)", no_wrap=True)
    for name in _KINDS:
        table.add_column(name, justify="right")
    publications = list(dict.fromkeys(check.row.publication for check in checks))
    for publication in [*publications, "all"]:
        part = [check for check in checks if publication in ("all", check.row.publication)]
        found = [errors(part, kind) for kind in _KINDS.values()]
        cells = [f"{100 * e.mean:.1f}, {100 * e.largest:.1f}" for e in found]
        table.add_row(f"{publication} ({len(part)})", *cells)
    return table
