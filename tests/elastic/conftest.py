"""Real runs: `runflat train` in this process, its workers as processes of their own, and somebody who watches."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runflat.check.live import Watch
from runflat.errors import RunflatError

SMALL = (
    "--model.preset tiny --model.hidden-size 96 --model.num-heads 12 --model.num-kv-heads 12 --model.head-dim 8 "
    "--model.vocab-size 264 --data.seq-len 32"
)
"""A model whose heads, FFN blocks and vocabulary blocks divide by 12, and each head has a KV head of its own."""


@dataclass(frozen=True)
class Ran:
    """A run that has ended: exit code, what was printed, the error's text (if it was one), and its files."""

    code: int
    error: str | None
    watch: Watch

    @property
    def summary(self) -> dict[str, Any]:
        """Its summary.json."""
        return self.watch.summary()


Alongside = Callable[[Watch], None]


class Live:
    """Starts runs in a folder of the test. Workers are forked from one server, so that only the first start is slow."""

    def __init__(self, folder: Path, text: Path):
        self.folder = folder
        self.text = text

    def flags(self, arguments: str) -> list[str]:
        """Flags of a run of the small model."""
        own = arguments.split()
        return own if "--resume" in own else [*SMALL.split(), "--data.paths", str(self.text), *own]

    def train(
        self,
        name: str,
        arguments: str,
        events: Sequence[dict[str, Any]] = (),
        alongside: Alongside | None = None,
        loop: str | None = None,
    ) -> Ran:
        """Runs to the end, with runflat's loop or "file.py:function".

        `alongside(watch)` acts meanwhile, in a thread of its own, and its error is the test's.
        """
        from runflat.commands.train import parse
        from runflat.commands.training import train

        run = self.folder / name
        argv = self.flags(arguments)
        if "--resume" not in argv:
            argv += ["--run", str(run)]
        if events:
            file = self.folder / f"{name}.events.json"
            file.write_text(json.dumps(list(events)))
            argv += ["--inject", str(file)]
        watch = Watch(run)
        problems: list[BaseException] = []
        helper = threading.Thread(target=_act, args=(alongside, watch, problems), daemon=True)
        helper.start()
        error = None
        try:
            code = train(parse(argv), loop)[0]
        except RunflatError as problem:
            code, error = problem.exit_code, str(problem)
        helper.join(60)
        if problems:
            raise problems[0]
        assert not helper.is_alive(), "what acts alongside has not ended with the run"
        return Ran(code, error, watch)


def _act(alongside: Alongside | None, watch: Watch, problems: list[BaseException]) -> None:
    if alongside is None:
        return
    try:
        alongside(watch)
    except BaseException as problem:  # whatever it is, it is the test's
        problems.append(problem)
        os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="session")
def live_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with some text to learn."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("".join(f"{n} + {n} = {2 * n}\n" for n in range(3000)), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def live_class() -> type[Live]:
    """Returns the class of starters, for runs that several tests share."""
    return Live


@pytest.fixture
def live(tmp_path: Path, live_text: Path) -> Live:
    """Returns a starter of runs."""
    return Live(tmp_path, live_text)
