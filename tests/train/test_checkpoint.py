"""Checkpoints without workers: written under one layout, read under every other, broken in every way."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import LlamaConfig

from runflat.check.small import proof_config
from runflat.errors import CheckpointError
from runflat.parallel.optimizer import OptimizerSettings, build_optimizer
from runflat.parallel.shard import cut
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.plan import Place, Plan
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.sync_groups import sync_layout
from runflat.plan.units import TENSORS, ModelSpec, param_ranges
from runflat.plan.zero import Ownership, ownership
from runflat.train.checkpoint import (
    Progress,
    check_model,
    checkpoint_of_step,
    newest_checkpoint,
)
from runflat.train.publishing import publish
from runflat.train.shards import OwnMoments, checkpoint_tensors, copy_shard, load_optimizer_state, write_shard

LAYOUTS = {
    "whole": (4, 2, ()),
    "one dead": (8, 2, ((1, 3),)),
    "uneven": (8, 3, ((0, 0), (1, 2), (1, 5), (2, 1), (2, 6), (2, 7))),
    "prime": (5, 2, ((0, 4), (1, 0), (1, 2))),
    "one device": (1, 1, ()),
}
SMALL = {"num_hidden_layers": 1, "intermediate_size": 90, "vocab_size": 71}
MODELS: dict[str, Callable[[], Any]] = {
    "grouped": lambda: proof_config("llama-gqa", **SMALL),
    "tied": lambda: proof_config("llama-gqa4", tie_word_embeddings=True, **SMALL),
    "fused": lambda: proof_config("phi3", **SMALL),
    "biases": lambda: proof_config("qwen2", **SMALL),
}
Full = dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class State:
    """A model's geometry for one degree, and a full random state: tensor kind -> parameter -> values."""

    spec: ModelSpec
    full: Full


def spec_of(config: Any, tp: int) -> ModelSpec:
    return read_rules(build_meta_model(config, torch.float32), tp).spec


def random_state(config: Any, tp: int, seed: int = 0) -> State:
    spec = spec_of(config, tp)
    generator = torch.Generator().manual_seed(seed)
    return State(
        spec,
        {kind: {p.name: torch.randn(p.shape, generator=generator) for p in spec.params} for kind in TENSORS},
    )


def plan_of(spec: ModelSpec, layout: str, generation: int = 0) -> Plan:
    tp, replicas, dead = LAYOUTS[layout]
    return build_plan(spec, live_devices(tp, replicas, dead), tp, 16, 16, generation=generation)


def save(run: Path, state: State, plan: Plan, step: int, *, is_sharded: bool = False) -> Path:
    """Save `state` as the devices of `plan` would, with moments of all they hold or, sharded, of what they keep.

    Returns the checkpoint's folder.
    """
    owned = ownership(state.spec, plan, sync_layout(state.spec, plan, 1 << 12, 4)) if is_sharded else None
    shards = []
    for place in plan.places:
        held = plan.replica(place[0]).held(state.spec.kinds, place[1])
        parts = {
            kind: {p.name: cut(values[p.name], p, param_ranges(state.spec, p, held)) for p in state.spec.params}
            for kind, values in state.full.items()
        }
        params = {name: nn.Parameter(value) for name, value in parts["weight"].items()}
        optimizer = build_optimizer(state.spec, params, OptimizerSettings())
        for name, param in params.items():
            optimizer.state[param] = {kind: parts[kind][name] for kind in TENSORS[1:]}
        own = own_moments(state, owned, place) if owned is not None else None
        shards.append(write_shard(run, state.spec, copy_shard(state.spec, plan, place, step, params, optimizer, own)))
    return publish(run, state.spec, plan, Progress(step, step, 16 * step, "ab"), shards)


def own_moments(state: State, owned: Ownership, place: Place) -> OwnMoments:
    """Returns what the device keeps of the optimizer's state."""
    kept = owned.kept(place)
    tensors = {
        kind: {
            p.name: cut(state.full[kind][p.name], p, param_ranges(state.spec, p, kept[p.name]))
            for p in state.spec.params
            if any(kept[p.name].values())
        }
        for kind in TENSORS[1:]
    }
    return OwnMoments(tensors, kept, owned.owned(place))


def never(text: str) -> None:
    raise AssertionError(f"unexpected warning: {text}")


