"""The proof for `zero1`: the cases of `test_proof.py`, and that owners, mirrors and the rest have the same bits.

Gradients and moments are compared as owners and mirrors have them, weights on all holders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from runflat.check.small import PROOF_SET, proof_config
from runflat.check.verify import TOLERANCE, Case, Errors, plan_case
from runflat.parallel.owned_sync import OwnedSync
from runflat.parallel.scatter import Scatter
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan import sync_groups
from runflat.plan.plan import Place

Check = Callable[..., Errors]


def case(*dead: Place, tp: int = 4, num_replicas: int = 3, in_memory: bool = True) -> Case:
    """Returns a case with the dead places."""
    return Case(tp=tp, num_replicas=num_replicas, num_sequences=4, dead=dead, in_memory=in_memory, optimizer="zero1")


CASES: dict[str, tuple[str, Case]] = {
    "nobody dead": ("llama-gqa4", case(in_memory=False)),
    "two replicas": ("llama-gqa", case((1, 3), num_replicas=2)),
    "4, 3 and 2": ("phi3", case((1, 0), (2, 1), (2, 2), in_memory=False)),
    "3, 2 and 1": ("gemma2", case((0, 3), (1, 0), (1, 1), (2, 0), (2, 1), (2, 3))),
    "one replica": ("llama-gqa4", replace(case((0, 1), num_replicas=1), num_sequences=2)),
    "partial norms": ("qwen3", case((0, 2))),
}


@pytest.mark.parametrize("name", CASES)
def test_degrees(check: Check, name: str) -> None:
    """Catches a piece that is summed without a holder, updated from other bits, or not brought to all holders."""
    assert check(*CASES[name]).largest < TOLERANCE


def test_tied_embeddings_and_biases(check: Check) -> None:
    """Catches a tied weight that is owned twice, and a bias with rows shorter than its unit."""
    changes = {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    assert check("llama-gqa", case((0, 1)), **changes).largest < TOLERANCE


def test_exchange(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches groups without a communicator whose pieces get no sum, no mirror or no weights."""
    monkeypatch.setattr(sync_groups, "MAX_COMMUNICATORS", 4)
    hurt = case((0, 1), (1, 0), (1, 3))
    _, layout = plan_case(read_rules(build_meta_model(proof_config("llama-gqa4"), torch.float64), 4), hurt)
    assert layout.exchange
    assert layout.groups
    assert check("llama-gqa4", hurt).largest < TOLERANCE


def test_holders_have_the_same_bits_in_float32(check: Check) -> None:
    """Catches an update that rounds otherwise where a mirror's pieces lie otherwise in memory than the owner's."""
    errors = check("llama-gqa4", replace(case((0, 1)), dtype=torch.float32))
    assert max(errors.weights.values()) < 1e-2  # infinite where two differ in a bit


def skip_gather(patch: pytest.MonkeyPatch) -> None:
    """Weights that a device does not keep stay as they were."""
    patch.setattr(OwnedSync, "gather", lambda self: None)


def lose_the_mirror(patch: pytest.MonkeyPatch) -> None:
    """A mirror updates from its own gradient instead of the sum."""
    patch.setattr(Scatter, "take", lambda self, grads: None)


def keep_nothing_of_others(patch: pytest.MonkeyPatch) -> None:
    """The norm is that of one device's pieces twice over."""
    real = OwnedSync.squared_norm
    patch.setattr(OwnedSync, "squared_norm", lambda self: 2 * real(self))


@pytest.mark.parametrize("mutate", [skip_gather, lose_the_mirror, keep_nothing_of_others])
def test_mutation_is_caught(
    check: Check, monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Catches a proof that would pass whatever the exchange did."""
    mutate(monkeypatch)
    assert check("llama-gqa4", case((0, 1))).largest > 1000 * TOLERANCE


@pytest.mark.soak
@pytest.mark.parametrize("degree", [7, 6, 5, 4, 3, 2, 1])
@pytest.mark.parametrize("model", PROOF_SET)
def test_every_degree(check: Check, model: str, degree: int) -> None:
    """Catches the one degree or model that the sample misses, over gloo."""
    dead = [(0, slot) for slot in range(degree, 8)]
    assert check(model, case(*dead, tp=8, num_replicas=2 + degree % 2, in_memory=False)).largest < TOLERANCE
