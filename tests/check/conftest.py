"""Unsharded runs of small models, computed once: they depend on no plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from runflat.check.reference import Batch
from runflat.check.small import proof_config, small_batch
from runflat.check.verify import Case, Errors, Truth, unsharded, verify


@pytest.fixture(scope="session")
def check() -> Callable[..., Errors]:
    """Returns check(model, case, **overrides): errors of a case for a model of the proof set, references kept."""
    torch.set_num_threads(1)
    kept: dict[object, tuple[PreTrainedConfig, Batch, Truth]] = {}

    def run(model: str, case: Case, **overrides: Any) -> Errors:
        key = (model, case.num_sequences, case.seq_len, case.num_steps, case.seed, repr(overrides))
        if key not in kept:
            config = proof_config(model, **overrides)
            batch = small_batch(config.vocab_size, config.pad_token_id, case.num_sequences, case.seq_len, 1)
            kept[key] = config, batch, unsharded(config, case, batch)
        config, batch, truth = kept[key]
        return verify(config, case, batch, truth=truth)

    return run
