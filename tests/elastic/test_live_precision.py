"""A run that computes in bf16 and again in backward loses a device and takes it back, as any other."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from runflat.train.checkpoint import newest_checkpoint
from runflat.train.shards import checkpoint_tensors

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

STEPS = 14
HALF = (
    f"--layout.tp 2 --layout.replicas 2 --train.global-batch 8 --train.steps {STEPS} --train.dtype bfloat16 "
    "--train.activation-checkpointing --train.digest-every 1 --train.lr 1e-3"
)
PACED = "--devices emulated --device.rate-tflops 4e-4 --profile 1"
BOUND = 0.02
"""Relative difference of a loss: bf16 has 8 bits, and the sums inside a replica depend on its degree."""


def test_a_loss_and_a_return_in_bf16(live: Any) -> None:
    """Catches holders whose bits differ, layers that keep old weights after a move, state that is not float32."""
    events = [
        {"event": "kill", "device": "1:1", "step": 3, "phase": "backward"},
        {"event": "return", "device": "1:1", "step": 4},
    ]
    whole = live.train("whole", HALF)
    hurt = live.train("hurt", f"{HALF} {PACED}", events)
    assert [(ran.code, ran.error) for ran in (whole, hurt)] == [(0, None)] * 2
    assert [change["joined"] for change in hurt.summary["changes"]] == [["1:1"]]
    assert len(hurt.summary["incidents"]) == 1
    pairs = list(zip(whole.watch.steps(), hurt.watch.steps(), strict=True))
    assert len(pairs) == STEPS
    assert all(abs(a["loss"] - b["loss"]) < BOUND * a["loss"] for a, b in pairs)
    assert pairs[-1][0]["loss"] < pairs[0][0]["loss"]
    end = newest_checkpoint(hurt.watch.run, pytest.fail)
    for kind in ("weight", "exp_avg"):
        read = checkpoint_tensors(end, kind)
        assert {read(param, ((0, param.shape[param.dim or 0]),)).dtype for param in end.spec.params} == {torch.float32}
    step = hurt.watch.steps()[-1]
    assert 0 < step["mfu"] < 1
    assert step["peak_bytes"] > 1 << 20
    assert {"data", "forward", "backward", "sync", "commit", "update"} <= set(step["replicas"][0]["parts_s"])
    trace = json.loads((hurt.watch.run / "profile" / "trace.json").read_text())["traceEvents"]
    assert {event["cat"] for event in trace if event["ph"] == "X"} == {"step", "tensor parallel", "exchange"}
