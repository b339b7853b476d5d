"""Bytes that a plan counts, against those of the tensors that are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from runflat.check.small import proof_config
from runflat.check.tensor_memory import TensorMemory
from runflat.parallel.casts import recompute_layers
from runflat.parallel.comms import Group, Network
from runflat.parallel.shard import ShardedModel, initial_weights
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.cost import copied_numel, device_memory, held_numel
from runflat.plan.planner import build_plan, live_devices

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("llama-gqa", {}),
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "fused": ("phi3", {}),
}
BATCH, SEQ_LEN = 2, 256
SHALLOW = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
KINDS = (torch.bfloat16, torch.float32)


def test_tensors_are_counted_while_they_live() -> None:
    """Catches a count that forgets what autograd keeps, takes a view for memory of its own, or never goes down."""
    with TensorMemory() as memory:
        values = torch.ones(1000, requires_grad=True)
        views = [values.view(10, 100), values[5:]]
        assert memory.live_bytes == 4000
        kept = values.exp()
        total = (kept + 1).sum()
        del kept
        assert (memory.live_bytes, memory.peak_bytes) == (4000 + 4000 + 4, 4000 + 4000 + 4000 + 4)
        total.backward()
        assert memory.live_bytes == 4000 + 4 + 4000  # the gradient in place of what exp kept
        del values, views, total
        assert memory.live_bytes == 0


@pytest.mark.parametrize("model", MODELS)
def test_copies_are_those_that_are_counted(jobs: Any, model: str) -> None:
    """Catches a plan with a copy that nobody makes, such as that of an embedding, or without one that is made."""
    job, run = jobs
    name, changes = MODELS[model]
    copies: list[int] = []

    def around(model: PreTrainedModel, steps: Callable[[], None]) -> tuple[int, int]:
        sizes = {kind: sum(p.numel() for p in model.parameters() if p.dtype == kind) for kind in KINDS}
        steps()
        return sizes[torch.bfloat16], sizes[torch.float32]

    ran = run(job(proof_config(name, **changes), dead=((1, 2),), compute_dtype=torch.bfloat16), around)
    spec = ran.rules.spec
    for (replica, slot), state in ran.ranks.items():
        plan, (copied, looked_up) = ran.plan.replica(replica), state.inside
        copies.append(copied)
        assert copied == copied_numel(spec, plan, slot)
        assert 0 < looked_up < held_numel(spec, plan, slot)
        counted = device_memory(spec, plan, slot, SEQ_LEN, 1, 4, 2)
        assert counted.params_bytes == 4 * held_numel(spec, plan, slot) + 2 * copied
    assert len(set(copies)) > 1


def peak_and_plan(compute: torch.dtype | None, recompute: bool) -> tuple[int, int]:
    """Returns the most bytes that a forward and backward hold at once, and what the plan counts for activations."""
    meta = build_meta_model(SHALLOW, compute or torch.float32, "eager")
    rules = read_rules(meta, 1)
    replica = build_plan(rules.spec, live_devices(1, 1, ()), 1, BATCH, SEQ_LEN).replicas[0]
    alone = Group(0, "alone", ((0, 0),), (0, 0), None, Network())
    held, source = replica.held(rules.spec.kinds, 0), initial_weights(meta, 0)
    model = ShardedModel(meta, rules, held, alone, source, torch.float32, torch.device("cpu"), compute).model.train()
    if recompute:
        recompute_layers(model)
    tokens = torch.arange(BATCH * SEQ_LEN).view(BATCH, SEQ_LEN)
    with TensorMemory() as memory:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    width = (compute or torch.float32).itemsize
    return memory.peak_bytes, device_memory(
        rules.spec, replica, 0, SEQ_LEN, BATCH, 4, width, recompute
    ).activations_bytes


def peak_of_backward(model: PreTrainedModel, steps: Callable[[], None]) -> int:
    """Returns the most bytes that a forward and backward of one rank hold at once, kept gradients not among them."""
    tokens = torch.arange(BATCH * SEQ_LEN).view(BATCH, SEQ_LEN)
    with TensorMemory() as memory:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    steps()
    return memory.peak_bytes


@pytest.mark.parametrize("compute", [None, torch.bfloat16], ids=["float32", "bf16"])
def test_recomputation_keeps_less(compute: torch.dtype | None) -> None:
    """Catches layers that keep what they were to compute again, and a plan that is far from what a step needs."""
    (all_kept, counted), (inputs_kept, counted_less) = (peak_and_plan(compute, again) for again in (False, True))
    assert inputs_kept < 0.5 * all_kept
    assert 0.75 < all_kept / counted < 1.25
    assert 0.75 < inputs_kept / counted_less < 1.25


@pytest.mark.parametrize(("dead", "recompute"), [((), False), (((0, 1),), True)], ids=["kept", "recomputed at TP 3"])
def test_split_tokens_keep_less(jobs: Any, dead: tuple[tuple[int, int], ...], recompute: bool) -> None:
    """Catches hidden states that stay whole on each device, and a plan that saves what a step does not."""
    job, run = jobs
    needs: list[int] = []
    counts: list[int] = []
    for on in (False, True):
        how = {"micro_batch": BATCH, "seq_len": SEQ_LEN, "recompute": recompute, "sequence_parallel": on}
        ran = run(job(SHALLOW, num_replicas=1, dead=dead, num_sequences=BATCH, **how), peak_of_backward)
        needed = {place: state.inside for place, state in ran.ranks.items()}
        counted = {
            place: device_memory(
                *(ran.rules.spec, ran.plan.replica(0), place[1], SEQ_LEN, BATCH, 4),
                recompute=recompute,
                sequence_parallel=on,
            ).activations_bytes
            for place in needed
        }
        assert all(0.75 < needed[place] / counted[place] < 1.25 for place in needed)
        needs.append(sum(needed.values()))
        counts.append(sum(counted.values()))
    assert 0.5 < (needs[0] - needs[1]) / (counts[0] - counts[1]) < 1.5
