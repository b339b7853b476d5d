"""`runflat advise`: which chain, how many spares, how much headroom, and what each is worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from runflat.commands.origin import origin
from runflat.commands.simulate import changed, read_question, write_json
from runflat.sim.advise import advice_text, advise
from runflat.sim.config import checked
from runflat.sim.tables import question

DESCRIPTION = """Which chain, how many spares and how much power headroom, in words and numbers.

Example: runflat advise --preset lab --price 2.5
"""


def advise_command(
    config: Annotated[Path | None, tyro.conf.Positional] = None,
    preset: str | None = None,
    price: float | None = None,
    seeds: int | None = None,
    days: float | None = None,
    json_out: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> None:
    """Print the advice.

    Args:
        config: TOML file with the question.
        preset: A ready question instead: llama3, ntp-paper, gb200 or lab.
        price: Price of a device for an hour, in any currency.
        seeds: Draws of failures to average over.
        days: Length of a draw.
        json_out: Where the result file goes.
    """
    asked = changed(read_question(config, preset), seeds=seeds, days=days)
    if price is not None:
        cluster = asked.cluster.model_copy(update={"price_per_device_h": price})
        asked = checked(asked.model_copy(update={"cluster": cluster}), source="--price")
    print(question(asked), end="\n\n")
    advice = advise(asked)
    print(advice_text(asked, advice))
    if json_out is not None:
        head = {"name": asked.name, "origin": origin(), "config": asked.model_dump(mode="json")}
        write_json(json_out, {**head, **advice.to_json()})
        print(f"\nwritten: {json_out}")


def main(argv: Sequence[str]) -> int:
    """Exit status of `runflat advise` with these arguments."""
    tyro.cli(advise_command, args=list(argv), prog="runflat advise", description=DESCRIPTION)
    return 0
