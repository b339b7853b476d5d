"""A run that computes in bf16 stops, goes on, and is exported: its float32 state comes through; ranks are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from runflat.elastic.launch_threads import ThreadWorkers
from runflat.train.checkpoint import newest_checkpoint
from runflat.train.export import export
from runflat.train.shards import checkpoint_tensors

STEPS = 6
RUN = (
    "--model.num-layers 1 --layout.tp 2 --layout.replicas 2 --train.global-batch 4 --data.seq-len 8 --train.lr 1e-2 "
    f"--train.steps {STEPS} --train.dtype bfloat16 --train.activation-checkpointing --train.timeout-s 20"
)


def test_resumed_and_exported(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches float32 weights or moments that are rounded to bf16 on their way into a checkpoint, or out of it."""
    monkeypatch.setattr("runflat.elastic.launch_local.LocalWorkers", ThreadWorkers)
    whole = live.train("whole", RUN)
    begun = live.train("begun", f"{RUN} --train.stop-after 3")
    ended = live.train("ended", f"--resume {begun.watch.run}")
    assert [(ran.code, ran.error) for ran in (whole, begun, ended)] == [(0, None)] * 3
    losses = [[row["loss"] for row in ran.watch.steps()] for ran in (whole, begun)]
    assert len(losses[0]) == STEPS
    assert losses[0] == losses[1]

    end = newest_checkpoint(begun.watch.run, pytest.fail)
    read = checkpoint_tensors(end, "weight")
    masters = {param.name: read(param, ((0, param.shape[param.dim or 0]),)) for param in end.spec.params}
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters.values())
    for dtype in ("float32", "bfloat16"):
        folder = begun.watch.run / f"model-{dtype}"
        export(end, begun.watch.run, folder, dtype, lambda *_: None)
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == getattr(torch, dtype)
        weights = dict(model.named_parameters())
        assert weights.keys() == masters.keys()
        assert all(torch.equal(weights[name], master.to(model.dtype)) for name, master in masters.items())
