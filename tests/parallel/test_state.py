"""What devices hold: the same bits in all copies, and no more than their share."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from runflat.check.small import PROOF_SET, proof_config
from runflat.check.verify import parameter_errors
from runflat.plan import sync_groups
from runflat.plan.cost import held_numel, sequence_flops


@pytest.mark.parametrize("in_memory", [False, True], ids=["gloo", "in memory"])
@pytest.mark.parametrize("mode", ["groups", "exchange", "reshard"])
@pytest.mark.parametrize("model", ["qwen3", "qwen2"])
def test_copies_have_the_same_bits_after_20_steps(
    jobs: Any, monkeypatch: pytest.MonkeyPatch, model: str, mode: str, in_memory: bool
) -> None:
    """Catches holders that drift apart, by the order of a sum or by another rounding: parameters and moments."""
    if mode == "exchange":
        monkeypatch.setattr(sync_groups, "MAX_COMMUNICATORS", 3)
    job, run = jobs
    config = proof_config(model, num_key_value_heads=4, num_hidden_layers=1)
    places, sync = ((0, 1), (1, 3)), "reshard" if mode == "reshard" else "direct"
    ran = run(job(config, dead=places, seq_len=8, num_sequences=3, num_steps=20, in_memory=in_memory, sync=sync))
    assert bool(ran.layout.exchange) == (mode == "exchange")
    for name in ("weights", "exp_avg", "exp_avg_sq"):
        parts = {place: state.tensors[name] for place, state in ran.ranks.items()}
        anything = {param.name: torch.ones(param.shape) for param in ran.rules.spec.params}
        # The error against anything is infinite exactly where two copies of one element differ.
        assert all(math.isfinite(error) for error in parameter_errors(ran.rules, ran.plan, parts, anything).values())


@pytest.mark.parametrize("model", PROOF_SET)
def test_flops_and_parameters_are_what_the_plan_says(jobs: Any, model: str) -> None:
    """Catches work or memory that is done or held twice, beyond shared KV heads and replicated parameters."""
    job, run = jobs
    task = job(proof_config(model), dead=((0, 1), (1, 0), (1, 3)), num_sequences=3, micro_batch=1)

    def around(_: torch.nn.Module, steps: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            steps()
        return int(counter.get_total_flops())

    ran = run(task, around)
    spec = ran.rules.spec
    for place, state in ran.ranks.items():
        replica = ran.plan.replica(place[0])
        said = replica.num_sequences * sequence_flops(spec, replica, place[1], task.seq_len)
        assert state.inside == pytest.approx(said, rel=0.01), place
        held = sum(tensor.numel() for tensor in state.tensors["weights"].values())
        assert held == held_numel(spec, replica, place[1]), place


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation made outside the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def test_no_device_allocates_the_model(jobs: Any) -> None:
    """Catches a device that builds more than its shard: in training nothing is as large as the model's parameters."""
    job, run = jobs
    task = job(proof_config("phi3"), dead=((1, 2),), num_sequences=3, micro_batch=1)

    def around(_: torch.nn.Module, steps: Any) -> int:
        with LargestTensor() as largest:
            steps()
        return largest.numel

    ran = run(task, around)
    matrices = [param for param in ran.rules.spec.params if param.dim is not None]
    for state in ran.ranks.values():
        assert 0 < state.inside < max(param.numel for param in matrices)
        for param in matrices:
            assert state.tensors["weights"][param.name].numel() < param.numel / 2
