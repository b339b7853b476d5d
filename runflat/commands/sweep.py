"""`runflat sweep`: the same question with one number changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from runflat.commands.origin import origin
from runflat.commands.simulate import changed, read_question, write_json
from runflat.errors import ConfigError
from runflat.sim.sweep import Axis, sweep, sweep_json, sweep_table
from runflat.sim.tables import question

DESCRIPTION = """Goodput against one number: failure rate, repair time, spares, domain size, TP degree, headroom, saves.

Example: runflat sweep --preset lab --over rate --values 0.5 1 2 4
"""


def sweep_command(
    config: Annotated[Path | None, tyro.conf.Positional] = None,
    preset: str | None = None,
    over: Axis = "rate",
    values: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0),
    strategies: tuple[str, ...] = (),
    seeds: int | None = None,
    days: float | None = None,
    json_out: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
    figures: Path | None = Path("runs/simulate"),
) -> None:
    """Print goodput at each value, and write a result file and a figure.

    Args:
        config: TOML file with the question.
        preset: A ready question instead: llama3, ntp-paper, gb200 or lab.
        over: What to change; rate and repair multiply, headroom is maximum over nominal power.
        values: The numbers to try.
        strategies: Chains to compare.
        seeds: Draws of failures to average over.
        days: Length.
        json_out: Where the result file goes; none: beside the figure.
        figures: Folder of the figure; None for no figure.
    """
    if not values:
        raise ConfigError("--values is empty; give at least one number, such as --values 0.5 1 2")
    asked = changed(read_question(config, preset), strategies=strategies, seeds=seeds, days=days)
    print(question(asked), end="\n\n")
    rows = sweep(asked, over, values)
    print(sweep_table(over, rows))
    out = json_out or (figures / f"{asked.name}-{over}.json" if figures else None)
    if out is None:
        return
    write_json(out, {**sweep_json(asked, over, rows), "origin": origin()})
    written = [out]
    if figures is not None:
        from runflat.report.figures import lines_figure  # matplotlib loads slowly: the table comes first

        written.append(lines_figure(out, figures / f"{asked.name}-{over}.png"))
    print("\nwritten: " + ", ".join(str(path) for path in written))


def main(argv: Sequence[str]) -> int:
    """Exit status of `runflat sweep` with these arguments."""
    tyro.cli(sweep_command, args=list(argv), prog="runflat sweep", description=DESCRIPTION)
    return 0
