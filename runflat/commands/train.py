"""`runflat train`: prepare the data and the plan, start the workers, keep the books, say where everything is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tyro

from runflat.commands import on_ray
from runflat.commands.config_files import flag_rules, load_config
from runflat.commands.training import train
from runflat.commands.watching import FLAGS, split
from runflat.config import TrainConfig
from runflat.errors import CheckpointError

DESCRIPTION = """Train a causal language model with replicas of different tensor-parallel degree.

runflat train [CONFIG.toml] [flags]; a flag wins over the file. With nothing given, a tiny Llama learns the source code
of this Python's standard library.

WATCHING

LAUNCHER
Example: runflat train examples/demo.toml --run runs/job --layout.dead 0:1
""".replace("WATCHING", FLAGS).replace("LAUNCHER", on_ray.FLAGS + "\n")


def parse(argv: Sequence[str], command: str = "train", description: str = DESCRIPTION) -> TrainConfig:
    """The configuration that `argv` asks for: a file (or the run to resume) first, flags on top.

    `command` and `description` are for its help.

    Raises:
        ConfigError: a file or a value that is not valid.
    """
    rest = list(argv)
    default = load_config(Path(rest.pop(0)) if rest and not rest[0].startswith("-") else None)
    resume = _flag(rest, "--resume")
    if resume is not None and len(rest) == len(argv):
        default = _resumed_config(Path(resume))
    with flag_rules():
        return tyro.cli(TrainConfig, args=rest, default=default, prog=f"runflat {command}", description=description)


def _flag(argv: Sequence[str], name: str) -> str | None:
    for index, text in enumerate(argv):
        if text == name and index + 1 < len(argv):
            return argv[index + 1]
        if text.startswith(f"{name}="):
            return text.partition("=")[2]
    return None


def _resumed_config(run: Path) -> TrainConfig:
    """The configuration of the run that is resumed; dead slots, injected faults and an early end are not taken over."""
    path = run / "config.json"
    try:
        saved = json.loads(path.read_text())
        loop = saved.pop("loop", None)
        saved["layout"]["dead"] = []
        saved["train"]["stop_after"] = 0
        config = TrainConfig.model_validate(saved | {"resume": str(run), "run": None, "inject": None})
    except (OSError, ValueError, LookupError, TypeError) as error:
        # pydantic's ValidationError is a ValueError of many lines.
        reason = f"{error}" if isinstance(error, OSError) else "it is not the configuration of a run"
        raise CheckpointError(
            f"{run} cannot be resumed: {path} is not usable ({reason}). Name a run's folder."
        ) from error
    if loop:
        raise CheckpointError(
            f"{run} was trained by the loop {loop}, whose data runflat does not have. Go on with that program: give "
            f"its launch resume={str(run)!r}."
        )
    return config


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    ray, rest = on_ray.split(argv)
    watching, rest = split(rest)
    if ray is not None:
        return on_ray.train_on_ray(parse(rest), ray, watching)
    return train(parse(rest), watching=watching)[0]
