"""The progress of a run for people: a live line in a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

PLAIN_EVERY_S = 5.0
"""Seconds between progress lines where the output is not a terminal."""


class ProgressView:
    """Shows step, loss, tokens/s, gradient norm and the time that is left."""

    def __init__(self, total_steps: int, first_step: int):
        """`first_step` is where the run starts (0, or the step that it resumes from)."""
        self.console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
        self._total = total_steps
        self._recent: deque[float] = deque(maxlen=10)
        self._last_plain = 0.0
        self._last_wait = 0.0
        self._live: Progress | None = None
        if self.console.is_terminal:
            self._live = Progress(TextColumn("{task.description}"), BarColumn(bar_width=20), console=self.console)
            self._task = self._live.add_task("starting the workers", total=total_steps, completed=first_step)

    def __enter__(self) -> ProgressView:
        """Start the live line."""
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last state on the screen."""
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line above the progress line."""
        self.console.print(text, markup=False)

    def waiting(self, text: str | None) -> None:
        """Show what has been waited for longer than a second; None when that is over."""
        if self._live:
            self._live.update(self._task, description=text or "going on")
        elif text and time.monotonic() - self._last_wait >= PLAIN_EVERY_S:
            self._last_wait = time.monotonic()
            self.say(text)

    def step(self, record: Mapping[str, Any]) -> None:
        """Show a finished step."""
        done = record["step"] + 1
        if record["step_s"] is None or record["loss"] is None:
            return  # whoever would have reported it is gone; the step counts all the same
        self._recent.append(record["step_s"])
        left_s = sum(self._recent) / len(self._recent) * (self._total - done)
        note = "  not finite: skipped" if record["skipped"] else ""
        text = (
            f"step {done}/{self._total}  loss {record['loss']:.4f}  {record['tokens_per_s']:,.0f} tokens/s  "
            f"gradient norm {record['grad_norm']:.2f}  {_duration(left_s)} left{note}"
        )
        if self._live:
            self._live.update(self._task, description=text, completed=done)
        elif done == self._total or time.monotonic() - self._last_plain >= PLAIN_EVERY_S:
            self._last_plain = time.monotonic()
            self.say(text)


class ReadingView:
    """Shows how far text is read, before there is a run to show; nothing of what takes less than a few seconds."""

    def __init__(self) -> None:
        """Nothing is read yet."""
        self._console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
        self._last = time.monotonic()
        self._live: Progress | None = None

    def __enter__(self) -> ReadingView:
        """Begin; the time until the first line counts from here."""
        return self

    def __exit__(self, *_: object) -> None:
        """Take a live line off the screen."""
        if self._live:
            self._live.stop()

    def told(self, work: str, done_bytes: int, all_bytes: int) -> None:
        """Hear that `done_bytes` of `all_bytes` are behind `work`."""
        if not self._live and time.monotonic() - self._last < PLAIN_EVERY_S:
            return
        self._last = time.monotonic()
        text = f"{work}: {done_bytes / 1e9:.2f} of {all_bytes / 1e9:.2f} GB"
        if not self._console.is_terminal:
            self._console.print(text, markup=False)
            return
        if not self._live:
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=20))
            self._live = Progress(*columns, console=self._console, transient=True)
            self._task = self._live.add_task(text)
            self._live.start()
        self._live.update(self._task, description=text, completed=done_bytes, total=all_bytes)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
