"""A whole run done again by one process with an unmodified model, and the run's losses and checkpoint held against it.

What a worker truly computed shows here and nowhere else: a sequence left out or used twice changes the loss of its
step, a step applied twice or a flipped bit changes weights. The comparison is meant for float64 with transformers'
casts lifted, where nothing but the order of summation differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from runflat.check.checker import Books, Counts
from runflat.check.reference import AdamW, reference_optimizer
from runflat.errors import CheckpointError
from runflat.parallel.casts import LiftCasts
from runflat.plan.units import TENSORS
from runflat.train.checkpoint import newest_checkpoint
from runflat.train.shards import checkpoint_tensors

LOSS_TOLERANCE = 1e-9
"""Relative; the noise is near 1e-14."""
TENSOR_TOLERANCE = 1e-7
"""Largest difference of an element over the tensor's largest element, after thousands of steps."""
Report = Callable[[int], object]


@dataclass(frozen=True)
class Settings:
    """First weights, length of a sequence, and the optimizer at a constant rate; `clip_norm` of 0 does not clip."""

    seed: int
    seq_len: int
    optimizer: AdamW


@dataclass(frozen=True)
class Truth:
    """Loss of each step, and by tensor kind (weight, exp_avg, exp_avg_sq) and name what the last step left."""

    losses: tuple[float, ...]
    tensors: Mapping[str, Mapping[str, torch.Tensor]]


def unsharded_run(
    config: PreTrainedConfig, settings: Settings, tokens: Path, batches: Iterable[list[int]], report: Report
) -> Truth:
    """Train from the first step on; `batches` are the sequence indices of each step, `report(step)` is progress."""
    text = np.load(tokens, mmap_mode="r")
    model = first_model(config, settings.seed)
    optimizer, clip_norm = reference_optimizer(model, settings.optimizer), settings.optimizer.clip_norm
    losses = []
    for step, indices in enumerate(batches):
        rows = [text[index * settings.seq_len : (index + 1) * settings.seq_len] for index in indices]
        batch = torch.from_numpy(np.stack(rows).astype(np.int64))
        optimizer.zero_grad()
        with LiftCasts():
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
        report(step)
    named = dict(model.named_parameters())
    return Truth(
        tuple(losses),
        {
            "weight": {name: param.detach() for name, param in named.items()},
            "exp_avg": {name: optimizer.state[param]["exp_avg"] for name, param in named.items()},
            "exp_avg_sq": {name: optimizer.state[param]["exp_avg_sq"] for name, param in named.items()},
        },
    )


def first_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """The unmodified float64 model with a run's first weights: matrices drawn by (seed, name), vectors by the model."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim > 1:
                digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
                drawn = torch.empty(param.shape, dtype=torch.float32)
                param.copy_(drawn.normal_(0.0, config.initializer_range, generator=generator))
    model.train()
    return model


def check_run(
    run: Path, books: Books, counts: Counts, config: PreTrainedConfig, settings: Settings, report: Report
) -> None:
    """Add to `counts` where losses or the newest checkpoint are not those of the unsharded run."""
    (tokens,) = (run / "tokens").glob("*.npy")
    total = int(books.progress["step"])

    def batches() -> Iterable[list[int]]:
        for step in range(total):
            yield [books.order.sequence(step * books.batch + offset) for offset in range(books.batch)]

    truth = unsharded_run(config, settings, tokens, batches(), report)
    compare_losses(books, truth, counts)
    compare_tensors(run, truth, counts)


def compare_losses(books: Books, truth: Truth, counts: Counts) -> None:
    """One finding at the first step whose loss differs; later ones follow from it."""
    for row in sorted(books.steps, key=lambda row: int(row["step"])):
        loss, step = row["loss"], row["step"]
        if loss is None or step >= len(truth.losses):
            continue
        wanted = truth.losses[step]
        if not abs(loss - wanted) <= LOSS_TOLERANCE * abs(wanted):
            text = f"the loss of step {step} is {loss:.12g}, unsharded {wanted:.12g}: other sequences or other weights"
            counts.find("mismatches", 1, text)
            return


def compare_tensors(run: Path, truth: Truth, counts: Counts) -> None:
    """A finding for each tensor of the newest checkpoint that differs, or for a checkpoint that cannot be read."""

    def broken(text: str) -> None:
        counts.find("mismatches", 1, text)

    try:
        checkpoint = newest_checkpoint(run, broken)
        for kind in TENSORS:
            read = checkpoint_tensors(checkpoint, kind)
            for param in checkpoint.spec.params:
                everything: Any = () if param.dim is None else ((0, param.shape[param.dim]),)
                wanted = truth.tensors[kind][param.name]
                distance = float((read(param, everything).double() - wanted).abs().max())
                size = float(wanted.abs().max())
                if not distance <= TENSOR_TOLERANCE * size:
                    broken(f"{kind} of {param.name} is off by {distance:.3g}, where the largest element is {size:.3g}")
    except CheckpointError as error:
        broken(str(error))
