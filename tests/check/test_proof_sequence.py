"""The proof with tokens split between the split layers: the cases of `test_proof.py`, those where it differs first.

Shares of tokens are uneven at every degree that does not divide the micro-batch, and empty where there are fewer tokens
than devices; parameters between the split layers have addends of their gradient on all devices of a replica.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from runflat.check.small import PROOF_SET
from runflat.check.verify import TOLERANCE, Case, Errors

Check = Callable[..., Errors]


def case(*dead: tuple[int, int], tp: int = 4, num_replicas: int = 2, in_memory: bool = True) -> Case:
    """Returns a case with the dead places."""
    return Case(tp=tp, num_replicas=num_replicas, dead=dead, in_memory=in_memory, sequence_parallel=True)


CASES: dict[str, Case] = {
    "8 and 7": case((1, 3), tp=8),
    "8 and 1": case(*((0, slot) for slot in range(7)), tp=8),
    "8, 7 and 5": case((1, 3), (2, 0), (2, 6), (2, 7), tp=8, num_replicas=3),
    "3, 2 and 1": case((0, 3), (1, 0), (1, 1), (2, 0), (2, 1), (2, 3), num_replicas=3),
    "nobody dead": case(),
    "one replica": replace(case((0, 1), num_replicas=1), num_sequences=2),
    "fewer tokens than devices": replace(case((1, 0), tp=8, in_memory=False), seq_len=3, micro_batch=1),
    "another last micro-batch": replace(case((0, 1), (1, 2)), seq_len=5, num_sequences=9, recompute=True),
    "resharded": replace(case((0, 1), (1, 0), (1, 2)), sync="reshard"),
    "sdpa": replace(case((0, 1), (1, 0), (1, 3)), attention="sdpa"),
}


@pytest.mark.parametrize("name", CASES)
def test_layouts(check: Check, name: str) -> None:
    """Catches shares that are right for one degree or one length only."""
    assert check("llama-gqa4", CASES[name]).largest < TOLERANCE


@pytest.mark.parametrize("model", PROOF_SET)
def test_models(check: Check, model: str) -> None:
    """Catches what only one architecture has: norms after a block, biases, norms on split heads, fused weights."""
    one = replace(case((0, 1), (1, 0), (1, 2)), recompute=list(PROOF_SET).index(model) % 2 == 0, num_steps=2)
    assert check(model, one).largest < TOLERANCE


def test_tied_embeddings_and_biases(check: Check) -> None:
    """Catches a row bias whose gradient is that of a part of the tokens, or a tied weight with one of its two."""
    errors = check("llama-gqa", case((0, 1), (1, 2)), attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    assert {"self_attn.o_proj.bias", "mlp.down_proj.bias"} <= set(errors.grads)
    assert errors.largest < TOLERANCE


@pytest.mark.parametrize("model", PROOF_SET)
def test_zero1(check: Check, model: str) -> None:
    """Catches a parameter between the split layers whose owner gets the addend of one device of a replica only."""
    one = replace(case((0, 1), (1, 0), (1, 2)), optimizer="zero1", num_steps=2)
    assert check(model, one).largest < TOLERANCE


ZERO1: dict[str, Case] = {
    "3, 2 and 1": CASES["3, 2 and 1"],
    "one replica": CASES["one replica"],
    "fewer tokens than devices": CASES["fewer tokens than devices"],
}


@pytest.mark.parametrize("name", ZERO1)
def test_zero1_layouts(check: Check, name: str) -> None:
    """Catches owners that are right for some degrees only, or where a device has no token."""
    assert check("llama-gqa4", replace(ZERO1[name], optimizer="zero1")).largest < TOLERANCE


def test_bf16(check: Check) -> None:
    """Catches hidden states that are gathered or summed in another type than layers compute in."""
    half = replace(case((0, 1), (1, 2)), num_steps=1, dtype=torch.float32, compute_dtype=torch.bfloat16)
    split, whole = (check("qwen3", replace(half, sequence_parallel=on)).grads for on in (True, False))
    assert all(split[kind] < 1.5 * error for kind, error in whole.items())


@pytest.mark.soak
@pytest.mark.parametrize("degree", [7, 6, 5, 4, 3, 2, 1])
@pytest.mark.parametrize("model", PROOF_SET)
def test_every_degree(check: Check, model: str, degree: int) -> None:
    """Catches the one degree or model that the sample misses, over gloo."""
    dead = [(0, slot) for slot in range(degree, 8)]
    assert check(model, case(*dead, tp=8, in_memory=False)).largest < TOLERANCE


@pytest.mark.soak
@pytest.mark.parametrize("slot", range(8))
@pytest.mark.parametrize("model", PROOF_SET)
def test_each_slot_dead(check: Check, model: str, slot: int) -> None:
    """Catches a place that is special: the first, the last, one whose share is the smaller one."""
    assert check(model, replace(case((1, slot), tp=8), seq_len=7)).largest < TOLERANCE
