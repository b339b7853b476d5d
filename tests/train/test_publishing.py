"""Saves that are interrupted, fail, or come late: what is visible is whole, and what is on disk stays findable."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runflat.errors import CheckpointError
from runflat.plan.plan import Plan
from runflat.plan.units import ModelSpec
from runflat.train import publishing
from runflat.train.checkpoint import Progress, ShardFile, newest_checkpoint
from runflat.train.publishing import how_to_go_on, keep_newest, partial_folder, publish
from runflat.train.shards import ShardCopy, write_shard
from runflat.train.tensor_file import write_tensors

SCRIPT = Path(__file__).parent / "support" / "killed_saves.py"
SPEC = ModelSpec("M", (), (), 8, 1, 4)


def assemble(run: Path, step: int, generation: int = 0) -> Callable[[], Path]:
    """Writes the one shard of a save, of its step and generation all through; returns what publishes it."""
    tensors = {"weight/w": torch.tensor([float(step), float(generation)])}
    shard = write_shard(run, SPEC, ShardCopy(step, generation, "shard-0-0.safetensors", {}, True, tensors))
    return lambda: publish(run, SPEC, Plan(generation, 1, ()), Progress(step, step, step, ""), [shard])


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.process
@pytest.mark.timeout(180)
def test_kill_at_each_system_call(tmp_path: Path) -> None:
    """Catches a moment of a save at which kill -9 leaves half a checkpoint visible, or none that was there before."""
    ran = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    points = json.loads(ran.stdout)
    assert len(points.pop("cut")) >= 12, "of header and tensor data"
    for calls in points.values():
        assert {"mkdir", "open", "fsync", "rename", "unlink"} < set(calls)
    renames = [calls.count("rename") for calls in points.values()]
    assert renames == [2, 2], "published and hidden before removal; put aside and published"


def test_all_is_on_disk_before_it_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a loss of power that leaves a visible checkpoint with empty files: a kill alone would not show it."""
    synced: dict[str, int] = {}
    sync, rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced[str(path)] = -1 if path.is_dir() else path.stat().st_size

    def renamed(source: Path, target: Path) -> Path:
        assert synced[str(source)] == -1
        assert {synced[str(path)] == path.stat().st_size > 0 for path in source.iterdir()} == {True}
        synced.clear()
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    assemble(tmp_path, 1)()
    assert synced.keys() == {str(tmp_path / "checkpoints"), str(tmp_path)}


@pytest.mark.parametrize("call", range(6))
def test_failure_at_any_point_of_publishing(call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a full disk during the last steps of a save that costs an older checkpoint or ends in a traceback."""
    assemble(tmp_path, 1)()
    assemble(tmp_path, 2)()
    publish_again = assemble(tmp_path, 2, 1)
    calls = 0

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call + 1:
                raise OSError(28, "No space left on device")
            return real(*args)

        return act

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(os.fsync))
        patch.setattr(Path, "rename", failing(Path.rename))
        with pytest.raises(CheckpointError, match=r"step 2 could not be written .*No space left.*--resume"):
            publish_again()
    assert newest_checkpoint(tmp_path, pytest.fail).progress.step == 2
    assert not any(name.startswith(".") for name in names(tmp_path))


def test_the_way_out_is_one(tmp_path: Path) -> None:
    """Catches a full disk before the first checkpoint whose message sends the user to resume from nothing."""
    assert "another --run" in how_to_go_on(tmp_path)
    assemble(tmp_path, 3)()
    assert f"step-00000003 are untouched: make room, then go on with runflat train --resume {tmp_path}" in how_to_go_on(
        tmp_path
    )


def test_only_what_is_overtaken_is_removed(tmp_path: Path) -> None:
    """Catches interrupted saves that fill the disk, and a save that is still being written removed by an older one."""
    assemble(tmp_path, 2)()
    for step, generation in ((1, 0), (2, 1), (2, 2), (1, 2), (3, 1)):
        partial_folder(tmp_path, step, generation).mkdir()
    shutil.copytree(tmp_path / "checkpoints" / "step-00000002", tmp_path / "checkpoints" / "step-00000002.replaced")
    shutil.copytree(tmp_path / "checkpoints" / "step-00000002", tmp_path / "checkpoints" / "step-00000001.replaced")
    (partial_folder(tmp_path, 2, 1)).rmdir()
    assemble(tmp_path, 2, 1)()
    kept = [partial_folder(tmp_path, *save).name for save in ((1, 2), (2, 2), (3, 1))]
    assert names(tmp_path) == [*kept, "step-00000001.replaced", "step-00000002"]


def test_older_checkpoints_are_removed_only_where_newer_ones_are(tmp_path: Path) -> None:
    """Catches retention that removes what a run went on from, because broken ones of later steps are there."""
    for step in (10, 20, 30, 40):
        assemble(tmp_path, step)()
    keep_newest(tmp_path, 40, 0)
    assert len(names(tmp_path)) == 4
    for step in (30, 40):
        (tmp_path / "checkpoints" / f"step-{step:08d}" / "index.json").write_text("")
    assemble(tmp_path, 25, 1)()  # of a run that went on from step 20
    keep_newest(tmp_path, 25, 2)
    assert names(tmp_path) == [f"step-{step:08d}" for step in (20, 25, 30, 40)]
    hidden = tmp_path / "checkpoints" / f".step-00000005{publishing.REMOVED}"
    hidden.mkdir()  # of a removal that was interrupted
    keep_newest(tmp_path, 25, 1)
    assert names(tmp_path) == [f"step-{step:08d}" for step in (25, 30, 40)]
    assert newest_checkpoint(tmp_path, lambda text: None).progress.step == 25


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_library_reads_our_files(kind: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a wrong offset, a type by a wrong name, and bytes lost or hashed twice between two pieces."""
    monkeypatch.setattr("runflat.train.tensor_file.CHUNK_BYTES", 7)
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 5), "b": (0, 4), "ünd": (7,), "c": (2, 1, 3)}
    tensors = {name: torch.randn(shape, generator=generator).to(kind) for name, shape in shapes.items()}
    tensors["other type"] = torch.randn(3, generator=generator)
    path = tmp_path / "x.safetensors"
    checksum, num_bytes = write_tensors(path, tensors)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in tensors.items())
    assert (path.stat().st_size, publishing_checksum(path)) == (num_bytes, checksum)


def publishing_checksum(path: Path) -> str:
    return subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0]


def test_the_index_entry_is_of_the_file(tmp_path: Path) -> None:
    """Catches a checksum of something else than what is on disk: every checkpoint would count as broken."""
    assemble(tmp_path, 4)()
    checkpoint = newest_checkpoint(tmp_path, pytest.fail)
    assert isinstance(checkpoint.files[0], ShardFile)
    assert load_file(checkpoint.folder / checkpoint.files[0].name)["weight/w"].tolist() == [4.0, 0.0]
