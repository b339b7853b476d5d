"""Writes a running job's numbers for TensorBoard, as an event file, by tensorboardX (the extra `tensorboard`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from runflat.errors import ConfigError
from runflat.report.follow import Follower
from runflat.report.run_files import RunData, RunFiles
from runflat.report.scalars import Told, new_scalars


def check_tensorboard() -> None:
    """Nothing, if event files can be written.

    Raises:
        ConfigError: the library is not installed.
    """
    if importlib.util.find_spec("tensorboardX") is None:
        raise ConfigError(
            "--tensorboard needs the package tensorboardX, which is not installed here: install runflat with its extra "
            "(pip install -e '.[tensorboard]'), or leave --tensorboard out."
        )


class ScalarWriter:
    """Writes what a run's files say, until `close`. Steps are those of the run; one done again is written again."""

    def __init__(self, run: Path, folder: Path, say: Callable[[str], None]):
        """Begin an event file in `folder`.

        Raises:
            ConfigError: the library is missing, or the folder cannot be written.
        """
        check_tensorboard()
        from tensorboardX import SummaryWriter

        try:
            self._writer = SummaryWriter(str(folder))
        except OSError as error:
            raise ConfigError(f"--tensorboard {folder} cannot be written: {error}. Name another folder.") from error
        self._told = Told()
        self._say: Callable[[str], None] | None = say
        self._folder = folder
        self._follower = Follower(RunFiles(run), "tensorboard", self._take)

    def close(self) -> None:
        """Write what is left, and end."""
        self._follower.close()
        self._writer.close()

    def _take(self, data: RunData) -> None:
        scalars, self._told = new_scalars(data, self._told)
        try:
            for scalar in scalars:
                self._writer.add_scalar(scalar.tag, scalar.value, scalar.step)
            self._writer.flush()
        except OSError as error:
            if self._say:
                self._say(f"warning: TensorBoard's file in {self._folder} cannot be written: {error}")
            self._say = None  # once is enough
