"""`runflat report`: runs and results as one HTML page, and their figures as files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from runflat.errors import ConfigError

DESCRIPTION = """Write one HTML page about runs and results: it needs no network, and every figure can be saved from it.

Give folders of runs (finished, stopped or running), and result files of simulate, sweep, advise and
compare, in any number.

Example: runflat report runs/demo/hurt --whole runs/demo/whole -o report.html
"""


@dataclass(frozen=True)
class ReportArgs:
    """What to show, and where to write."""

    inputs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN|RESULT")]
    """Folders of runs and result files."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")
    """The page."""
    figures: Path | None = None
    """Folder for each figure as SVG, PNG and CSV; none: the page only."""
    whole: Path | None = None
    """A run without a failure, whose loss is drawn beneath that of the runs that train the same."""
    title: str | None = None
    """Title of the page; none: the names of what it shows."""


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    args = tyro.cli(ReportArgs, args=list(argv), prog="runflat report", description=DESCRIPTION)
    print(write_report(args))
    return 0


def write_report(args: ReportArgs) -> str:
    """Write the page and the figures; returns where they are, in words.

    Raises:
        ConfigError: nothing was named.
        DataError: a run or result cannot be read.
    """
    from runflat.report.compare_view import compare_views
    from runflat.report.page import render, write_figures
    from runflat.report.run_files import RunData, read_run, trains_the_same
    from runflat.report.views import View, result_view, run_view

    if not args.inputs:
        raise ConfigError("there is nothing to report: name a run's folder or a result file, such as runs/demo/hurt.")
    whole = read_run(args.whole) if args.whole else None

    def one(run: RunData, key: str) -> View:
        return run_view(run, key, whole if whole and trains_the_same(run, whole) else None)

    views: list[View] = []
    for number, path in enumerate(args.inputs, start=1):
        key = f"v{number}"
        compared = path / "compare.json" if path.is_dir() else path
        if compared.name == "compare.json" and compared.is_file():
            view, runs = compare_views(compared)
            views.append(replace(view, key=key))
            views += [one(run, f"{key}-{index}") for index, run in enumerate(runs)]
        else:
            views.append(result_view(path, key) if path.is_file() else one(read_run(path), key))
    title = args.title or ", ".join(view.name for view in views)
    page = render(views, title)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(page, encoding="utf-8")
    words = [f"report: {args.output} ({len(page.encode()) / 1e6:.2f} MB)"]
    words += [f"warning: {view.name}: {problem}" for view in views for problem in view.problems]
    if args.figures:
        written = write_figures(views, args.figures)
        words.append(f"figures: {len(written)} files in {args.figures}")
    return "\n".join(words)
