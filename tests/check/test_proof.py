"""The proof: a step of replicas of different degree equals the unsharded step, float64 with the casts lifted.

Gradients, clipped norm, losses, and after three steps weights and both moments, against unmodified transformers. The
small models have windows shorter than the sequence, soft-caps that bite and padding ids among the tokens. Long lists of
layouts run over the in-memory network, one of each sort over gloo.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable, Iterable

import pytest
import torch

from runflat.check.small import PROOF_SET, architecture, proof_config, small_batch, small_config
from runflat.check.verify import TOLERANCE, Case, Errors, plan_case, verify
from runflat.parallel.grad_sync import GradSync
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan import sync_groups

Check = Callable[..., Errors]

OTHERS = [name for name in PROOF_SET if not name.startswith("llama-gqa")]
PAIRS = list(itertools.combinations(range(8), 2))
TRIPLES = list(itertools.combinations(range(8), 3))


def dead(replica: int, slots: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Returns the places of dead slots of one replica."""
    return tuple((replica, slot) for slot in slots)


def seeded_slots(degree: int, seed: int) -> list[int]:
    """Returns the dead slots that leave a replica of 8 at `degree`."""
    return sorted(random.Random(f"{degree} {seed}").sample(range(8), 8 - degree))


@pytest.mark.parametrize("degree", [7, 6, 5, 4, 3, 2, 1])
def test_llama_at_every_degree(check: Check, degree: int) -> None:
    """Catches a layout that is wrong at some degree against a replica at full TP 8."""
    case = Case(dead=dead(0, seeded_slots(degree, 0)), in_memory=degree not in (7, 4, 1))
    assert check("llama-gqa", case).largest < TOLERANCE


@pytest.mark.parametrize("slot", range(8))
def test_llama_with_each_slot_dead(check: Check, slot: int) -> None:
    """Catches a place that is special: the first, the last, one whose units go to a lower or a higher slot."""
    assert check("llama-gqa", Case(dead=((1, slot),), in_memory=True)).largest < TOLERANCE


