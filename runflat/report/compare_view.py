"""Several runs side by side: what `runflat compare` found, from its compare.json and the folders that it names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runflat.errors import DataError
from runflat.report.chart import Figure, Line, Lines, people
from runflat.report.run_figures import stair
from runflat.report.run_files import RunData, read_run
from runflat.report.sim_figures import color_of, goodput_bars
from runflat.report.views import Table, Tile, View, read_result, source_of


def compare_views(path: Path) -> tuple[View, list[RunData]]:
    """The view of a comparison, and the runs that it names.

    Raises:
        DataError: compare.json or a run cannot be read.
    """
    data = read_result(path)
    try:
        rows = [dict(row) for row in data["runs"]]
        chains = [str(row["strategies"]) for row in rows]
        runs = [read_run(path.parent / Path(row["run"]).name) for row in rows]
        table = _table(rows)
        tiles = _tiles(rows)
        figures = [figure for figure in (_goodput(rows), _speed(chains, runs)) if figure is not None]
    except (LookupError, TypeError, ValueError) as error:
        raise DataError(f"{path} is no comparison of this version ({type(error).__name__}: {error}).") from error
    view = View(
        key="v0",
        name="comparison",
        subtitle=f"the same failures ({data.get('inject', 'none')}) under each strategy",
        source=source_of(str(path), runs[0].origin if runs else {}),
        is_emulated=any(run.emulated for run in runs),
        tiles=tiles,
        figures=tuple(figures),
        num_before_map=len(figures),
        tables=(table,),
    )
    return view, runs


def _tiles(rows: list[dict[str, Any]]) -> tuple[Tile, ...]:
    known = [row for row in rows if row["goodput"] is not None]
    if not known:
        return ()
    best = max(known, key=lambda row: float(row["goodput"]))
    return (Tile("best goodput", people(float(best["goodput"]), "%"), str(best["strategies"])),)


def _goodput(rows: list[dict[str, Any]]) -> Figure | None:
    known = [(str(row["strategies"]), float(row["goodput"])) for row in rows if row["goodput"] is not None]
    return goodput_bars((chain, goodput, people(goodput, "%")) for chain, goodput in known)


def _speed(chains: list[str], runs: list[RunData]) -> Figure | None:
    lines = []
    for index, (chain, run) in enumerate(zip(chains, runs, strict=True)):
        x, y = stair(run.steps, [step.tokens_per_s for step in run.steps])
        if x:
            lines.append(Line(label=chain, x=x, y=y, color=color_of(index)))
    if not lines:
        return None
    return Lines(
        key="tokens",
        title="Tokens per second under each strategy",
        says="Speed of each committed step; a line falls to zero where training stood.",
        x_label="seconds since the start",
        y_label="tokens per second",
        lines=tuple(lines),
    )


def _table(rows: list[dict[str, Any]]) -> Table:
    head = ("strategy", "goodput %", "recovery (median)", "longest", "work repeated", "idle", "time", "incidents", "")
    body = []
    for row in rows:
        goodput = "" if row["goodput"] is None else f"{100 * float(row['goodput']):.2f}"
        numbers = [
            _number(row, "recovery_s", "s"),
            _number(row, "longest_recovery_s", "s"),
            _number(row, "work_repeated", "device-s"),
            _number(row, "devices_idle", "devices"),
            _number(row, "wall_s", "s"),
        ]
        body.append((str(row["strategies"]), goodput, *numbers, str(row["num_incidents"]), str(row["words"] or "")))
    says = "Recovery is from the fault to the first commit after it."
    return Table("Strategies", says, head, tuple(body))


def _number(row: Mapping[str, Any], key: str, unit: str) -> str:
    value = row[key]
    return "" if value is None else people(float(value), unit)
