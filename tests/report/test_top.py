"""`runflat top` in a real terminal (tmux): sizes, keys, no colours, the end of the run, a controller that is gone."""

import json
import os
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runflat import cli
from runflat.elastic.requests import Inbox
from runflat.report.run_files import read_run
from runflat.report.terminal import Keys, press, screen

ROOT = Path(__file__).parents[2]
MakeRun = Callable[..., Path]
PATIENCE_S = 20.0


@pytest.fixture
def running(make_run: MakeRun, tmp_path: Path) -> Path:
    """A run that this very process seems to control."""
    return make_run(tmp_path / "job", finished=False)


@pytest.mark.needs_tmux
def test_it_fits_and_follows_the_terminal(terminal: Any, running: Path) -> None:
    """Catches lines that wrap at 80x24, and a view that does not follow a resized window."""
    terminal.start(running)
    shown = terminal.shows("q quit")
    assert "\x1b[32m" in terminal.shows("q quit", colors=True)
    lines = shown.rstrip("\n").splitlines()
    assert len(lines) <= 24
    assert lines[0].startswith("job  running  step 10/10")
    assert "replica 1    TP 2/2" in shown
    assert "1:1: killed by signal 9" in shown
    terminal.tmux("resize-window", "-t", "t", "-x", "50", "-y", "12")
    end = time.monotonic() + PATIENCE_S
    while True:
        lines = terminal.tmux("capture-pane", "-p", "-t", "t").rstrip("\n").splitlines()
        if lines and "q quit" in lines[-1] and len(lines) <= 12:
            break
        assert time.monotonic() < end, lines
        terminal.pause.wait(0.1)
    assert lines[0].startswith("job  running")
    assert max(map(len, lines)) <= 50


@pytest.mark.needs_tmux
def test_a_device_is_drained_after_a_yes(terminal: Any, running: Path) -> None:
    """Catches a key that drains without being confirmed, or a wish that reaches nobody."""
    inbox = Inbox(running)
    terminal.start(running)
    terminal.shows("q quit")
    terminal.press("d", "1:0", "Enter")
    terminal.shows("really drain 1:0?")
    assert inbox.take() == []
    terminal.press("n")
    terminal.shows("q quit")
    assert inbox.take() == []
    terminal.press("d", "1:0", "Enter", "y")
    end = time.monotonic() + PATIENCE_S
    while not (taken := inbox.take()):
        assert time.monotonic() < end
    ((number, wish),) = taken
    assert (wish.action, wish.device) == ("drain", "1:0")
    inbox.reply(number, ok=True, text="1:0 leaves")
    terminal.shows("1:0 leaves")


@pytest.mark.needs_tmux
def test_the_end_of_the_run_ends_the_view(terminal: Any, running: Path) -> None:
    """Catches a view that watches a finished job for ever, without colours too."""
    terminal.start(running, settings="NO_COLOR=1")
    shown = terminal.shows("q quit", colors=True)
    assert "\x1b[31m" not in shown
    assert "\x1b[32m" not in shown
    devices = json.loads((running / "devices.json").read_text())
    (running / "devices.json").write_text(json.dumps({**devices, "finished": True}))
    assert "finished" in terminal.shows("code 0")


@pytest.mark.needs_tmux
def test_a_controller_that_is_gone_is_told(terminal: Any, running: Path) -> None:
    """Catches a view that shows an old state as if the job still ran."""
    terminal.start(running)
    terminal.shows("q quit")
    gone = subprocess.Popen(["true"])
    gone.wait()
    devices = json.loads((running / "devices.json").read_text())
    (running / "devices.json").write_text(json.dumps({**devices, "controller_pid": gone.pid}))
    assert "runflat train --resume" in terminal.shows("code 1")


