"""The demo's part on power: a loss that more power hides, told as it happens on emulated devices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runflat.check.live import POLL_S, Command, Watch
from runflat.errors import RunError

LOST, STEP, BACK = "1:1", 3, 14
"""Who is lost, in the middle of which step, and at which step it is told to come back."""
HIT, OTHER = 1, 0
"""Replicas: the one that is hit, and the one beside it."""
FAILURE = [
    {"event": "kill", "device": LOST, "step": STEP, "phase": "backward"},
    {"event": "return", "device": LOST, "step": BACK},
]
SETTINGS: Mapping[str, Any] = {
    "model.preset": "tiny",
    "model.num-layers": 1,
    "model.hidden-size": 96,
    "model.num-heads": 12,
    "model.num-kv-heads": 12,
    "model.head-dim": 8,
    "model.vocab-size": 264,
    "data.seq-len": 32,
    "layout.tp": 4,
    "layout.replicas": 2,
    "train.global-batch": 12,
    "train.memory-every": 0,
    "train.steps": 1_000_000,
    "devices": "emulated",
    "device.rate-tflops": 1.5e-4,
    "device.curve": "exponent:1",
    "device.max-power": 1.4,
    "boost": True,
}
"""A job whose steps are short, and a curve on which power is speed. It goes on until the demo ends it."""
SAME = 1.01
"""Two times are the same up to this ratio."""
DEADLINE_S = 120.0
END = f"{LOST} is back, and the limits are those from before"
HEAD = f"   {'step':>4}  {'limit of replica 1':>18}  {'replica 0':>9}  {'replica 1':>9}"


def story(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each turn that the records `rows` of steps.jsonl show: loss, raises, the same time, return.

    Lines of the first rows stay what they are when more rows come; the last one of all has `END` in it.
    """
    lines: list[str] = []
    told = [row for row in rows if _knows_power(row) and all("own_s" in entry for entry in row["replicas"])]
    first_w = limit_w = _limit_w(told[0]) if told else 0.0
    stage = "start"
    for row in told:
        ratio, before_w, limit_w = _own_s(row, HIT) / _own_s(row, OTHER), limit_w, _limit_w(row)
        text = ""
        if stage == "start":
            stage, text = "whole", "all devices are there: both replicas take the same time"
        elif stage == "whole" and ratio > SAME:
            stage, text = "lost", f"{LOST} is lost: three devices do the work of four, {ratio:.2f}x as long"
        elif stage == "lost" and ratio <= SAME:
            stage, text = "same", f"both take the same time again, with {limit_w / first_w:.2f}x power for replica 1"
        elif stage == "lost" and limit_w > before_w:
            text = f"more power: {ratio:.2f}x as long"
        elif stage == "same" and ratio <= SAME and limit_w <= first_w:
            stage, text = "back", END
        if text:
            times = "  ".join(f"{f'{_own_s(row, replica):.2f} s':>9}" for replica in (OTHER, HIT))
            lines.append(f"   {row['step'] + 1:>4}  {f'{limit_w:.0f} W':>18}  {times}   {text}")
    return lines


def train_arguments(
    folder: Path, name: str, settings: Mapping[str, Any], failures: Sequence[Mapping[str, Any]] | None = None
) -> list[str]:
    """Arguments of runflat for the run `name` of the demo; failures are put into a file beside it."""
    arguments = ["train", "--run", str(folder / name)]
    for key, value in settings.items():
        arguments += [f"--{key}"] if value is True else [f"--{key}", str(value)]
    if failures is not None:
        file = folder / f"{name}.failures.json"
        file.write_text(json.dumps(failures) + "\n")
        arguments += ["--inject", str(file)]
    return arguments


def show_power(folder: Path, say: Callable[[str], None]) -> None:
    """Train, lose a device, raise power, take it back; `say` gets each line when it is true.

    Raises:
        RunError: the run ended before its time or not at all, or the device did not come back in time.
    """
    arguments = train_arguments(folder, "power", SETTINGS, FAILURE)
    say(HEAD)
    watch, pause = Watch(folder / "power"), threading.Event()
    told: list[str] = []
    log = folder / "power.log"
    with Command(arguments, log) as command:
        deadline_s = time.monotonic() + DEADLINE_S
        while not (told and END in told[-1]):
            new = story(watch.steps())[len(told) :]
            for line in new:
                say(line)
            told += new
            if command.process.poll() is not None:
                raise RunError(f"the run with power ended before {LOST} was back; its output is in {log}.")
            if time.monotonic() > deadline_s:
                raise RunError(f"{LOST} was not back after {DEADLINE_S:.0f} s; the output of the run is in {log}.")
            pause.wait(POLL_S)
        os.kill(command.process.pid, signal.SIGINT)
        try:
            command.finish(DEADLINE_S)
        except subprocess.TimeoutExpired as error:
            raise RunError(
                f"the run with power did not end within {DEADLINE_S:.0f} s of Ctrl-C; its output is in {log}."
            ) from error
    spent = watch.summary()["power"]
    say(
        f"   extra energy {spent['extra_j'] / 1e3:.1f} kJ over {spent['boosted_device_s']:.0f} device-seconds "
        f"(emulated devices of {spent['nominal_w']:.0f} W; curve {spent['curve']})"
    )


def _knows_power(row: Mapping[str, Any]) -> bool:
    """Whether limits had been read by then: the first steps may come before the first reading."""
    return str(HIT) in row.get("power", {}).get("replicas", {})


def _own_s(row: Mapping[str, Any], replica: int) -> float:
    """Declared seconds of a replica up to the gradient sync."""
    return float(next(entry["own_s"] for entry in row["replicas"] if entry["replica"] == replica))


def _limit_w(row: Mapping[str, Any]) -> float:
    return float(row["power"]["replicas"][str(HIT)]["limit_w"])
