"""What precision and recomputation must not change: bits, where the same is computed; sums, which stay in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from runflat.check.small import proof_config
from runflat.check.verify import BUCKET_BYTES
from runflat.parallel.comms import Comms, Group, Network
from runflat.parallel.grad_sync import GradSync
from runflat.parallel.layers import TensorParallel, VocabularyRows, parallel_embedding
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.sync_groups import sync_layout
from runflat.plan.units import Kind, ModelSpec, ParamSpec, Segment


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
def test_recomputation_keeps_every_bit(jobs: Any, compute: torch.dtype) -> None:
    """Catches a layer that backward computes from other inputs, with other kernels, or in another order."""
    job, run = jobs
    options = {"dead": ((1, 2),), "num_steps": 3, "compute_dtype": compute}
    once, again = (run(job(proof_config("qwen3"), recompute=recompute, **options)) for recompute in (False, True))
    for place, state in once.ranks.items():
        for kind, tensors in state.tensors.items():
            for name, tensor in tensors.items():
                assert torch.equal(tensor, again.ranks[place].tensors[kind][name]), (place, kind, name)


def test_micro_batches_add_up_in_float32() -> None:
    """Catches gradients that are accumulated in bf16, where 256 + 1 is 256."""
    param = ParamSpec("head.weight", (4, 2), "sharded", True, 0, 1, 0, (Segment("vocab", 0),))
    spec = ModelSpec("one", (Kind("vocab", 4, 1),), (param,), 2, 0, 1)
    plan = build_plan(spec, live_devices(1, 1, ()), 1, 1, 8)
    layout = sync_layout(spec, plan, BUCKET_BYTES, 4)
    comms = Comms(HashStore(), plan, layout, (0, 0), Network())
    whole, half = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(4, 2, dtype=torch.bfloat16))
    sync = GradSync(spec, plan, layout, (0, 0), comms, {param.name: whole}, {param.name: (half,)})
    sync.zero()
    for number in range(300):
        if number == 299:
            sync.arm()
        half.sum().backward()
    sync.finish()
    assert whole.grad is not None
    assert whole.grad.flatten().tolist() == [300.0] * 8
    assert half.grad is None


def test_a_token_that_comes_often() -> None:
    """Catches an embedding whose gradient is summed up in bf16 over the places where a token stands."""
    embedding, alone = nn.Embedding(8, 2), Group(0, "alone", ((0, 0),), (0, 0), None, Network())
    vocabulary = VocabularyRows(8, torch.device("cpu"))
    vocabulary.hold(((0, 8),))
    parallel_embedding(embedding, vocabulary, TensorParallel(alone), torch.bfloat16)
    looked_up = embedding(torch.full((1, 1000), 3))
    assert looked_up.dtype == torch.bfloat16
    looked_up.sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad[3].tolist() == [1000.0, 1000.0]
