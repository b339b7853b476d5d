"""`runflat export`: a run's weights as a model directory that transformers loads."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

DESCRIPTION = """Write a run's newest checkpoint as a model directory: configuration, whole tensors, tokenizer.

transformers' AutoModelForCausalLM.from_pretrained loads it, and so does whatever builds on that; runflat train --from
starts from it.

Example: runflat export runs/first --to models/first
"""


@dataclass(frozen=True)
class ExportArgs:
    """What to export, and where to."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    to: Path
    """Directory to write; there must be none of this name."""
    step: int | None = None
    """Export the checkpoint of this step instead of the newest."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Type of the exported weights."""
    json: bool = False
    """Print one JSON object instead of text."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = tyro.cli(
        ExportArgs, args=argv, prog="runflat export", description=DESCRIPTION, config=(tyro.conf.FlagCreatePairsOff,)
    )
    from runflat.train.checkpoint import checkpoint_of_step, newest_checkpoint
    from runflat.train.export import export

    def warn(text: str) -> None:
        print(f"runflat export: warning: {text}", file=sys.stderr)

    def wrote(name: str, num_bytes: int) -> None:
        if not args.json:
            print(f"wrote {name}, {num_bytes / 1e6:.1f} MB", flush=True)

    checkpoint = newest_checkpoint(args.run, warn) if args.step is None else checkpoint_of_step(args.run, args.step)
    files = export(checkpoint, args.run, args.to, args.dtype, wrote)
    tokenizer = (args.to / "tokenizer.json").is_file()
    if args.json:
        facts = {"directory": str(args.to), "step": checkpoint.progress.step, "tokenizer": tokenizer}
        print(json.dumps(facts | {"files": [path.name for path in files], "dtype": args.dtype}))
    else:
        print(
            f"{args.to}: {checkpoint.spec.name} after step {checkpoint.progress.step}, {args.dtype}, "
            + ("with its tokenizer" if tokenizer else "without a tokenizer: each byte is a token, 256 ends a document")
        )
    return 0
