"""`runflat demo`: lose a device in the middle of a step, train on, take it back - and prove that nothing changed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from runflat.commands.demo_power import show_power, train_arguments
from runflat.commands.report import ReportArgs, write_report
from runflat.errors import ConfigError, RunError

DESCRIPTION = """Show live recovery on this machine, and compare with runs that lost nothing.

Two replicas of TP 4 train a 2.8 M parameter Llama on the source code of this Python's standard library. A worker is
killed in the middle of the 9th step and told to return after 14. Then two runs without a failure, of different layout,
do 20 steps, and a small model repeats the same failure in float64. Last, on emulated devices, the survivors of a loss
get more power, until their replica takes no longer than the other one.

Example: runflat demo --run runs/demo
"""
COMPARED_STEP = 20
EXACT_TOLERANCE = 1e-11
NOISE_FACTOR = 10.0
FAILURE = [
    {"event": "kill", "device": "1:2", "step": 8, "phase": "backward"},
    {"event": "return", "device": "1:2", "step": 14},
]
EXACT_FAILURE = [
    {"event": "kill", "device": "1:2", "step": 4, "phase": "backward"},
    {"event": "return", "device": "1:2", "step": 8},
]
LAYOUT = {"layout.tp": 4, "layout.replicas": 2}
OTHER_LAYOUT = {"layout.tp": 3, "layout.replicas": 1}
MAIN = {
    "model.preset": "demo",
    "data.seq_len": 128,
    "train.steps": 60,
    "train.global_batch": 28,
    "train.micro_batch": 16,
    "train.lr": 3e-3,
    "train.warmup_steps": 10,
}
TO_COMPARED = {"train.stop_after": COMPARED_STEP}
EXACT = {
    "model.preset": "tiny",
    "data.seq_len": 64,
    "train.steps": 12,
    "train.global_batch": 14,
    "train.dtype": "float64",
    "train.lift_casts": True,
}


@dataclass(frozen=True)
class DemoArgs:
    """Where to write."""

    run: Path = Path("runs/demo")
    """Folder for the runs of the demo; an older demo in it is replaced."""


def main(argv: list[str]) -> int:
    """Run the command; returns 0 if everything agreed, else 1."""
    args = tyro.cli(DemoArgs, args=argv, prog="runflat demo", description=DESCRIPTION)
    console = Console(soft_wrap=True, highlight=False)
    folder = _fresh(args.run)
    started = time.monotonic()
    console.print("[bold]1. Train, lose worker 1:2 in the middle of the 9th step, take it back after the 14th[/bold]")
    _train(folder, "hurt", MAIN | LAYOUT | {"train.checkpoint_every": COMPARED_STEP}, FAILURE)
    console.print("\n[bold]2. The same training twice without a failure, 20 steps[/bold]")
    _train(folder, "whole", MAIN | LAYOUT | TO_COMPARED, quiet=console)
    _train(folder, "other-layout", MAIN | OTHER_LAYOUT | TO_COMPARED, quiet=console)
    console.print("\n[bold]3. The same failure on a small model in float64, and without it[/bold]")
    _train(folder, "exact-hurt", EXACT | LAYOUT, EXACT_FAILURE, quiet=console)
    _train(folder, "exact-whole", EXACT | LAYOUT, quiet=console)
    code = _conclude(folder, console)
    console.print("\n[bold]4. More power for the survivors, on emulated devices (durations are declared)[/bold]")
    show_power(folder, lambda line: console.print(line, markup=False))
    shown = (folder / "hurt", folder / "power")
    report = ReportArgs(shown, folder / "report.html", whole=folder / "whole", title="runflat demo")
    console.print(write_report(report), markup=False)
    console.print(f"everything is in {folder}; the demo took {time.monotonic() - started:.0f} s")
    return code


def _fresh(folder: Path) -> Path:
    """An empty folder; only one that a demo has written is emptied."""
    mark = folder / "demo.json"
    if folder.exists() and any(folder.iterdir()):
        if not mark.exists():
            raise ConfigError(f"{folder} is not empty and no demo wrote it: give another folder with --run.")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    mark.write_text(json.dumps({"failure": FAILURE, "exact_failure": EXACT_FAILURE}, indent=2) + "\n")
    return folder


def _train(
    folder: Path,
    name: str,
    settings: Mapping[str, Any],
    failures: list[dict[str, Any]] | None = None,
    quiet: Console | None = None,
) -> None:
    """One run of `runflat train` in a process of its own, its output on the screen unless `quiet` says otherwise."""
    command = [sys.executable, "-m", "runflat.cli", *train_arguments(folder, name, settings, failures)]
    if quiet is None:
        code = subprocess.run(command, check=False).returncode
    else:
        quiet.print(f"   {name} ...", end="")
        started = time.monotonic()
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        code = done.returncode
        (folder / f"{name}.log").write_text(done.stdout + done.stderr)
        quiet.print(f" {time.monotonic() - started:.0f} s")
    if code:
        raise RunError(f"the run {name} ended with code {code}; its output is in {folder / name} or above.")


def _conclude(folder: Path, console: Console) -> int:
    """Print the comparisons; returns the exit code."""
    hurt, whole = _checkpoint(folder, "hurt"), _checkpoint(folder, "whole")
    difference = _distance(hurt, whole)
    floor = _distance(whole, _checkpoint(folder, "other-layout"))
    exact_hurt, exact_whole = _newest(folder, "exact-hurt"), _newest(folder, "exact-whole")
    exact = _distance(exact_hurt, exact_whole)
    same = _samples(hurt) == _samples(whole) and _samples(exact_hurt) == _samples(exact_whole)
    rows = [
        (
            f"weights at step {COMPARED_STEP}: with the failure against without (float32)",
            f"{difference:.1e}",
            difference <= NOISE_FACTOR * floor,
        ),
        ("noise floor: two runs without a failure, TP 4 x 2 against TP 3 x 1", f"{floor:.1e}", True),
        ("the same samples in every step", "yes" if same else "NO", same),
        ("float64, 12 steps: with the failure against without", f"{exact:.1e}", exact <= EXACT_TOLERANCE),
    ]
    table = Table(title="what the failure changed (norm of the difference over norm)", title_justify="left")
    table.add_column("comparison")
    table.add_column("result", justify="right")
    table.add_column("")
    for text, value, passed in rows:
        table.add_row(text, value, "[green]ok[/green]" if passed else "[red]FAILED[/red]")
    console.print(table)
    return 0 if all(passed for _, _, passed in rows) else 1


def _checkpoint(folder: Path, name: str) -> Path:
    return folder / name / "checkpoints" / f"step-{COMPARED_STEP:08d}"


def _newest(folder: Path, name: str) -> Path:
    return max((folder / name / "checkpoints").glob("step-*"))


def _distance(first: Path, second: Path) -> float:
    """Norm of the difference of all weights over their norm."""
    from runflat.check.diff import compare, find_checkpoint

    def warn(text: str) -> None:
        raise RunError(text)

    return compare(find_checkpoint(first, None, warn), find_checkpoint(second, None, warn)).whole("weight")


def _samples(folder: Path) -> str:
    from runflat.train.checkpoint import open_checkpoint

    return open_checkpoint(folder).progress.sample_hash
