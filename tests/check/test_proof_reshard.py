"""The proof for `--sync reshard`: the cases of `test_proof.py`, those where it differs from `direct` first.

Columns follow the most reduced replica, so every other one moves gradients inside, and a replica that is hurt in
another slot moves some too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from runflat.check.small import PROOF_SET
from runflat.check.verify import TOLERANCE, Case, Errors
from runflat.plan.plan import Place

Check = Callable[..., Errors]


def case(*dead: Place, tp: int = 4, num_replicas: int = 2, in_memory: bool = True) -> Case:
    """Returns a case with the dead places."""
    return Case(tp=tp, num_replicas=num_replicas, dead=dead, in_memory=in_memory, sync="reshard")


CASES: dict[str, Case] = {
    "8 and 7": case((1, 3), tp=8),
    "7 and 7, other slots": case((0, 0), (1, 7), tp=8),
    "8, 7 and 5": case((1, 3), (2, 0), (2, 6), (2, 7), tp=8, num_replicas=3, in_memory=False),
    "4, 3 and 2": case((1, 0), (2, 1), (2, 2), num_replicas=3, in_memory=False),
    "3, 2 and 1": case((0, 3), (1, 0), (1, 1), (2, 0), (2, 1), (2, 3), num_replicas=3),
    "nobody dead": case(),
    "one replica": replace(case((0, 1), num_replicas=1), num_sequences=2),
}


@pytest.mark.parametrize("name", CASES)
def test_degrees(check: Check, name: str) -> None:
    """Catches moves that are right for one reduced degree or one dead slot only."""
    assert check("llama-gqa", CASES[name]).largest < TOLERANCE


@pytest.mark.parametrize("model", [name for name in PROOF_SET if name != "llama-gqa"])
def test_models(check: Check, model: str) -> None:
    """Catches what only one architecture has: fused weights in several entries, biases, norms on split heads, ties."""
    assert check(model, case((0, 1), (1, 0), (1, 2))).largest < TOLERANCE


def test_sizes_that_divide_by_nothing(check: Check) -> None:
    """Catches arithmetic that assumes equal shards: 10 heads with 2 KV heads, 1,000 FFN columns, 503 tokens."""
    sizes = {"num_attention_heads": 10, "num_key_value_heads": 2, "intermediate_size": 1000, "vocab_size": 503}
    assert check("llama-gqa", case((0, 1), (0, 6), (1, 2), tp=8), **sizes).largest < TOLERANCE


@pytest.mark.soak
@pytest.mark.parametrize("degree", [7, 6, 5, 4, 3, 2, 1])
@pytest.mark.parametrize("model", PROOF_SET)
def test_every_degree(check: Check, model: str, degree: int) -> None:
    """Catches the one degree or model that the sample misses, over gloo."""
    dead = [(0, slot) for slot in range(degree, 8)]
    assert check(model, case(*dead, tp=8, in_memory=False)).largest < TOLERANCE
