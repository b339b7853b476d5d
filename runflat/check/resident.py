"""Resident memory of a run's processes while it lasts, by what it is made of."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from runflat.check.live import Command, Watch, until
from runflat.errors import RunError

PACKAGE_PARENT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Resident:
    """Bytes of a process that are in memory: now, or the most of each at any time.

    Attributes:
        resident_bytes: all pages, those shared with other processes too (VmHWM, the system's own peak).
        anonymous_bytes: memory of its own making, and what it has from the process that it was forked from.
        file_bytes: mapped pages of files: libraries, and the token file.
        private_bytes: pages that no other process has.
        proportional_bytes: pages that n processes share count 1/n.
    """

    resident_bytes: int = 0
    anonymous_bytes: int = 0
    file_bytes: int = 0
    private_bytes: int = 0
    proportional_bytes: int = 0

    def most(self, other: Resident) -> Resident:
        """The larger of each."""
        return Resident(*(max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))


@dataclass(frozen=True)
class Peaks:
    """The most that each worker had, by device, and the process that started them, which tokenises."""

    workers: Mapping[str, Resident]
    controller: Resident

    @property
    def worker(self) -> Resident:
        """The most of each that any worker had."""
        found = Resident()
        for one in self.workers.values():
            found = found.most(one)
        return found


def resident(pid: int | str = "self") -> Resident:
    """What a living process of this machine has in memory; its peak of all pages, as the system keeps it."""
    status = _bytes_by_name(Path(f"/proc/{pid}/status").read_text())
    rollup = _bytes_by_name(Path(f"/proc/{pid}/smaps_rollup").read_text())
    private = rollup["Private_Clean"] + rollup["Private_Dirty"]
    return Resident(status["VmHWM"], status["RssAnon"], status["RssFile"], private, rollup["Pss"])


def _bytes_by_name(text: str) -> dict[str, int]:
    return {name: int(number) << 10 for name, number in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def peaks_of_run(run: Path, flags: Sequence[str], timeout_s: float) -> Peaks:
    """Train as `runflat train` does, in a process of its own; the most memory that its processes had.

    Raises:
        RunError: it did not end in time, or not well; says what it printed.
    """
    watch = Watch(run)
    workers: dict[str, Resident] = {}
    controller = Resident()
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE_PARENT), "OMP_NUM_THREADS": "1"}
    run.mkdir(parents=True)
    with Command(["train", "--run", str(run), *flags], run / "output.log", environment) as command:

        def ended() -> bool:
            nonlocal controller
            gone = (FileNotFoundError, ProcessLookupError, KeyError)  # it has ended, or does so just now
            with suppress(*gone):
                controller = controller.most(resident(command.process.pid))
            for device in watch.devices():
                with suppress(*gone):
                    workers[device] = workers.get(device, Resident()).most(resident(watch.pid(device)))
            return command.process.poll() is not None

        until(f"the end of {run}", ended, timeout_s)
        if command.process.returncode:
            raise RunError(f"{run} ended with code {command.process.returncode}: {command.output()}")
    return Peaks(workers, controller)