@pytest.mark.parametrize("degree", [7, 5, 3, 1])
@pytest.mark.parametrize("model", OTHERS)
def test_models_at_lower_degrees(check: Check, model: str, degree: int) -> None:
    """Catches what only one architecture has: biases, per-head norms, windows, soft-caps, fused and tied weights."""
    slots = seeded_slots(degree, OTHERS.index(model))
    case = Case(dead=dead(degree % 4 // 2, slots), in_memory=degree < 7)
    assert check(model, case).largest < TOLERANCE


@pytest.mark.parametrize("slots", random.Random(2).sample(PAIRS, 16), ids=str)
def test_pairs_of_dead_slots(check: Check, slots: tuple[int, ...]) -> None:
    """Catches a pair of losses that leaves KV heads with unequal groups or units in the wrong order."""
    assert check("llama-gqa4", Case(dead=dead(0, slots), micro_batch=5, in_memory=True)).largest < TOLERANCE


@pytest.mark.parametrize("slots", random.Random(3).sample(TRIPLES, 16), ids=str)
def test_triples_of_dead_slots(check: Check, slots: tuple[int, ...]) -> None:
    """Catches a triple of losses whose orphans are dealt to the wrong place."""
    assert check("llama-gqa4", Case(dead=dead(0, slots), micro_batch=5, in_memory=True)).largest < TOLERANCE


@pytest.mark.soak
@pytest.mark.parametrize("slots", PAIRS + TRIPLES, ids=str)
@pytest.mark.parametrize("model", PROOF_SET)
def test_all_pairs_and_triples(check: Check, model: str, slots: tuple[int, ...]) -> None:
    """Catches the one layout of two or three dead slots that the sample misses."""
    case = Case(dead=dead(slots[-1] % 2, slots), in_memory=model not in ("llama-gqa", "llama-gqa4"))
    assert check(model, case).largest < TOLERANCE


# Their plans use the styles that are known; what these do not say stands in a table, or need not be said.
FURTHER = ("gemma", "gemma3_text", "vaultgemma", "glm", "glm4", "cohere", "starcoder2", "phi")
FURTHER_SOAK = (
    *("arcee", "cohere2", "cwm", "ernie4_5", "exaone", "exaone4", "granite", "helium", "hyperclovax", "internlm3"),
    *("iquestcoder", "jais2", "ministral3", "nanochat", "nemotron", "olmo", "smollm3"),
)


@pytest.mark.parametrize("split", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["whole", "split tokens"])
@pytest.mark.parametrize("model", [*FURTHER, *(pytest.param(name, marks=pytest.mark.soak) for name in FURTHER_SOAK)])
def test_further_models(model: str, split: bool) -> None:
    """Catches a model that is accepted but computed wrongly: an embedding with a scale, a fused layer the wrong way."""
    torch.set_num_threads(1)
    config = small_config(architecture(model), 4)
    case = Case(tp=4, dead=((0, 1), (1, 0), (1, 3)), num_steps=2, in_memory=True, sequence_parallel=split)
    batch = small_batch(config.vocab_size, config.pad_token_id, case.num_sequences, case.seq_len, 1)
    assert verify(config, case, batch).largest < TOLERANCE


THREE = {
    "8, 7 and 5": ("llama-gqa", Case(num_replicas=3, num_sequences=7, dead=((1, 3), (2, 0), (2, 6), (2, 7)))),
    "4, 3 and 2": ("phi3", Case(tp=4, num_replicas=3, dead=((1, 0), (2, 1), (2, 2)), in_memory=True)),
    "3, 2 and 1": ("gemma2", Case(tp=4, num_replicas=3, dead=((0, 3), (1, 0), (1, 1), (2, 0), (2, 1), (2, 3)))),
}


@pytest.mark.parametrize("name", THREE)
def test_three_replicas_at_three_degrees(check: Check, name: str) -> None:
    """Catches sync groups that are right for two replicas only."""
    assert check(*THREE[name]).largest < TOLERANCE


@pytest.mark.parametrize("slots", [(5,), (0, 1, 6), (1, 2, 3, 4, 7)], ids=str)
def test_sizes_that_divide_by_nothing(check: Check, slots: tuple[int, ...]) -> None:
    """Catches arithmetic that assumes equal shards: 10 heads with 2 KV heads, 1,000 FFN columns, 503 tokens."""
    sizes = {"num_attention_heads": 10, "num_key_value_heads": 2, "intermediate_size": 1000, "vocab_size": 503}
    assert check("llama-gqa", Case(dead=dead(0, slots), in_memory=True), **sizes).largest < TOLERANCE


@pytest.mark.parametrize("model", ["llama-gqa", "qwen2"])
def test_tied_embeddings(check: Check, model: str) -> None:
    """Catches a tied weight that is updated or counted twice, or gets only one of its two gradients."""
    assert check(model, Case(tp=4, dead=((0, 1),), in_memory=True), tie_word_embeddings=True).largest < TOLERANCE


def test_biases(check: Check) -> None:
    """Catches a row bias that every device adds, or that is summed over the devices of a replica."""
    errors = check("llama-gqa", Case(dead=((0, 1), (1, 6)), in_memory=True), attention_bias=True, mlp_bias=True)
    assert {"self_attn.o_proj.bias", "mlp.down_proj.bias"} <= set(errors.grads)
    assert errors.largest < TOLERANCE


@pytest.mark.parametrize("num_dead", [0, 1, 3])
def test_any_ffn_and_no_dead_slot(check: Check, num_dead: int) -> None:
    """Catches an error that damage hides or needs: the same model healthy, hurt, and hurt in both replicas."""
    places = ((0, 1), (1, 2), (1, 0))[:num_dead]
    case = Case(tp=4, dead=places, num_sequences=4, micro_batch=1, in_memory=True)
    assert check("qwen3", case, intermediate_size=77).largest < TOLERANCE


@pytest.mark.parametrize("model", ["llama-gqa4", "mistral", "qwen3"])
def test_sdpa_equals_eager(check: Check, model: str) -> None:
    """Catches an attention function that is registered without its mask, or drops the window."""
    case = Case(tp=4, dead=((0, 1), (1, 0), (1, 3)), attention="sdpa", in_memory=True)
    assert check(model, case, num_attention_heads=16).largest < TOLERANCE


def test_float32(check: Check) -> None:
    """Catches a float32 run that rounds more than float32 must (a reduction in a lower precision, say)."""
    errors = check("llama-gqa", Case(tp=4, dead=((0, 2),), num_steps=1, dtype=torch.float32))
    assert max(errors.grads.values()) < 1e-5
    assert max(errors.grad_norm, errors.loss) < 1e-6


@pytest.mark.parametrize("model", ["llama-gqa4", "phi3"])
@pytest.mark.parametrize("limit", [2, 4])
def test_exchange(check: Check, monkeypatch: pytest.MonkeyPatch, model: str, limit: int) -> None:
    """Catches an all-to-all exchange that loses, doubles or mixes up units, alone or beside sync groups."""
    monkeypatch.setattr(sync_groups, "MAX_COMMUNICATORS", limit)
    case = Case(tp=4, num_replicas=3, num_sequences=4, dead=((0, 1), (1, 0), (1, 3)))
    _, layout = plan_case(read_rules(build_meta_model(proof_config(model), torch.float64), case.tp), case)
    assert layout.exchange
    assert bool(layout.groups) == (limit > 2)
    assert check(model, case).largest < TOLERANCE


def test_exchange_at_the_real_limit(check: Check) -> None:
    """Catches an exchange that only a lowered limit reaches: a layout whose groups really exceed 16 communicators."""
    places = (*dead(1, (2, 3)), *dead(2, (4, 5, 6)), *dead(3, (0, 1, 2, 3, 4, 5)))
    case = Case(num_replicas=4, num_sequences=9, num_steps=1, dead=places, in_memory=True)
    _, layout = plan_case(read_rules(build_meta_model(proof_config("llama-gqa4"), torch.float64), case.tp), case)
    assert layout.exchange
    assert check("llama-gqa4", case, num_hidden_layers=1).largest < TOLERANCE


def test_a_proof_leaves_nothing_in_memory(check: Check) -> None:
    """Catches hooks that keep gradients and buffers of every layout that was proved: 43 MB of each at TP 8."""

    def alive() -> int:
        gc.collect()
        return sum(type(found) is GradSync for found in gc.get_objects())

    before = alive()
    check("llama-gqa4", Case(tp=2, num_steps=1, in_memory=True))
    assert alive() == before
