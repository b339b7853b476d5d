"""`runflat train` as it is typed: real worker processes, real signals. Few and short: each starts an interpreter."""

import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from runflat.cli import run as runflat
from runflat.presets import read_preset
from runflat.train.checkpoint import newest_checkpoint
from runflat.train.data import Corpus, prepare

ROOT = Path(__file__).parents[2]
SMALL = "--model.preset tiny --train.global-batch 8 --data.seq-len 32 --data.paths text"
TWO_REPLICAS = "--layout.tp 2 --layout.replicas 2 --layout.dead 1:1"
SLOW_STEPS = "--train.steps 100000"

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns the current folder of the commands; it has some text."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("".join(f"{n} + {n} = {2 * n}\n" for n in range(3000)), encoding="utf-8")
    return tmp_path


def command(arguments: str) -> list[str]:
    return [sys.executable, "-m", "runflat.cli", *arguments.split()]


def environment(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(folder)}


def finish(folder: Path, arguments: str, **options: Any) -> tuple[int, str, str]:
    """Runs a command to its end; returns exit code, output and errors."""
    done = subprocess.run(
        command(arguments),
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
        **options,
    )
    return done.returncode, done.stdout, done.stderr


@contextmanager
def started(folder: Path, arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command in a session of its own, as in a terminal, after its first step; nothing of it outlives the block."""
    process = subprocess.Popen(
        command(arguments),
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            read_until(process, r"step \d+/")
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def descendants(pid: int) -> dict[int, int]:
    """Parent by process id, of the children of `pid` and of theirs; a worker is a child of the fork server."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(stat.parent.name)] = int(parent)
    found = [pid]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return {child: parents[child] for child in found[1:]}


def listening(pids: list[int]) -> list[str]:
    """Local addresses, in the hexadecimal form of /proc, at which the processes accept connections."""
    sockets = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(entry) if entry.is_symlink() else ""
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets]


def assert_one_paragraph(errors: str) -> None:
    assert errors.startswith("runflat train: ")
    assert "Traceback" not in errors
    assert "\n\n" not in errors.strip()


def corpus(folder: Path) -> Corpus:
    return prepare([str(folder / "text")], cache_dir=folder / "tokens", seq_len=32)


def expected_hash(folder: Path, steps: int) -> str:
    """The hash of the sequences that `steps` steps of a run without interruption use."""
    text, value = corpus(folder), ""
    for step in range(steps):
        value = text.sample_hash(value, step, range(8 * step, 8 * step + 8))
    return value


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]


def test_kill_interrupt_full_disk_resume(folder: Path) -> None:
    """Catches work lost by kill -9, Ctrl-C or a full disk, and a resumed run that repeats or skips a sequence."""
    run = folder / "run"
    with started(folder, f"train --run run {SMALL} {TWO_REPLICAS} {SLOW_STEPS} --train.checkpoint-every 1") as process:
        read_until(process, "step 3: checkpoint")
        family = [process.pid, *descendants(process.pid)]
        assert_loopback_only(family)
        os.kill(process.pid, signal.SIGKILL)
        assert_all_end(family)
    saved = newest_checkpoint(run, pytest.fail).progress.step
    assert saved >= 3

    with started(folder, "train --resume run --train.checkpoint-every 0") as process:
        os.killpg(process.pid, signal.SIGINT)
        output = process.communicate(timeout=60)[0]
        assert process.returncode == 130, output
    assert "press Ctrl-C again to stop at once" in output
    assert "runflat train --resume run" in output
    step = newest_checkpoint(run, pytest.fail).progress.step
    assert step > saved
    before = steps_of(run)
    recorded = [record["step"] for record in before]
    assert recorded == sorted(set(recorded))
    assert recorded[:3] + recorded[-1:] == [0, 1, 2, step - 1]
    # Steps that the workers finished without their parent are in the checkpoint, but nobody was there to record them.
    assert step - len(recorded) <= 3
    assert_summary(folder, step, stopped=True)

    full = finish(folder, f"train --resume run --train.steps {step + 3}", preexec_fn=limit_files)
    assert_no_room(full, run, step)

    resumed = finish(folder, f"train --resume run --layout.tp 3 --layout.replicas 1 --train.steps {step + 3}")
    assert (resumed[0], resumed[2]) == (0, ""), resumed[1]
    assert f"resuming at step {step}" in resumed[1]
    after = steps_of(run)
    assert after[:-3] == before
    assert [record["step"] for record in after[-3:]] == [step, step + 1, step + 2]
    assert_summary(folder, step + 3, stopped=False)


def read_until(process: subprocess.Popen[str], start: str) -> None:
    """Reads the command's output up to the line whose start the pattern matches."""
    assert process.stdout is not None
    seen: list[str] = []
    while not re.match(start, line := process.stdout.readline()):
        seen.append(line)
        assert line, "".join(seen)


def assert_summary(folder: Path, step: int, stopped: bool) -> None:
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["step"], summary["stopped"]) == (step, stopped)
    assert summary["sample_hash"] == expected_hash(folder, step)
    assert summary["checkpoint"] == f"run/checkpoints/step-{step:08d}"
    assert summary["holdout_loss"] > 0


def limit_files() -> None:
    """Allows files as large as the run's small ones, but not as large as a shard of the model."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (250 * 1024, 250 * 1024))


def assert_no_room(ended: tuple[int, str, str], run: Path, saved: int) -> None:
    code, output, errors = ended
    assert code == 2, output + errors
    assert_one_paragraph(errors)
    text = " ".join(errors.split())
    assert f"the checkpoint of step {saved + 3} could not be written under run" in text
    assert "--resume run" in text
    assert newest_checkpoint(run, pytest.fail).progress.step == saved
    assert not (run / "checkpoints" / f"step-{saved + 3:08d}").exists()


def halt(pid: int) -> None:
    """Stops a process, and returns when it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline


def test_second_interrupt_stops_at_once(folder: Path) -> None:
    """Catches a run that cannot be stopped when its workers do not answer, and workers that stay behind."""
    with started(folder, f"train --run run {SMALL} {SLOW_STEPS}") as process:
        family = descendants(process.pid)
        workers = [pid for pid, parent in family.items() if parent != process.pid]
        assert len(workers) == 1
        halt(workers[0])
        os.kill(process.pid, signal.SIGINT)
        read_until(process, "stopping after this step")
        os.kill(process.pid, signal.SIGINT)
        output = process.communicate(timeout=60)[0]
        assert process.returncode == 1, output
        assert "interrupted twice" in output
        assert "Traceback" not in output
        assert_all_end(list(family))


def assert_all_end(pids: list[int], timeout_s: float = 30.0) -> None:
    """Waits until the processes have ended, without polling."""
    with ExitStack() as stack:
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            stack.callback(os.close, descriptor)
            assert select.select([descriptor], [], [], timeout_s)[0], f"process {pid} is still there"


def assert_loopback_only(family: list[int]) -> None:
    """The processes accept connections from this machine alone, and do accept some."""
    addresses = listening(family)
    assert addresses
    assert set(addresses) <= {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def test_error_of_a_worker_is_one_paragraph(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a report of the peers that failed in consequence, or a traceback, in place of the first cause."""
    monkeypatch.chdir(folder)
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(read_preset("tiny")))
    arguments = SMALL.replace("--model.preset tiny", "--model.from-dir model")
    assert runflat(f"train --run run {arguments} --layout.tp 2 --train.steps 2".split()) == 2
    errors = capsys.readouterr().err
    assert_one_paragraph(errors)
    assert "model" in errors
    assert "safetensors" in errors
