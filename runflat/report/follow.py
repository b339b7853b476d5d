"""Follows the files of a running job in a thread of its own: whoever wants to tell others of it is called."""

from __future__ import annotations

import threading
from collections.abc import Callable

from runflat.report.run_files import RunData, RunFiles

POLL_S = 0.5
LAST_WORDS_S = 20.0
"""How long what was still to be told at the end may take."""


class Follower:
    """Calls `take` with the run's state whenever that has changed, and once more at the end; training never waits."""

    def __init__(self, files: RunFiles, name: str, take: Callable[[RunData], None]):
        """Begin to follow; what is there already, and `files` has not given yet, is taken by the first call."""
        self._files = files
        self._take = take
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take what is left, and end."""
        self._ended.set()
        self._thread.join(LAST_WORDS_S)

    def _follow(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(POLL_S)
            data = self._files.poll()
            if data is not None:
                self._take(data)
