"""What the demo tells of a loss that power hides."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runflat.commands import demo_power
from runflat.commands.demo_power import BACK, END, STEP, show_power, story
from runflat.errors import RunError


def row(step: int, limit_w: float, own_s: float) -> dict[str, Any]:
    """A record of a step in which replica 1 took `own_s`, replica 0 0.4 s."""
    times = [{"replica": 0, "own_s": 0.4}, {"replica": 1, "own_s": own_s}]
    limits = {"0": {"limit_w": 1000.0, "draw_w": None}, "1": {"limit_w": limit_w, "draw_w": None}}
    return {"step": step, "replicas": times, "power": {"replicas": limits}}


HEALTHY = [row(step, 1000.0, 0.4) for step in range(STEP + 1)]
RAISED = [
    row(STEP + 1, 1000.0, 0.4 * 4 / 3),
    *(row(STEP + 2 + n, 1050.0 + 50 * n, 0.4 * 4 / 3 / (1.05 + 0.05 * n)) for n in range(6)),
    row(STEP + 8, 1333.0, 0.4),
    row(STEP + 9, 1333.0, 0.4),
]
LEFT = [row(BACK + 1, 1000.0, 0.4 * 4 / 3), row(BACK + 2, 1000.0, 0.4)]


def test_each_turn_has_one_line_that_stays() -> None:
    """Catches a line that is missing, comes twice, or changes once it was printed."""
    rows = HEALTHY + RAISED + LEFT
    lines = story(rows)
    assert [line.split("   ")[-1] for line in lines if "more power:" not in line] == [
        "all devices are there: both replicas take the same time",
        "1:1 is lost: three devices do the work of four, 1.33x as long",
        "both take the same time again, with 1.33x power for replica 1",
        END,
    ]
    assert [line.split()[1] for line in lines if "more power:" in line] == [
        "1050",
        "1100",
        "1150",
        "1200",
        "1250",
        "1300",
    ]
    for num in range(len(rows)):
        assert lines[: len(story(rows[:num]))] == story(rows[:num])


def test_limits_that_fall_before_the_device_is_back_are_no_return() -> None:
    """Catches a demo that ends one step early: at nominal, but still without the device."""
    assert END not in story(HEALTHY + RAISED + LEFT[:1])[-1]


def test_a_step_whose_report_was_lost_is_passed_over() -> None:
    """Catches a crash over the record of a step that a dead device would have reported."""
    hurt = row(STEP, 1000.0, 0.4)
    del hurt["replicas"][1]["own_s"]
    assert story([*HEALTHY[:-1], hurt, *RAISED]) == story(HEALTHY[:-1] + RAISED)


class Deaf:
    """Stands in for the command: its run is there, and Ctrl-C does not end it."""

    def __init__(self, arguments: list[str], log: Path):
        self.process = SimpleNamespace(pid=-1, poll=lambda: None)
        run = log.parent / "power"
        run.mkdir()
        (run / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in HEALTHY + RAISED + LEFT))

    def __enter__(self) -> Deaf:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def finish(self, timeout_s: float) -> int:
        raise subprocess.TimeoutExpired("runflat", timeout_s)


def test_a_run_that_does_not_end_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback where the demo's last run does not follow Ctrl-C."""
    monkeypatch.setattr(demo_power, "Command", Deaf)
    monkeypatch.setattr(demo_power.os, "kill", lambda pid, signal: None)
    with pytest.raises(RunError, match=r"did not end .* its output is in"):
        show_power(tmp_path, lambda line: None)
