"""A run watched from outside: its files, its processes, and waits that say what did not come."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from runflat.errors import RunError

POLL_S = 0.05
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LISTENING = "0A"
"""State of a listening socket in /proc/net/tcp."""
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

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ):
        """Start it, by the words of `prefix` where it is to run somewhere else; its output goes to `log`."""
        self._log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "runflat.cli", *arguments],
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
    """What a process, or several together, occupy."""

    num_descriptors: int
    num_threads: int
    num_sockets: int
    resident_bytes: int
    num_ports: int = 0
    """TCP ports on which it listens."""
    num_processes: int = 1

    def __add__(self, other: Footprint) -> Footprint:
        """Both together."""
        return Footprint(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def footprint(pid: int) -> Footprint:
    """Descriptors, threads, sockets and resident memory of a process of this machine."""
    targets = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            targets.append(os.readlink(entry))
    sockets = [target for target in targets if target.startswith("socket:")]
    return Footprint(
        num_descriptors=len(targets),
        num_threads=len(list(Path(f"/proc/{pid}/task").iterdir())),
        num_sockets=len(sockets),
        resident_bytes=int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES,
        num_ports=len(_listening().keys() & set(sockets)),
    )


def _listening() -> dict[str, tuple[str, int]]:
    """(address, port) of the sockets of this machine that listen, by what descriptors name them."""
    rows = [row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]": _address(row[1]) for row in rows if row[3] == LISTENING}


def _address(text: str) -> tuple[str, int]:
    """(address, port) as /proc/net/tcp has it: words in this machine's order."""
    host, _, port = text.partition(":")
    words = [int(host[start : start + 8], 16) for start in range(0, len(host), 8)]
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return str(ipaddress.ip_address(packed)), int(port, 16)


def listening(pid: int) -> set[tuple[str, int]]:
    """(address, port) of all TCP sockets on which a process of this machine listens."""
    known, found = _listening(), set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            found.add(os.readlink(entry))
    return {known[name] for name in found if name in known}


def session_processes(session: int) -> list[int]:
    """Ids of the living processes of a session, such as that of a `Command`, in which all its workers are."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError, ValueError):
            state, _, _, number, *_ = _stat(entry / "stat")[1] if entry.name.isdigit() else ("Z", "", "", "-1")
            if state != "Z" and int(number) == session:
                found.append(int(entry.name))
    return found


def session_footprint(session: int) -> Footprint:
    """What all processes of a session occupy together."""
    total = Footprint(0, 0, 0, 0, 0, 0)
    for pid in session_processes(session):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            total += footprint(pid)
    return total


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
