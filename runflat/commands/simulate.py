"""`runflat simulate`: what each strategy is worth on a cluster, as a table, a result file and figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from runflat.cluster.ledger import GOODPUT_NAMES
from runflat.commands.origin import origin
from runflat.errors import ConfigError
from runflat.plan.batch import BatchRule
from runflat.sim.config import SimConfig, checked, load_config, parse_candidate
from runflat.sim.experiment import fallen_through, run_all
from runflat.sim.perf_times import job_times
from runflat.sim.presets import preset as ready_question
from runflat.sim.tables import explanation, question, results_table

DESCRIPTION = """What each strategy costs and saves on a cluster.

Example: runflat simulate --preset llama3 --strategies restart ntp,drop --seeds 5
"""


def read_question(config: Path | None, preset: str | None) -> SimConfig:
    """The question in a file or of a preset.

    Raises:
        ConfigError: if not exactly one of the two is given.
    """
    if (config is None) == (preset is None):
        raise ConfigError("give either a configuration file or --preset (llama3, ntp-paper, gb200, lab)")
    return load_config(config) if config is not None else ready_question(preset or "")


def changed(
    question: SimConfig,
    *,
    strategies: Sequence[str] = (),
    seeds: int | None = None,
    days: float | None = None,
    rule: BatchRule | None = None,
) -> SimConfig:
    """The question with what the flags say.

    Raises:
        ConfigError: for a value that is not allowed.
    """
    for text in strategies:
        parse_candidate(text)
    given = {"strategies": tuple(strategies) or None, "seeds": seeds, "days": days, "rule": rule}
    update = {name: value for name, value in given.items() if value is not None}
    return checked(question.model_copy(update=update), source="the flags")


def write_json(path: Path, data: object) -> None:
    """Write a result file, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def simulate_command(
    config: Annotated[Path | None, tyro.conf.Positional] = None,
    preset: str | None = None,
    strategies: tuple[str, ...] = (),
    seeds: int | None = None,
    days: float | None = None,
    rule: Literal["constant", "capped", "flexible"] | None = None,
    json_out: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
    figures: Path | None = Path("runs/simulate"),
) -> None:
    """Print a table and write a result file and figures.

    Args:
        config: TOML file with the question.
        preset: A ready question instead: llama3, ntp-paper, gb200 or lab.
        strategies: Chains to compare, with a space between them and commas inside, such as drop spare,ntp+boost.
        seeds: Draws of failures to average over.
        days: Length.
        rule: Batch rule: constant, capped or flexible.
        json_out: Where the result file goes; none: beside the figures.
        figures: Folder of the figures; None for no figures.
    """
    asked = changed(
        read_question(config, preset),
        strategies=strategies,
        seeds=seeds,
        days=days,
        rule=BatchRule(rule) if rule else None,
    )
    print(question(asked), end="\n\n")
    times = job_times(asked)
    results = run_all(asked, times=times)
    print(results_table(results), end="\n\n")
    for words in fallen_through(asked, times):
        print(words)
    print(explanation(results))
    out = json_out or (figures / f"{asked.name}.json" if figures else None)
    if out is None:
        return
    rows = [result.to_json() for result in results]
    names = {category.value: name for category, name in GOODPUT_NAMES.items()}
    data = {"name": asked.name, "origin": origin(), "config": asked.model_dump(mode="json"), "results": rows}
    write_json(out, {**data, "ml_goodput_measurement_names": names})
    written = [out]
    if figures is not None:
        from runflat.report.figures import simulation_figures  # matplotlib loads slowly: the table comes first

        written += simulation_figures(out, figures)
    print("\nwritten: " + ", ".join(str(path) for path in written))


def main(argv: Sequence[str]) -> int:
    """Exit status of `runflat simulate` with these arguments."""
    tyro.cli(simulate_command, args=list(argv), prog="runflat simulate", description=DESCRIPTION)
    return 0
