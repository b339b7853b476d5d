"""`runflat top`: a running job in a terminal, also over ssh."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console, ConsoleDimensions
from rich.live import Live

from runflat.elastic.requests import ask, is_running, read_devices
from runflat.errors import ConfigError, RunflatError
from runflat.report.run_files import RunData, RunFiles
from runflat.report.terminal import Keys, Wish, press, screen

DESCRIPTION = """Watch a running job in a terminal: progress, tokens/s, goodput so far, devices and degrees, what is
waited for, the last incidents.

Keys: d drains and r returns a device, after a confirmation; q ends the view, not the job. Where the output is no
terminal, the present state is printed once.

Example: runflat top runs/demo/hurt
"""
TICK_S = 0.25


@dataclass(frozen=True)
class TopArgs:
    """Which run."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code: 1 if the job's controller is gone although the job has not ended."""
    args = tyro.cli(TopArgs, args=argv, prog="runflat top", description=DESCRIPTION)
    read_devices(args.run)
    try:
        return _show(args)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        # The terminal has hung up: there is nobody left to tell, and Python must not try to at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _show(args: TopArgs) -> int:
    files = RunFiles(args.run)
    data = files.poll()
    assert data is not None
    console = Console(highlight=False)
    state = state_of(data)
    if console.is_terminal and state == "running":
        data, state = watch(args.run, files, data, console)
    console.print(screen(data, state, "", console.width, 200))
    if state == "gone":
        console.print(f"the controller is gone; go on with: runflat train --resume {args.run}", markup=False)
    return int(state == "gone")


def state_of(data: RunData) -> str:
    """`running`, `finished`, or `gone`: the controller ended without a word."""
    if data.devices.get("finished"):
        return "finished"
    return "running" if is_running(data.devices) else "gone"


def watch(run: Path, files: RunFiles, data: RunData, console: Console) -> tuple[RunData, str]:
    """Show the job until it ends or `q` is pressed; returns the last state."""
    keys, answer = Keys(), ""
    with _single_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            state = state_of(data)
            last = keys.prompt if keys.mode != "watch" else f"{keys.prompt}   {answer}"
            # Asked anew each time, and of the terminal: rich would believe COLUMNS and LINES, which do not follow it.
            width, height = os.get_terminal_size(sys.stdout.fileno())
            console.size = ConsoleDimensions(width, height)
            live.update(screen(data, state, last, width, height), refresh=True)
            if state != "running":
                return data, state
            for key in _pressed():
                keys, wish, leaves = press(keys, key)
                if leaves:
                    return data, state
                if wish is not None:
                    answer = _ask(run, *wish)
            data = files.poll() or data


def _ask(run: Path, action: Wish, device: str) -> str:
    """What the controller says to a wish."""
    try:
        return ask(run, action, device, time.sleep)[1]
    except RunflatError as error:
        return str(error)


def _pressed() -> Iterator[str]:
    """The keys pressed within a tick; a sequence such as that of an arrow key is passed over.

    Raises:
        OSError: the terminal has hung up.
    """
    if not select.select([sys.stdin], [], [], TICK_S)[0]:
        return
    typed = os.read(sys.stdin.fileno(), 64)
    if not typed:
        raise OSError(errno.EIO, "no more input")
    text = typed.decode(errors="ignore")
    yield from ([text] if text == "\x1b" else [] if text.startswith("\x1b") else text)


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Keys come one by one, unechoed, while this lasts.

    Raises:
        ConfigError: the input is no terminal.
    """
    if not sys.stdin.isatty():
        raise ConfigError("runflat top needs a terminal as its input. Print the state once with: runflat top RUN | cat")
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        with contextlib.suppress(termios.error):  # it has hung up
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
