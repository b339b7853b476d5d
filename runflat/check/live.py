"""A run watched from outside: its files, its processes, and waits that say what did not come."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from runflat.errors import RunError

POLL_S = 0.05
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def until(what: str, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Return when `condition` holds.

    Raises:
        RunError: it did not within `timeout_s`; says `what` was waited for.
    """
    pause = threading.Event()
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise RunError(f"waited {timeout_s:.0f} s in vain for {what}.")
        pause.wait(POLL_S)


@dataclass(frozen=True)
class Watch:
    """What the files of a run say, while it runs and afterwards."""

    run: Path

    def steps(self) -> list[dict[str, Any]]:
        """Records of the steps so far."""
        return _rows(self.run / "steps.jsonl")

    def num_steps(self) -> int:
        """How many steps are in the books."""
        return len(self.steps())

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Records of one kind (plan, took, incident, change, ledger) in events.jsonl."""
        return [row for row in _rows(self.run / "events.jsonl") if row.get("record") == kind]

    def happened(self, event: str) -> list[dict[str, Any]]:
        """Events of one kind (kill, fail, return, ...) in events.jsonl."""
        return [row for row in _rows(self.run / "events.jsonl") if row.get("event") == event]

    def summary(self) -> dict[str, Any]:
        """The summary of the run, which has ended."""
        summary: dict[str, Any] = json.loads((self.run / "summary.json").read_text())
        return summary

    def job(self) -> dict[str, Any]:
        """What devices.json says; empty before there is one."""
        with suppress(FileNotFoundError):
            found: dict[str, Any] = json.loads((self.run / "devices.json").read_text())
            return found
        return {}

    def devices(self) -> dict[str, dict[str, Any]]:
        """What devices.json says of each device."""
        return {row["device"]: row for row in self.job().get("devices", [])}

    def state(self, device: str) -> str | None:
        """Standing of a device, such as "active"; None before there is one."""
        row = self.devices().get(device)
        return row["state"] if row else None

    def pid(self, device: str) -> int:
        """Process id of the newest worker of a device."""
        path = self.run / "pids" / f"{device.replace(':', '-')}.json"
        return int(json.loads(path.read_text())["pid"])

    def reached(self, step: int, timeout_s: float = 60.0) -> None:
        """Wait until `step` steps are done."""
        until(f"step {step} of {self.run}", lambda: self.num_steps() >= step, timeout_s)


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


class Command:
    """A `runflat` command in a process group of its own, of which nothing outlives the `with` block."""

    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None):
        """Start it; its output goes to `log`."""
        self._log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "runflat.cli", *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=None if environment is None else dict(environment),
                start_new_session=True,
            )

    def output(self) -> str:
        """What it has printed so far."""
        return self._log.read_text()

    def finish(self, timeout_s: float) -> int:
        """Wait for its end; returns the exit code."""
        return self.process.wait(timeout_s)

    def __enter__(self) -> Command:
        """Begin."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End what is left of it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass(frozen=True)
class Footprint:
    """What a process occupies."""

    num_descriptors: int
    num_threads: int
    num_sockets: int
    resident_bytes: int


def footprint(pid: int) -> Footprint:
    """Descriptors, threads, sockets and resident memory of a process of this machine."""
    targets = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            targets.append(os.readlink(entry))
    return Footprint(
        num_descriptors=len(targets),
        num_threads=len(list(Path(f"/proc/{pid}/task").iterdir())),
        num_sockets=sum(target.startswith("socket:") for target in targets),
        resident_bytes=int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES,
    )


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return _stat(Path(f"/proc/{pid}/stat"))[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def cpu_s(pid: int) -> dict[str, float]:
    """CPU seconds of a process so far by name of the thread; threads of one name are added up."""
    used: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            name, fields = _stat(task / "stat")
            name = "main" if task.name == str(pid) else name
            used[name] = used.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S
    return used


def _stat(path: Path) -> tuple[str, list[str]]:
    """(name, fields from the state on) of a stat file."""
    head, _, rest = path.read_text().rpartition(")")
    return head.partition("(")[2], rest.split()
