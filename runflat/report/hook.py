"""Tells somebody of each incident: a command gets it as JSON on its input, a web address gets it posted."""

from __future__ import annotations

import json
import shlex
import subprocess
import urllib.request
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from runflat.report.follow import Follower
from runflat.report.run_files import RunData, RunFiles

PATIENCE_S = 10.0
"""How long the command or the address may take."""


class IncidentHook:
    """Tells of a run's incidents from now on; what fails is said, and never stops the run."""

    def __init__(self, run: Path, target: str, say: Callable[[str], None]):
        """`target` is a command line, or an http address."""
        files = RunFiles(run)
        first = files.poll()
        self._num_told = len(first.incidents) if first else 0
        self._run, self._target, self._say = run, target, say
        self._follower = Follower(files, "incident hook", self._take)

    def close(self) -> None:
        """Tell what is left, and end."""
        self._follower.close()

    def _take(self, data: RunData) -> None:
        for row in data.incidents[self._num_told :]:
            self._num_told += 1
            text = json.dumps({"run": str(self._run), **asdict(row), "phases_s": dict(row.phases_s)})
            problem = tell(self._target, text)
            if problem:
                self._say(f"warning: nobody was told of incident {row.number}: {problem}")


def tell(target: str, text: str) -> str | None:
    """Give `text` to a command or an address; returns what went wrong."""
    try:
        if target.startswith(("http://", "https://")):
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(target, data=text.encode(), headers=headers, method="POST")
            urllib.request.urlopen(request, timeout=PATIENCE_S).close()
            return None
        done = subprocess.run(
            shlex.split(target), input=text, text=True, capture_output=True, check=False, timeout=PATIENCE_S
        )
        return f"{target} ended with {done.returncode}: {done.stderr[-200:]}" if done.returncode else None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return str(error)
