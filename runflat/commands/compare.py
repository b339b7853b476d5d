"""`runflat compare`: the same training under the same failures, once per chain of strategies, side by side."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from runflat.commands.config_files import config_error
from runflat.config import TrainConfig
from runflat.errors import ConfigError, RunError

if TYPE_CHECKING:
    from runflat.check.compare import StrategyResult

DESCRIPTION = """Run the same training under the same failures once per strategy, and print what each is worth.

A space stands between candidates, a comma inside a chain, as in --on-failure of `runflat train`, all of whose flags
(and its CONFIG.toml, which comes first) are taken too. --inject names the failures; --run is the folder in which each
candidate gets a run of its own, and compare.json names them. --spares N counts for candidates whose chain has spare.

Example: runflat compare examples/compare.toml --inject examples/two_failures.json --strategies ntp drop
"""
SPARE = "spare"


@dataclass(frozen=True)
class CompareArgs:
    """What `runflat compare` has beside the flags of `runflat train`."""

    strategies: tuple[str, ...] = ("ntp", "drop")
    """Candidates with a space between them, each a chain with commas inside."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the result as JSON on the standard output; the runs print on the standard error output."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code: 1 if a candidate did not reach its last step."""
    from runflat.check.compare import table

    args, configs = read_candidates(argv)
    folder = configs[0][1].run
    assert folder is not None
    folder = folder.parent
    output = sys.stderr if args.json else sys.stdout
    results: list[StrategyResult] = []
    with contextlib.redirect_stdout(output):
        for chain, config in configs:
            print(f"\n--- {chain} ({len(results) + 1} of {len(configs)}) ---", flush=True)
            results.append(_run(chain, config))
    inject = configs[0][1].inject
    found = {"inject": str(inject), "runs": [result.to_json() for result in results]}
    (folder / "compare.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print(f"\n{table(results)}\n\nwritten: {folder / 'compare.json'}")
    return int(any(result.words for result in results))


def read_candidates(argv: Sequence[str]) -> tuple[CompareArgs, list[tuple[str, TrainConfig]]]:
    """The arguments, and for each candidate its chain and the configuration of its run, all checked before any runs.

    Raises:
        ConfigError: a chain that cannot be carried out, a candidate named twice, no failures, or any flag of train.
    """
    from runflat.commands.train import parse

    if "--help" in argv or "-h" in argv:
        tyro.cli(CompareArgs, args=["--help"], prog="runflat compare", description=DESCRIPTION)
    args, rest = tyro.cli(
        CompareArgs, args=list(argv), prog="runflat compare", description=DESCRIPTION, return_unknown_args=True
    )
    # The other flags are checked under a candidate that uses spares, if there is one.
    probe = next((chain for chain in args.strategies if SPARE in chain.split(",")), "ntp,drop")
    config = parse([*rest, "--on-failure", probe])
    if config.inject is None:
        raise ConfigError("--inject is missing: name the file of failures under which the strategies are compared.")
    if config.resume is not None:
        raise ConfigError("--resume is given, but a comparison starts from the first step: leave it out.")
    if len(set(args.strategies)) < len(args.strategies) or not args.strategies:
        raise ConfigError(f"--strategies is {' '.join(args.strategies)!r}: name each candidate once, at least one.")
    folder = config.run or Path("runs") / time.strftime("compare-%Y%m%d-%H%M%S")
    if (folder / "compare.json").exists():
        raise ConfigError(f"{folder} holds a comparison already: give another folder with --run.")
    return args, [(chain, _with(config, chain, folder / chain.replace(",", "+"))) for chain in args.strategies]


def _with(config: TrainConfig, chain: str, run: Path) -> TrainConfig:
    """The configuration under another chain, checked anew."""
    from pydantic import ValidationError

    spares = config.spares if SPARE in chain.split(",") else 0
    try:
        return TrainConfig.model_validate(config.model_dump() | {"on_failure": chain, "spares": spares, "run": run})
    except ValidationError as error:
        raise config_error(error, TrainConfig, source=f"The candidate {chain}") from error


def _run(chain: str, config: TrainConfig) -> StrategyResult:
    """Train under one chain; a job that cannot go on is a result too."""
    from runflat.check.compare import result_of
    from runflat.commands.training import train

    assert config.run is not None
    words = None
    try:
        train(config)
    except RunError as error:
        words = str(error)
        print(words)
    return result_of(chain, config.run, words, config.data.seq_len)
