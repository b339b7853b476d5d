"""A training job of one system, watched from outside: its processes, its commits as they appear, its workers' ids."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from common import Settings
from timings import NUM_INTERVALS, Commit, Kill, parse_line, progress, step_seconds

from runflat.check.live import Watch
from runflat.errors import RunError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
POLL_S = 0.01
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it workers that torchrun has started again read addresses of the dead ones in the agent's store."""
PATIENCE_S = 120.0
"""Longest wait for a job to do what is waited for."""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@dataclass
class Process:
    """A process of a job; `lasting` ones are started again when they end, as a scheduler would."""

    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    lasting: bool = False
    popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, for the first time or again."""
        with self.log.open("a") as log:
            environment = {**ENVIRONMENT, **self.environment}
            self.popen = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def stop(self, patience_s: float = 30.0) -> None:
        """End it: asked first, so that it ends its workers too."""
        if self.popen is None:
            return
        self.popen.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(patience_s)
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


@dataclass
class Job:
    """A running job. `records` is a folder with its files of commits, or one file."""

    name: str
    processes: Sequence[Process]
    records: Path
    full_tokens: int
    pid: Callable[[str], int]
    whole: Callable[[], bool] = lambda: True
    commits: list[Commit] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=dict)

    def __enter__(self) -> Job:
        """Start all of it."""
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Stop all of it, the last started first."""
        for process in reversed(self.processes):
            process.stop()

    def look(self) -> None:
        """Take note of what was committed since, and start again what has ended."""
        now = time.monotonic()
        files = sorted(self.records.glob("*.jsonl")) if self.records.is_dir() else [self.records]
        for path in (path for path in files if path.exists()):
            with path.open() as file:
                file.seek(self._read.get(path, 0))
                for line in iter(file.readline, ""):
                    if not line.endswith("\n"):
                        break
                    self.commits.append(parse_line(line, now, self.full_tokens))
                    self._read[path] = self._read.get(path, 0) + len(line)
        for process in self.processes:
            if process.popen is not None and process.popen.poll() is not None:
                if not process.lasting:
                    raise RunError(f"{self.name} ended with code {process.popen.returncode}: {tail(process.log)}")
                process.start()

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Watch until `condition` holds.

        Raises:
            RunError: it does not in time, or the job has ended; says what the job said.
        """
        pause, deadline = threading.Event(), time.monotonic() + PATIENCE_S
        while True:
            self.look()
            if condition():
                return
            if time.monotonic() > deadline:
                said = "; ".join(tail(process.log) for process in self.processes)
                raise RunError(f"{self.name}: waited {PATIENCE_S:.0f} s in vain for {what}; it said: {said}")
            pause.wait(POLL_S)

    def healthy(self, since_s: float = 0.0) -> bool:
        """Whether the latest steps were done by all workers, in one epoch, and after `since_s`."""
        latest = [commit for commit in progress(self.commits) if commit.time_s > since_s][-NUM_INTERVALS - 1 :]
        full = all(commit.tokens == self.full_tokens for commit in latest)
        return len(latest) > NUM_INTERVALS and full and len({commit.epoch for commit in latest}) == 1 and self.whole()

    def kill(self, victim: str) -> Kill:
        """SIGKILL a worker in the middle of a step, and wait until all workers have trained again for a few steps."""
        count = len(progress(self.commits))
        self.until("a step", lambda: len(progress(self.commits)) > count)
        last = self.commits[-1]
        target_s = last.time_s + step_seconds(self.commits) / 2
        self.until("the middle of a step", lambda: time.monotonic() >= target_s)
        killed_s = time.monotonic()
        os.kill(self.pid(victim), signal.SIGKILL)

        def moved_s() -> float | None:
            times = [
                commit.time_s for commit in self.commits if commit.time_s > killed_s and commit.epoch != last.epoch
            ]
            return times[0] if times else None

        self.until(f"a step after the kill of {victim}", lambda: moved_s() is not None)
        self.until(f"all workers after the kill of {victim}", lambda: self.healthy(moved_s() or 0.0))
        return Kill(killed_s, victim, time.monotonic())


def tail(log: Path, num_lines: int = 12) -> str:
    """The last lines of a log, on one line."""
    return " | ".join(log.read_text(errors="replace").splitlines()[-num_lines:]) if log.exists() else "nothing"


def recorded_pid(folder: Path, victim: str) -> int:
    """Process id that a peer's worker has left."""
    return int((folder / "pids" / victim.replace(":", "-")).read_text())


def torchrun(settings: Settings, folder: Path, num_tokens: int) -> Job:
    """All workers under one torchrun that restarts them together."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1000"]
    command += ["--nproc-per-node", str(settings.replicas * settings.tp), str(HERE / "torchrun_loop.py")]
    process = Process([*command, str(folder / "settings.json")], folder / "log", OWN_STORE)
    return Job("torchrun", [process], folder / "commits", num_tokens, lambda victim: recorded_pid(folder, victim))


def torchft(settings: Settings, folder: Path, num_tokens: int, python: Path, lighthouse: Sequence[str]) -> Job:
    """A lighthouse, and one torchrun for each replica group, which is started again when it ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = str(python.parent / "torchft_lighthouse")
    processes = [Process([found, "--bind", f"127.0.0.1:{port}", *lighthouse], folder / "lighthouse.log")]
    for replica in range(settings.replicas):
        environment = {"REPLICA_GROUP_ID": str(replica), "NUM_REPLICA_GROUPS": str(settings.replicas)}
        environment["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{port}"
        command = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.tp)]
        command += [str(HERE / "torchft_loop.py"), str(folder / "settings.json")]
        processes.append(Process(command, folder / f"group-{replica}.log", environment, lasting=True))
    return Job("torchft", processes, folder / "commits", num_tokens, lambda victim: recorded_pid(folder, victim))


def runflat(flags: Sequence[str], folder: Path, num_tokens: int, num_devices: int) -> Job:
    """`runflat train`; a lost device starts again by itself."""
    run = folder / "run"
    watch = Watch(run)
    command = [sys.executable, "-m", "runflat.cli", "train", "--run", str(run), *flags]

    def whole() -> bool:
        return [row["state"] for row in watch.devices().values()] == ["active"] * num_devices

    return Job("runflat", [Process(command, folder / "log")], run / "steps.jsonl", num_tokens, watch.pid, whole)