@pytest.mark.parametrize(
    ("model", "written", "is_sharded"),
    [
        *((model, written, False) for model in MODELS for written in LAYOUTS),
        *((model, written, True) for model in ("fused", "biases") for written in ("uneven", "prime", "one device")),
    ],
)
def test_any_layout_reads_what_any_layout_wrote(model: str, written: str, is_sharded: bool, tmp_path: Path) -> None:
    """Catches a unit written in the wrong order, by nobody or by two, and a fused segment read at a wrong offset.

    With sharded optimizer state moments of a unit lie in another file than its weight, and by parameter.
    """
    config = MODELS[model]()
    state = random_state(config, LAYOUTS[written][0])
    folder = save(tmp_path, state, plan_of(state.spec, written), 7, is_sharded=is_sharded)
    checkpoint = newest_checkpoint(tmp_path, never)
    assert (checkpoint.folder, checkpoint.progress.step) == (folder, 7)
    assert_written_once(folder, state)
    for layout, (tp, _, _) in LAYOUTS.items():
        spec = spec_of(config, tp)
        check_model(checkpoint, spec)
        plan = plan_of(spec, layout)
        sources = {kind: checkpoint_tensors(checkpoint, kind) for kind in TENSORS}
        for replica, slot in plan.places:
            held = plan.replica(replica).held(spec.kinds, slot)
            for param in spec.params:
                ranges = param_ranges(spec, param, held)
                for kind, source in sources.items():
                    expected = cut(state.full[kind][param.name], param, ranges)
                    assert torch.equal(source(param, ranges), expected), (layout, replica, slot, kind, param.name)


