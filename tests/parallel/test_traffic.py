"""Collectives and bytes as recorded on the way to the backend, against the plan and against an ordinary job."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from runflat.check.small import PROOF_SET, proof_config
from runflat.plan import sync_groups
from runflat.plan.cost import device_memory, device_traffic
from runflat.plan.plan import Place

STEPS = 2


def sent_bytes(collectives: list[tuple[str, int, int]]) -> float:
    """Returns bytes sent: payload times the textbook factor of each collective."""
    # The payload of an all-to-all has not what a device keeps for itself.
    factors = {"all_reduce": lambda n: 2 * (n - 1) / n, "all_to_all": lambda n: 1}
    return sum(factors[name](n) * payload for name, payload, n in collectives)


LAYOUTS: dict[str, dict[str, Any]] = {
    "healthy": {},
    "one dead": {"dead": ((1, 2),)},
    "both hurt": {"dead": ((0, 0), (1, 1), (1, 3)), "num_sequences": 9, "micro_batch": 1},
    "down to one device": {"dead": ((0, 0), (0, 1), (0, 3))},
    "three replicas": {"dead": ((0, 1), (2, 0), (2, 2)), "num_replicas": 3, "num_sequences": 7, "micro_batch": 3},
    "one replica": {"num_replicas": 1, "num_sequences": 2},
    "one device": {"num_replicas": 1, "num_sequences": 2, "tp": 1},
}


@pytest.mark.parametrize("mode", ["groups", "exchange", "reshard"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_traffic_is_what_the_plan_says(jobs: Any, monkeypatch: pytest.MonkeyPatch, layout: str, mode: str) -> None:
    """Catches a collective that the plan does not count, or a plan that counts one that is not launched."""
    if mode == "exchange":
        monkeypatch.setattr(sync_groups, "MAX_COMMUNICATORS", 2)
    job, run = jobs
    sync = "reshard" if mode == "reshard" else "direct"
    task = job(proof_config("llama-gqa4"), num_steps=STEPS, sync=sync, **LAYOUTS[layout])
    ran = run(task)
    assert bool(ran.layout.exchange) == (mode == "exchange" and task.num_replicas > 1)
    for place, state in ran.ranks.items():
        said = device_traffic(ran.rules.spec, ran.plan, ran.layout, place, task.seq_len, task.micro_batch, 4)
        assert len(state.collectives) == STEPS * said.num_collectives, place
        assert sent_bytes(state.collectives) == pytest.approx(STEPS * said.total_bytes, rel=1e-12), place


@pytest.mark.parametrize(
    ("layout", "mode"),
    [*((name, "groups") for name in LAYOUTS), ("one dead", "exchange"), ("three replicas", "exchange")],
)
def test_sharded_optimizer_costs_what_the_plan_says(
    jobs: Any, monkeypatch: pytest.MonkeyPatch, layout: str, mode: str
) -> None:
    """Catches moments that a device has though it keeps them not, and bytes that the plan of zero1 does not count.

    Both are exact here, where 5 % are allowed. All devices together send what they do without zero1, less what norms
    save: their gradient is given by one device of each replica.
    """
    if mode == "exchange":
        monkeypatch.setattr(sync_groups, "MAX_COMMUNICATORS", 2)
    job, run = jobs
    config = proof_config("llama-gqa4")
    task = job(config, num_steps=STEPS, optimizer="zero1", **LAYOUTS[layout])
    ran = run(task)
    spec = ran.rules.spec
    assert bool(ran.layout.exchange) == (mode == "exchange" and task.num_replicas > 1)
    whole = run(replace(task, optimizer="replicated"))
    for place, state in ran.ranks.items():
        how = (task.seq_len, task.micro_batch, 4)
        said = device_traffic(spec, ran.plan, ran.layout, place, *how, owned=ran.owned)
        assert len(state.collectives) == STEPS * said.num_collectives, place
        assert sent_bytes(state.collectives) == pytest.approx(STEPS * said.total_bytes, rel=1e-12), place
        replica = ran.plan.replica(place[0])
        memory = device_memory(spec, replica, place[1], *how, kept_numel=ran.owned.kept_numel(place))
        assert moment_bytes(state.tensors) == memory.moments_bytes, place
        without = device_memory(spec, replica, place[1], *how)
        assert moment_bytes(whole.ranks[place].tensors) == without.moments_bytes, place
    if task.num_replicas > 1:
        assert sum(moment_bytes(state.tensors) for state in ran.ranks.values()) == 2 * 2 * 4 * spec.num_params
    sent = [sum(sent_bytes(state.collectives) for state in each.ranks.values()) for each in (ran, whole)]
    assert sent[0] <= sent[1] * 1.001


def moment_bytes(tensors: dict[str, dict[str, torch.Tensor]]) -> int:
    """Returns the bytes of the memory in which the moments lie, each counted once."""
    moments = [tensor for kind in ("exp_avg", "exp_avg_sq") for tensor in tensors[kind].values()]
    return sum({tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in moments}.values())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
def test_traffic_of_precisions(jobs: Any, compute: torch.dtype, recompute: bool) -> None:
    """Catches gradients that are reduced in bf16, hidden states summed in float32, a sum not counted."""
    job, run = jobs
    config = proof_config("llama-gqa4")
    task = job(config, num_steps=STEPS, dead=((1, 2),), compute_dtype=compute, recompute=recompute)
    ran = run(task)
    for place, state in ran.ranks.items():
        how = (task.seq_len, task.micro_batch, 4, compute.itemsize, recompute)
        said = device_traffic(ran.rules.spec, ran.plan, ran.layout, place, *how)
        assert len(state.collectives) == STEPS * said.num_collectives, place
        assert sent_bytes(state.collectives) == pytest.approx(STEPS * said.total_bytes, rel=1e-12), place
        assert all(tensor.dtype == torch.float32 for kept in state.tensors.values() for tensor in kept.values())


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"sync": "reshard", "seq_len": 5, "micro_batch": 3},
        {"recompute": True, "compute_dtype": torch.bfloat16},
        {"seq_len": 2, "micro_batch": 1, "num_sequences": 3},
    ],
    ids=["even", "uneven shares", "recomputed in bf16", "some have no token"],
)
def test_traffic_of_split_tokens(jobs: Any, how: dict[str, Any]) -> None:
    """Catches a gather or a reduce-scatter that the plan does not count, or that sends what nobody needs."""
    job, run = jobs
    dead = ((0, 2), (1, 0), (1, 1), (1, 3))
    config = proof_config("llama-gqa4")
    split, whole = (run(job(config, num_steps=STEPS, dead=dead, sequence_parallel=on, **how)) for on in (True, False))
    width = (how.get("compute_dtype") or torch.float32).itemsize
    recompute = how.get("recompute", False)
    hidden = {place: 0.0 for place in split.plan.places}
    for place, state in split.ranks.items():
        task = (job(config, **how).seq_len, job(config, **how).micro_batch, 4, width, recompute)
        said = device_traffic(split.rules.spec, split.plan, split.layout, place, *task, sequence_parallel=True)
        assert len(state.collectives) == STEPS * said.num_collectives, place
        assert sent_bytes(state.collectives) == pytest.approx(STEPS * said.total_bytes, rel=1e-12), place
        hidden[place] = sent_bytes(state.collectives) - sent_bytes(whole.ranks[place].collectives)
    if not recompute:
        # A ring all-reduce is a reduce-scatter and an all-gather: all devices together send the same.
        assert sum(hidden.values()) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("tp", "wanted"), [(8, 0.80), (4, 0.65)])
def test_direct_sends_less_than_reshard(jobs: Any, tp: int, wanted: float) -> None:
    """Catches bytes that one mode sends for nothing: counted at the groups, one of `tp` slots dead, two replicas.

    With S the gradients of all that is split and n devices, of which one is dead in replica 1: in `direct` a healthy
    device sends S/n (two replicas: as much as its payload). In `reshard` a partner sends S/(n-1) and then gives back
    its part of what the device without a partner had, S/(n(n-1)): together (n+1)/(n(n-1)). So the ratio is
    (n-1)/(n+1): 0.78 and 0.6. All devices together send 2S, and 2S/n more. Units divide by n and n-1 here, so that this
    is exact.
    """
    heads, blocks = tp * (tp - 1), 21 * tp
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 4, "num_hidden_layers": 1}
    config = proof_config("llama-gqa4", vocab_size=4 * blocks, intermediate_size=8 * blocks, **sizes)
    job, run = jobs
    sent: dict[str, dict[Place, float]] = {}
    for sync in ("direct", "reshard"):
        ran = run(job(config, tp=tp, dead=((1, 1),), num_sequences=2, seq_len=4, sync=sync))
        sent[sync] = {
            place: sent_bytes(state.collectives) - sent_besides(ran, place) for place, state in ran.ranks.items()
        }
    most = {sync: max(count for place, count in counts.items() if place[0] == 0) for sync, counts in sent.items()}
    assert most["direct"] / most["reshard"] == pytest.approx((tp - 1) / (tp + 1))
    assert most["direct"] <= wanted * most["reshard"]
    total = {sync: sum(counts.values()) for sync, counts in sent.items()}
    assert total["direct"] / total["reshard"] == pytest.approx(tp / (tp + 1))


def sent_besides(ran: Any, place: Place) -> float:
    """Returns the bytes that a device sends for tensor parallelism, replicated parameters and scalars."""
    said = device_traffic(ran.rules.spec, ran.plan, ran.layout, place, 4, 2, 4)
    return said.total_bytes - said.exchange_bytes


@pytest.mark.parametrize("model", PROOF_SET)
def test_no_dead_slot_costs_what_an_ordinary_job_costs(jobs: Any, model: str) -> None:
    """Catches overhead without failure: an extra collective or an extra byte against plain TP x DP.

    Plain TP (Megatron): per micro-batch and layer two all-reduces forward and two backward over the hidden states, one
    for the embedding, one for the LM head's input gradient, two for the vocabulary-parallel loss (largest logit; sum of
    exponentials and target logit). Plain DP: one all-reduce of the shard's gradients (one bucket here), one of the
    replicated parameters, one of the step's seven scalars.
    """
    job, run = jobs
    config = proof_config(model, num_key_value_heads=16)
    task = job(config, num_sequences=8, micro_batch=2, bucket_bytes=1 << 40)
    ran = run(task)
    tokens, layers, micro_batches = 2 * task.seq_len, config.num_hidden_layers, 2
    hidden_bytes, targets = 4 * tokens * config.hidden_size, 2 * (task.seq_len - 1)
    for state in ran.ranks.values():
        weights = state.tensors["weights"]
        split = {param.name for param in ran.rules.spec.params if param.rule == "sharded"}
        own = sum(4 * tensor.numel() for name, tensor in weights.items() if name in split)
        replicated = sum(4 * tensor.numel() for name, tensor in weights.items() if name not in split)
        expected: Counter[tuple[str, int, int]] = Counter()
        expected["all_reduce", hidden_bytes, 4] += micro_batches * (4 * layers + 2)
        expected["all_reduce", 4 * targets, 4] += micro_batches
        expected["all_reduce", 2 * 4 * targets, 4] += micro_batches
        expected["all_reduce", own, 2] += 1
        expected["all_reduce", replicated, 8] += 1
        expected["all_reduce", 7 * 8, 8] += 1
        assert Counter(state.collectives) == expected


def test_gradients_are_buckets_where_nobody_is_dead(jobs: Any) -> None:
    """Catches a gradient that is copied into its bucket although it could be a view of it."""
    job, run = jobs
    copied: list[int] = []

    def around(model: torch.nn.Module, steps: Any) -> None:
        steps()
        storages = {param.grad.untyped_storage().data_ptr() for param in model.parameters() if param.grad is not None}
        copied.append(len(storages))

    ran = run(job(proof_config("phi3", num_key_value_heads=16)), around)
    # One storage for each bucket of the device and one for the replicated parameters: no tensor of its own.
    buckets = {len(ran.layout.of(place)) + 1 for place in ran.plan.places}
    assert set(copied) == buckets
