"""Where weights come from: seeded per parameter, cut from full tensors, or read in slices from files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from runflat.check.small import PADDING_ID, PROOF_SET, proof_config
from runflat.errors import CheckpointError
from runflat.parallel.shard import ShardedModel, initial_weights, safetensors_weights, tensor_weights
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.units import ParamSpec, param_ranges


def full_range(param: ParamSpec) -> tuple[tuple[int, int], ...]:
    """Returns the whole of the partitioned dim."""
    return ((0, param.shape[param.dim]),) if param.dim is not None else ()


@pytest.mark.parametrize("model", PROOF_SET)
def test_initial_weights_are_the_same_under_any_plan(model: str) -> None:
    """Catches weights that depend on who draws them: every slot's part must be the cut of the full tensor."""
    meta = build_meta_model(proof_config(model), torch.float32)
    rules = read_rules(meta, 8)
    source, again = initial_weights(meta, 5), initial_weights(copy.deepcopy(meta), 5)
    plan = build_plan(rules.spec, live_devices(8, 1, [(0, 1), (0, 6)]), 8, 1, 16)
    for param in rules.spec.params:
        full = source(param, full_range(param))
        for slot in plan.replicas[0].live_slots:
            ranges = param_ranges(rules.spec, param, plan.replicas[0].held(rules.spec.kinds, slot))
            part = again(param, ranges)
            assert torch.equal(part, tensor_weights({param.name: full})(param, ranges))
    other = initial_weights(meta, 6)
    matrix = rules.spec.params[0]
    assert not torch.equal(other(matrix, full_range(matrix)), source(matrix, full_range(matrix)))


@pytest.mark.parametrize("model", PROOF_SET)
def test_initial_weights_are_those_of_transformers(model: str) -> None:
    """Catches another standard deviation, a norm that starts at another value, a padding row that is not zero."""
    config = proof_config(model, attention_bias=True) if "llama" in model else proof_config(model)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    meta = build_meta_model(config, torch.float32)
    source = initial_weights(meta, 0)
    true = {name: param.detach() for name, param in theirs.named_parameters()}
    drawn = {p.name: source(p, full_range(p)) for p in read_rules(meta, 8).spec.params}
    assert drawn.keys() == true.keys()
    for name, value in drawn.items():
        if value.ndim == 1:
            assert torch.equal(value, true[name]), name
        else:
            # Five standard errors of an estimate from so many elements.
            near = 5 * config.initializer_range / value.numel() ** 0.5
            assert float(value.std()) == pytest.approx(float(true[name].std()), abs=near), name
            assert float(value.mean()) == pytest.approx(0.0, abs=near), name
    rows = drawn["model.embed_tokens.weight"]
    assert torch.equal(rows[PADDING_ID], true["model.embed_tokens.weight"][PADDING_ID])
    assert int((rows == 0).all(dim=1).sum()) == 1
    flat = torch.cat([value.flatten()[:1000] for value in drawn.values() if value.ndim > 1])
    assert len(flat.unique()) > 0.9 * len(flat), "two parameters were drawn from one generator"


class LargestStorage(TorchDispatchMode):
    """Remembers the largest storage of any result, in elements, except the meta device's and mapped files."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.mapped: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type != "meta":
            storage = result.untyped_storage()
            if func is torch.ops.aten.set_.source_Storage:
                self.mapped.add(storage.data_ptr())
            elif storage.data_ptr() not in self.mapped:
                self.numel = max(self.numel, storage.nbytes() // result.element_size())
        return result


@pytest.mark.parametrize("model", ["llama-gqa4", "phi3", "gemma2"])
@pytest.mark.parametrize("shards", [False, True], ids=["one file", "index"])
def test_safetensors_are_read_in_slices(model: str, shards: bool, tmp_path: Path, in_group: Any) -> None:
    """Catches a slice of the wrong rows or columns, and a full matrix that is loaded to be cut."""
    theirs = AutoModelForCausalLM.from_config(proof_config(model), dtype=torch.float32)
    theirs.save_pretrained(tmp_path, max_shard_size="200KB" if shards else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == shards
    meta = build_meta_model(proof_config(model), torch.float32)
    rules = read_rules(meta, 4)
    plan = build_plan(rules.spec, live_devices(4, 1, [(0, 1)]), 4, 1, 16)
    source = safetensors_weights(tmp_path)
    true = tensor_weights(dict(theirs.named_parameters()))

    def rank(index: int, group: Any) -> int:
        held = plan.replicas[0].held(rules.spec.kinds, plan.replicas[0].live_slots[index])
        with LargestStorage() as largest:
            params = ShardedModel(
                copy.deepcopy(meta), rules, held, group, source, torch.float32, torch.device("cpu")
            ).params
        for param in rules.spec.params:
            assert torch.equal(params[param.name], true(param, param_ranges(rules.spec, param, held)))
            assert params[param.name].untyped_storage().data_ptr() not in largest.mapped, "the file is still in use"
        return largest.numel

    largest = max(param.numel for param in rules.spec.params)
    assert all(0 < numel <= largest / 2 for numel in in_group(3, rank))


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    """Catches a traceback, or silent nonsense, where a directory's weights are not those of the model."""
    spec = read_rules(build_meta_model(proof_config("llama-mha"), torch.float32), 8).spec
    with pytest.raises(CheckpointError, match="no .safetensors file"):
        safetensors_weights(tmp_path)
    AutoModelForCausalLM.from_config(proof_config("llama-mha", intermediate_size=96)).save_pretrained(tmp_path)
    source = safetensors_weights(tmp_path)
    ffn = next(param for param in spec.params if param.name.endswith("gate_proj.weight"))
    with pytest.raises(CheckpointError, match=r"gate_proj.weight' has shape \[96, 128\], not \[1000, 128\]"):
        source(ffn, ((0, 8),))
    alien = ParamSpec("model.alien.weight", (4,), "equal", False, 0)
    with pytest.raises(CheckpointError, match="no tensor 'model.alien.weight'"):
        source(alien, ())
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="cannot read the weights"):
        safetensors_weights(tmp_path)