def assert_written_once(folder: Path, state: State) -> None:
    numel = dict.fromkeys((f"{kind}/{p.name}" for kind in TENSORS for p in state.spec.params), 0)
    for path in folder.glob("*.safetensors"):
        with safe_open(str(path), framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - safe_open is no dict
                numel[key] += opened.get_tensor(key).numel()
    assert numel == {f"{kind}/{p.name}": p.numel for kind in TENSORS for p in state.spec.params}


def test_optimizer_state_comes_back(tmp_path: Path) -> None:
    """Catches moments that are exchanged, or a bias correction that starts again at step 0."""
    state = random_state(MODELS["grouped"](), 4)
    save(tmp_path, state, plan_of(state.spec, "whole"), 5)
    checkpoint = newest_checkpoint(tmp_path, never)
    ranges = {p.name: () if p.dim is None else ((0, p.shape[p.dim]),) for p in state.spec.params}
    params = {name: nn.Parameter(torch.zeros_like(value)) for name, value in state.full["weight"].items()}
    optimizer = build_optimizer(state.spec, params, OptimizerSettings())
    load_optimizer_state(optimizer, state.spec, params, ranges, checkpoint)
    for name, param in params.items():
        assert float(optimizer.state[param]["step"]) == 5.0
        for kind in TENSORS[1:]:
            assert torch.equal(optimizer.state[param][kind], state.full[kind][name])


def test_state_before_the_first_update(tmp_path: Path) -> None:
    """Catches a save that needs moments where every step so far was skipped as not finite."""
    spec = spec_of(MODELS["grouped"](), 1)
    plan = plan_of(spec, "one device")
    params = {p.name: nn.Parameter(torch.ones(p.shape)) for p in spec.params}
    optimizer = build_optimizer(spec, params, OptimizerSettings())
    shard = write_shard(tmp_path, spec, copy_shard(spec, plan, (0, 0), 1, params, optimizer))
    publish(tmp_path, spec, plan, Progress(1, 0, 16, ""), [shard])
    checkpoint = newest_checkpoint(tmp_path, never)
    load_optimizer_state(optimizer, spec, params, {p.name: () for p in spec.params}, checkpoint)
    assert not any(optimizer.state[param] for param in params.values())
    norm = next(p for p in spec.params if p.dim is None)
    assert float(checkpoint_tensors(checkpoint, "exp_avg")(norm, ()).abs().max()) == 0.0


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a run with checkpoints of steps 1 and 2; tests copy it."""
    run = tmp_path_factory.mktemp("run")
    for step in (1, 2):
        state = random_state(tiny(), 4, seed=step)
        save(run, state, plan_of(state.spec, "whole"), step)
    return run


def tiny(**changes: Any) -> LlamaConfig:
    sizes = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    return LlamaConfig(**sizes | changes)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


def shard_of(folder: Path) -> Path:
    return folder / "shard-1-2.safetensors"


def change_index(folder: Path, old: str, new: str) -> None:
    path = folder / "index.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def shard_of_another_run(folder: Path) -> None:
    """A shard of the same name and size, with other values and a good header."""
    shutil.copy(shard_of(folder.with_name("step-00000001")), shard_of(folder))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated shard": (lambda folder: os.truncate(shard_of(folder), 1000), "has 1000 bytes where the index says"),
    "flipped bit in a shard": (lambda folder: flip(shard_of(folder)), "shard-1-2.safetensors does not have the chec"),
    "missing shard": (lambda folder: shard_of(folder).unlink(), "shard-1-2.safetensors cannot be read (No such file"),
    "shard is a folder": (lambda folder: (shard_of(folder).unlink(), shard_of(folder).mkdir()), "shard-1-2.safet"),
    "shard of another run": (shard_of_another_run, "shard-1-2.safetensors does not have the checksum"),
    "missing index": (lambda folder: (folder / "index.json").unlink(), "has no readable index.json"),
    "empty folder": (lambda folder: (shutil.rmtree(folder), folder.mkdir()), "has no readable index.json"),
    "truncated index": (lambda folder: os.truncate(folder / "index.json", 200), "has no readable index.json"),
    "empty index": (lambda folder: (folder / "index.json").write_text(""), "has no readable index.json"),
    "index of another kind": (lambda folder: (folder / "index.json").write_text("[]"), "has no readable index.json"),
    "index without a key": (lambda folder: change_index(folder, '"sha256"', '"sha265"'), "index.json"),
    "changed digit in the index": (
        lambda folder: change_index(folder, '"num_samples": 32', '"num_samples": 33'),
        "index.json does not have the checksum",
    ),
    "format of the future": (lambda folder: change_index(folder, '"format": 1', '"format": 9'), "has format 9"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_broken_newest_is_skipped_and_nothing_whole_is_an_error(damage: str, two_saves: Path, tmp_path: Path) -> None:
    """Catches damage that goes unnoticed, stops a run which could go on, is not told, or leads to a fresh start."""
    run = Path(shutil.copytree(two_saves, tmp_path / "run"))
    inflict, message = DAMAGE[damage]
    inflict(run / "checkpoints" / "step-00000002")
    warnings: list[str] = []
    assert newest_checkpoint(run, warnings.append).progress.step == 1
    assert len(warnings) == 1
    assert message in warnings[0]
    with pytest.raises(CheckpointError):
        checkpoint_of_step(run, 2)
    shutil.rmtree(run / "checkpoints" / "step-00000001")
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* is whole") as info:
        newest_checkpoint(run, never)
    assert message in str(info.value)


def test_missing_checkpoints_are_errors(two_saves: Path, tmp_path: Path) -> None:
    """Catches a fresh start where the user asked to go on, and strangers in the folder taken for checkpoints."""
    with pytest.raises(CheckpointError, match="no such folder"):
        newest_checkpoint(tmp_path / "nowhere", never)
    with pytest.raises(CheckpointError, match=r"no folder step-N under .*checkpoints"):
        newest_checkpoint(tmp_path, never)
    with pytest.raises(CheckpointError, match="no checkpoint of step 9: there are those of the steps 1, 2"):
        checkpoint_of_step(two_saves, 9)
    run = Path(shutil.copytree(two_saves, tmp_path / "run"))
    (run / "checkpoints" / "step-notes").mkdir()
    (run / "checkpoints" / "step-00000003.txt").write_text("mine")
    assert newest_checkpoint(run, never).progress.step == 2


def test_steps_are_compared_as_numbers(two_saves: Path, tmp_path: Path) -> None:
    """Catches an order by name: step 100000000 would sort before step 99999999."""
    run = Path(shutil.copytree(two_saves, tmp_path / "run"))
    folder = run / "checkpoints"
    (folder / "step-00000001").rename(folder / "step-99999999")
    (folder / "step-00000002").rename(folder / "step-100000000")
    assert newest_checkpoint(run, never).folder.name == "step-100000000"


OTHER_MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"intermediate_size": 64}, r"gate_proj.weight has shape \[48, 16\] there and \[64, 16\] here"),
    "more layers": ({"num_hidden_layers": 2}, "layers.1.self_attn.q_proj.weight has shape None there"),
    "tied": ({"tie_word_embeddings": True}, r"lm_head.weight has shape \[40, 16\] there and None here"),
    "heads of another size": ({"num_attention_heads": 4, "num_key_value_heads": 4}, "heads are of size 2 there and 4"),
}


@pytest.mark.parametrize("other", OTHER_MODELS)
def test_another_model_is_refused(other: str, two_saves: Path) -> None:
    """Catches a run that goes on with the weights of another model, even one whose weights have the same shapes."""
    changes, message = OTHER_MODELS[other]
    with pytest.raises(CheckpointError, match=message):
        check_model(newest_checkpoint(two_saves, never), spec_of(tiny(**changes), 4))
    with pytest.raises(CheckpointError, match="a LlamaForCausalLM there and a MistralForCausalLM here"):
        check_model(newest_checkpoint(two_saves, never), replace(spec_of(tiny(), 4), name="MistralForCausalLM"))


def test_index_says_what_the_step_was(two_saves: Path) -> None:
    """Catches an index without its one (step, generation), from which a run could not be continued."""
    checkpoint = newest_checkpoint(two_saves, never)
    assert checkpoint.progress == Progress(step=2, optimizer_step=2, num_samples=32, sample_hash="ab")
    assert checkpoint.spec == spec_of(tiny(), 4)
    assert (checkpoint.generation, len(checkpoint.files)) == (0, 8)
