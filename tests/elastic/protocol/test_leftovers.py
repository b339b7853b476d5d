"""What a dead controller's workers leave behind: published if it is whole and newer, never otherwise."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from runflat.elastic.leftovers import publish_leftovers
from runflat.elastic.planning import Planner
from runflat.plan.units import ModelSpec
from runflat.train.checkpoint import newest_checkpoint
from runflat.train.publishing import partial_folder


@pytest.fixture
def spec(make_planner: Callable[..., Planner]) -> ModelSpec:
    return make_planner().spec


def leave(run: Path, step: int, generation: int, present: int = 2, num_devices: int = 2) -> None:
    """The shards and entries that `present` of `num_devices` workers leave."""
    folder = partial_folder(run, step, generation)
    folder.mkdir(parents=True)
    for number in range(present):
        name = f"shard-0-{number}.safetensors"
        (folder / name).write_bytes(b"abc")
        shard = {"name": name, "sha256": hashlib.sha256(b"abc").hexdigest(), "num_bytes": 3, "axes": {}}
        progress = {"step": step, "optimizer_step": step, "num_samples": 8 * step, "sample_hash": "h"}
        entry = {"progress": progress, "shard": {**shard, "replicated": True}, "num_devices": num_devices}
        (folder / f"{name}.json").write_text(json.dumps(entry))


def test_a_whole_newer_folder_is_published(tmp_path: Path, spec: ModelSpec) -> None:
    """Catches steps that are lost with the controller although every worker has saved them."""
    said: list[str] = []
    leave(tmp_path, 5, 1)
    assert publish_leftovers(tmp_path, spec, said.append) is not None
    found = newest_checkpoint(tmp_path, pytest.fail)
    assert (found.progress.step, found.progress.num_samples, found.generation) == (5, 40, 1)
    assert "step 5" in said[0]
    assert publish_leftovers(tmp_path, spec, pytest.fail) is None


def test_the_newest_of_several_wins(tmp_path: Path, spec: ModelSpec) -> None:
    """Catches an older save that hides the last one."""
    leave(tmp_path, 5, 1)
    leave(tmp_path, 7, 1)
    publish_leftovers(tmp_path, spec, lambda text: None)
    assert newest_checkpoint(tmp_path, pytest.fail).progress.step == 7


def test_a_later_life_wins_over_a_later_step(tmp_path: Path, spec: ModelSpec) -> None:
    """Catches a worker of a life that was given up long ago, which writes last."""
    leave(tmp_path, 9, 1)
    leave(tmp_path, 7, 4)
    publish_leftovers(tmp_path, spec, lambda text: None)
    assert newest_checkpoint(tmp_path, pytest.fail).progress.step == 7
    assert publish_leftovers(tmp_path, spec, pytest.fail) is None


def test_what_is_not_whole_stays_hidden(tmp_path: Path, spec: ModelSpec) -> None:
    """Catches a checkpoint with a hole: a worker that was killed before, or while, it wrote."""
    leave(tmp_path, 5, 1, present=1)
    leave(tmp_path, 6, 1)
    (partial_folder(tmp_path, 6, 1) / "shard-0-1.safetensors.json").write_text('{"progress": {')
    leave(tmp_path, 7, 1)
    (partial_folder(tmp_path, 7, 1) / "shard-0-1.safetensors").write_bytes(b"a")
    assert publish_leftovers(tmp_path, spec, pytest.fail) is None
    assert publish_leftovers(tmp_path / "nowhere", spec, pytest.fail) is None
