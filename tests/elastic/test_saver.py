"""Saving beside training: the copy is of its moment, one is written at a time, and late ones do no harm."""

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runflat.check.small import proof_config
from runflat.elastic import saver as module
from runflat.elastic.saver import Save, Saver
from runflat.elastic.saves import Saves
from runflat.parallel.comms import AbortedError
from runflat.parallel.optimizer import OptimizerSettings, build_optimizer
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.units import ModelSpec
from runflat.train.checkpoint import ShardFile
from runflat.train.publishing import partial_folder
from runflat.train.shards import ShardCopy, copy_shard

SPEC = ModelSpec("M", (), (), 8, 1, 4)
NAME = "shard-0-0.safetensors"


class Reports(list[Mapping[str, Any]]):
    """What a saver reports."""

    def save(self, step: int = 3) -> Save:
        """A save whose report comes here."""
        copy = ShardCopy(step, 1, NAME, {}, True, {"weight/w": torch.zeros(2)})
        return Save(copy, {"step": step}, 1, self.append)


def nothing() -> None: ...


def test_training_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a save that returns when it is on disk, two at a time, and a wait that an abort does not end."""
    disk = threading.Event()
    real = module.write_shard

    def slow(run: Path, spec: ModelSpec, copy: ShardCopy) -> ShardFile:
        assert disk.wait(30)
        return real(run, spec, copy)

    monkeypatch.setattr(module, "write_shard", slow)
    saver, reports = Saver(tmp_path, SPEC), Reports()
    saver.wait(nothing)
    saver.begin(reports.save())
    assert reports == []

    def left() -> None:
        raise AbortedError("generation 1 was left for generation 2.")

    with pytest.raises(AbortedError):
        saver.wait(left)
    disk.set()
    saver.wait(nothing)
    assert [report["shard"]["name"] for report in reports] == [NAME]
    entry = json.loads((partial_folder(tmp_path, 3, 1) / f"{NAME}.json").read_text())
    assert (entry["num_devices"], entry["progress"]) == (1, {"step": 3})
    saver.begin(reports.save(4))
    saver.wait(nothing)
    assert [report["progress"]["step"] for report in reports] == [3, 4]


def full(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / NAME).symlink_to("/dev/full")


def read_only(folder: Path) -> None:
    """As a folder that cannot be written to shows itself, whoever asks."""
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    folder.parent.write_text("")


@pytest.mark.parametrize(("trouble", "words"), [(full, "No space left"), (read_only, "File exists|Not a directory")])
def test_what_cannot_be_written_is_reported(trouble: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    """Catches a full or read-only disk that ends a thread in silence: the save would be waited for without end."""
    trouble(partial_folder(tmp_path, 3, 1))
    saver, reports = Saver(tmp_path, SPEC), Reports()
    saver.begin(reports.save())
    saver.wait(nothing)
    assert len(reports) == 1
    assert reports[0]["progress"] == {"step": 3}
    assert any(word in reports[0]["error"] for word in words.split("|"))


def test_a_bug_in_the_thread_reaches_the_main_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a Python error beside training that nobody hears of."""

    def broken(*_: object) -> ShardFile:
        raise KeyError("lost")

    monkeypatch.setattr(module, "write_shard", broken)
    saver, reports = Saver(tmp_path, SPEC), Reports()
    saver.begin(reports.save())
    with pytest.raises(KeyError):
        saver.wait(nothing)
    assert reports == []


def test_the_copy_is_of_its_moment() -> None:
    """Catches a shard that shares memory with the weights: it would be of a step that half is over."""
    spec = read_rules(build_meta_model(proof_config("llama-gqa", num_hidden_layers=1), torch.float32), 1).spec
    plan = build_plan(spec, live_devices(1, 1, ()), 1, 1, 1)
    params = {param.name: nn.Parameter(torch.ones(param.shape)) for param in spec.params}
    optimizer = build_optimizer(spec, params, OptimizerSettings(lr=0.5))

    def train() -> None:
        sum(weight.sum() for weight in params.values()).backward()
        optimizer.step()

    train()
    copy = copy_shard(spec, plan, (0, 0), 1, params, optimizer)
    before = {name: tensor.clone() for name, tensor in copy.tensors.items()}
    train()
    assert all(torch.equal(tensor, before[name]) for name, tensor in copy.tensors.items())
    now = copy_shard(spec, plan, (0, 0), 2, params, optimizer).tensors
    assert [name for name in now if torch.equal(now[name], before[name])] == []


def shard(number: int) -> ShardFile:
    return ShardFile(f"shard-0-{number}.safetensors", "", 1, {}, number == 0)


def add(saves: Saves, step: int, generation: int, device: str) -> bool:
    """Whether this shard completes its save, of two devices."""
    return bool(saves.add(device, step, generation, shard(int(device[-1])), 2))


def test_shards_that_come_late() -> None:
    """Catches a save that a newer one has overtaken published over it, and one of a state that was given up.

    The second would remove older checkpoints while devices load one.
    """
    saves = Saves()
    assert not add(saves, 4, 0, "0:0")
    assert not add(saves, 4, 1, "0:0"), "the step again, after a loss"
    assert add(saves, 4, 1, "0:1")
    assert not add(saves, 4, 0, "0:1"), "complete at last, but overtaken"
    assert not add(saves, 4, 1, "0:1"), "twice"
    assert not add(saves, 6, 1, "0:0")
    saves.go_back(5, 2)
    assert not add(saves, 6, 1, "0:1"), "step 6 was given up"
    assert not add(saves, 6, 2, "0:0")
    assert add(saves, 6, 2, "0:1")


def test_a_save_outlives_a_change_of_plan() -> None:
    """Catches a checkpoint thrown away that all devices have written, only because one was lost right after."""
    saves = Saves()
    assert not add(saves, 4, 0, "0:0")
    saves.go_back(4, 1)  # nothing was lost: step 4 is where the run goes on
    assert add(saves, 4, 0, "0:1")
    saves = Saves()
    assert not add(saves, 4, 0, "0:0")
    saves.go_back(5, 1)
    assert add(saves, 4, 0, "0:1")