def test_a_terminal_that_hangs_up_ends_the_view(running: Path, tmp_path: Path) -> None:
    """Catches a view that goes on without a terminal, at full speed, or a traceback that nobody can read."""
    ours, its = os.openpty()
    termios.tcsetwinsize(its, (24, 80))
    command = [sys.executable, "-m", "runflat.cli", "top", str(running)]
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    with (
        (tmp_path / "err").open("w") as err,
        subprocess.Popen(command, stdin=its, stdout=its, stderr=err, env=settings, start_new_session=True) as process,
    ):
        os.close(its)
        shown = b""
        try:
            while b"q quit" not in shown:
                shown += os.read(ours, 4096)
        finally:
            os.close(ours)
        assert process.wait(PATIENCE_S) == 1
    assert (tmp_path / "err").read_text() == ""


def test_without_a_terminal_it_prints_once(running: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a command that needs a terminal in a script or a log."""
    assert cli.run(["top", str(running)]) == 0
    assert "replica 0" in capsys.readouterr().out


def test_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an empty screen for a folder that holds no run."""
    assert cli.run(["top", str(tmp_path)]) == 2
    assert "is no run of this version" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("typed", "wish"),
    [
        ("d1:0\ry", ("drain", "1:0")),
        ("r1:x\x7f1\ry", ("return", "1:1")),
        ("d1:0\rn", None),
        ("d1:0\x1b", None),
        ("d\ry", None),
        ("x", None),
    ],
)
def test_keys(typed: str, wish: tuple[str, str] | None) -> None:
    """Catches a wish that comes without its yes, or not at all."""
    keys, found = Keys(), None
    for key in typed:
        keys, said, _ = press(keys, key)
        found = said or found
    assert found == wish
    assert keys == Keys()
    assert press(Keys(), "q")[2]


def with_power(run: Path, devices: dict[str, list[float | None]]) -> None:
    """Put the power of devices into the newest step."""
    rows = (run / "steps.jsonl").read_text().splitlines()
    last = json.loads(rows[-1]) | {"power": {"limit_w": 1.0, "draw_w": None, "devices": devices}}
    (run / "steps.jsonl").write_text("\n".join([*rows[:-1], json.dumps(last)]) + "\n")


def test_power_of_each_device_stands_beside_it(running: Path) -> None:
    """Catches power that is not shown, or that of another device."""
    with_power(running, {"0:0": [1000.0, 950.0], "0:1": [1000.0, None], "1:0": [1333.4, 1290.0]})
    shown = screen(read_run(running), "running", "keys", 80, 24).plain
    assert "■ ■   W: 1000/950 1000/?\n" in shown
    assert "■ ■   W: 1333/1290 -\n" in shown


def test_power_of_many_devices_is_added_up(running: Path) -> None:
    """Catches power that is pushed past the edge of the screen instead."""
    with_power(running, {f"1:{slot}": [1000.0 + slot, 900.0] for slot in range(12)})
    devices = json.loads((running / "devices.json").read_text())
    rows = [{"device": f"1:{slot}", "state": "active"} for slot in range(12)]
    (running / "devices.json").write_text(json.dumps({**devices, "devices": rows}))
    shown = screen(read_run(running), "running", "keys", 90, 24).plain
    assert "limits 1000 to 1011 W, 10800 W drawn\n" in shown
    assert "W" not in screen(read_run(running), "running", "keys", 60, 24).plain


def test_thousands_of_devices_fit(running: Path) -> None:
    """Catches a screen of 4,096 devices that is longer than the terminal, or hides the hurt replica."""
    rows = [
        {"device": f"{replica}:{slot}", "state": "lost" if (replica, slot) == (31, 7) else "active"}
        for replica in range(64)
        for slot in range(64)
    ]
    devices = json.loads((running / "devices.json").read_text())
    (running / "devices.json").write_text(json.dumps({**devices, "devices": rows}))
    shown = screen(read_run(running), "running", "keys", 80, 24).plain.splitlines()
    assert len(shown) <= 24
    assert max(map(len, shown)) <= 80
    assert any(line.startswith("replica 31") for line in shown)
    assert any("63 of them whole" in line for line in shown)
