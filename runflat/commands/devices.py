"""`runflat devices`: who trains, who waits, who is lost, and why."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from runflat.elastic.requests import is_running, read_devices

DESCRIPTION = """List the devices of a run, running or not: state, place, what each is at, failures.

States: starting, standby (tested, waits to join), active, draining, lost, parked (healthy, no work), out (failed too
often: until `runflat device RUN ID return`).

Example: runflat devices runs/demo/hurt
"""


@dataclass(frozen=True)
class DevicesArgs:
    """Which run."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    json: bool = False
    """Print one JSON object instead of a table."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    config = (tyro.conf.FlagCreatePairsOff,)
    args = tyro.cli(DevicesArgs, args=argv, prog="runflat devices", description=DESCRIPTION, config=config)
    found = read_devices(args.run)
    running = is_running(found)
    if args.json:
        json.dump(found | {"running": running}, sys.stdout, indent=2)
        print()
    else:
        print(describe(found, running))
    return 0


def describe(found: Mapping[str, Any], running: bool) -> str:
    """The table for people."""
    ended = "finished" if found["finished"] else "not running"
    head = f"step {found['step']}, generation {found['generation']}, {'running' if running else ended}"
    rows = [("device", "state", "place", "at", "failures", "")]
    for device in found["devices"]:
        place = "" if device["replica"] is None else f"{device['replica']}:{device['slot']}"
        waits = f", waits for {device['waits_for']}" if device["waits_for"] else ""
        present = device["state"] in ("starting", "standby", "active", "draining")
        at = f"{device['phase']}{waits}" if present and running else ""
        note = device["cause"] if not present else ""
        if device["restart_in_s"] is not None and running:
            note += f"; starts again in {device['restart_in_s']:.0f} s"
        rows.append((device["device"], device["state"], place, at, str(device["failures"] or ""), note))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join([head, *lines])
