"""Saves a checkpoint in one process after the other, and kills each with signal 9 at another system call.

    python killed_saves.py FOLDER

Then others are killed by the system in the middle of writing a file: the file may not grow beyond so many bytes.

The save is a worker's (copy, background thread, file, index entry) and the controller's (publish, retention). After
each kill the newest checkpoint must be whole and of one save, and the next save must succeed. Prints the points at
which a process was killed, as JSON: {"new step": ["mkdir", ...], "same step again": [...], "cut": [bytes, ...]}.
"""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig

from runflat.elastic.saver import Save, Saver
from runflat.elastic.saves import Saves
from runflat.parallel.optimizer import OptimizerSettings, build_optimizer
from runflat.parallel.shard import cut
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.units import TENSORS, param_ranges
from runflat.train.checkpoint import Checkpoint, Progress, newest_checkpoint, shard_from_json
from runflat.train.publishing import keep_newest, publish
from runflat.train.shards import checkpoint_tensors, copy_shard

CALLS = ("mkdir", "open", "flush", "fsync", "__exit__", "rename", "unlink", "rmdir")
"""What reaches the disk; a write fills a buffer, which these (and larger writes before a flush) empty."""
KEEP = 2
NUM_CUTS = 12
CONFIG = LlamaConfig(
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
SPEC = read_rules(build_meta_model(CONFIG, torch.float32), 2).spec


def value(step: int, generation: int) -> float:
    """What every element of the save of (step, generation) is."""
    return step + generation / 16


def save(run: Path, step: int, generation: int) -> None:
    """All devices write their shards, and the controller publishes."""
    plan = build_plan(SPEC, live_devices(2, 1, ()), 2, 4, 4, generation=generation)
    progress = Progress(step, step, 4 * step, "ab")
    saves, complete = Saves(), []
    for place in plan.places:
        held = plan.replica(place[0]).held(SPEC.kinds, place[1])
        params = {}
        for param in SPEC.params:
            full = torch.full(param.shape, value(step, generation))
            params[param.name] = nn.Parameter(cut(full, param, param_ranges(SPEC, param, held)))
        optimizer = build_optimizer(SPEC, params, OptimizerSettings())
        for weight in params.values():
            optimizer.state[weight] = {kind: weight.detach().clone() for kind in TENSORS[1:]}
        told: list[Any] = []
        saver = Saver(run, SPEC)
        saver.begin(Save(copy_shard(SPEC, plan, place, step, params, optimizer), vars(progress), 2, told.append))
        saver.wait(lambda: None)
        complete = saves.add(str(place), step, generation, shard_from_json(told[0]["shard"]), 2)
    publish(run, SPEC, plan, progress, complete)
    keep_newest(run, step, KEEP)


@dataclass
class Killer:
    """Kills this process before the `due`-th system call of files; names the call first."""

    due: int
    tell: int
    seen: int = 0

    def __call__(self, frame: FrameType, event: str, call: Any) -> None:
        """What `sys.setprofile` calls."""
        if event != "c_call" or getattr(call, "__name__", "") not in CALLS:
            return
        if not (call.__module__ in ("posix", "_io", "io") or isinstance(getattr(call, "__self__", None), io.IOBase)):
            return
        self.seen += 1
        if self.seen == self.due:
            os.write(self.tell, call.__name__.encode())
            os.kill(os.getpid(), signal.SIGKILL)


def killed_at(due: int, work: Callable[[], None]) -> str:
    """Do `work` in a process that is killed at its `due`-th system call; the call, "" if it made fewer."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        killer = Killer(due, writing)
        threading.setprofile(killer)
        sys.setprofile(killer)
        work()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        point = pipe.read()
    status = os.waitpid(child, 0)[1]
    assert (status == signal.SIGKILL) if point else (status == 0), (due, point, status)
    return point


def whole(checkpoint: Checkpoint) -> tuple[int, int]:
    """(step, generation) of a checkpoint whose every element is of that save."""
    expected = value(checkpoint.progress.step, checkpoint.generation)
    for kind in TENSORS:
        source = checkpoint_tensors(checkpoint, kind)
        for param in SPEC.params:
            ranges = () if param.dim is None else ((0, param.shape[param.dim]),)
            assert torch.equal(source(param, ranges), torch.full(param.shape, expected)), (kind, param.name)
    return checkpoint.progress.step, checkpoint.generation


def unexpected(text: str) -> None:
    """Nothing that is visible may be broken."""
    raise AssertionError(text)


def scenario(folder: Path, step: int) -> list[str]:
    """Kill a save of `step` under generation 1 at every point; a run with steps 1 and 2 of generation 0 is there."""
    start = folder / "start"
    for before in (1, 2):
        save(start, before, 0)
    points: list[str] = []
    found: list[tuple[int, int]] = []
    run = folder / "run"
    while True:
        shutil.copytree(start, run)
        point = killed_at(len(points) + 1, lambda: save(run, step, 1))
        found.append(whole(newest_checkpoint(run, unexpected)))
        assert found[-1] in ((2, 0), (step, 1))
        save(run, step + 1, 2)  # the next life
        assert whole(newest_checkpoint(run, unexpected)) == (step + 1, 2)
        left = {path.name for path in (run / "checkpoints").iterdir()}
        assert len(left) == KEEP, left
        assert not any(name.startswith(".") for name in left), left
        shutil.rmtree(run)
        if not point:
            break
        points.append(point)
    assert found == sorted(found)
    assert {found[0], found[-1]} == {(2, 0), (step, 1)}
    shutil.rmtree(start)
    return points


def cut_off(most_bytes: int, work: Callable[[], None]) -> bool:
    """Do `work` in a process that the system kills in the write that makes a file longer than that; whether it was."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
        work()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status == 0 or os.WTERMSIG(status) == signal.SIGXFSZ, (most_bytes, status)
    return status != 0


def cut_files(folder: Path, run: Path) -> list[int]:
    """Kill saves inside a write, after ever more bytes of it, until all files fit; the numbers of bytes."""
    start = folder / "start"
    save(start, 1, 0)
    sizes = {path.stat().st_size for path in start.rglob("*") if path.is_file()}
    cuts: list[int] = []
    for most_bytes in range(8, max(sizes), max(sizes) // NUM_CUTS):
        shutil.copytree(start, run)
        assert cut_off(most_bytes, lambda: save(run, 2, 1)), most_bytes
        partial = [path.stat().st_size for path in (run / "checkpoints").glob(".*/*")]
        assert most_bytes in partial, "some file ends where it was cut"
        assert whole(newest_checkpoint(run, unexpected)) == (1, 0)
        save(run, 3, 2)  # the next life
        assert whole(newest_checkpoint(run, unexpected)) == (3, 2)
        shutil.rmtree(run)
        cuts.append(most_bytes)
    shutil.rmtree(start)
    return cuts


if __name__ == "__main__":
    torch.set_num_threads(1)
    base = Path(sys.argv[1])
    found = {"new step": scenario(base, 3), "same step again": scenario(base, 2), "cut": cut_files(base, base / "run")}
    print(json.dumps(found))
