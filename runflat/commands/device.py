"""`runflat device`: ask one device of a running job to drain, to be killed, or to return."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from runflat.elastic.requests import ask

DESCRIPTION = """Ask something of one device of a running job.

drain: it finishes the step and leaves. kill: its process is killed. return: a device that drained, was killed or stays
out starts again and joins at a step boundary, when it has been tested and fed.

Example: runflat device runs/demo/hurt 1:3 drain
"""


@dataclass(frozen=True)
class DeviceArgs:
    """Which device, and what of it."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    device: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DEVICE")]
    """Device, such as 1:3."""
    action: Annotated[Literal["drain", "kill", "return"], tyro.conf.Positional, tyro.conf.arg(metavar="ACTION")]
    """drain, kill or return."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code: 1 if the controller refuses."""
    args = tyro.cli(DeviceArgs, args=argv, prog="runflat device", description=DESCRIPTION)
    ok, text = ask(args.run, args.action, args.device, time.sleep)
    print(text if ok else f"runflat device: {text}.", file=sys.stdout if ok else sys.stderr)
    return 0 if ok else 1
