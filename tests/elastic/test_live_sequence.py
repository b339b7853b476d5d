"""A run with tokens split between the split layers loses a device and takes it back; ranks are threads."""

from __future__ import annotations

from typing import Any

import pytest

from runflat.check.diff import compare
from runflat.elastic.launch_threads import ThreadWorkers
from runflat.parallel import tokens
from runflat.parallel.comms import Group
from runflat.plan.batch import even_shares
from runflat.train.checkpoint import newest_checkpoint

STEPS = 10
RUN = (
    "--model.num-layers 1 --layout.tp 3 --layout.replicas 2 --train.global-batch 5 --train.micro-batch 2 "
    f"--data.seq-len 7 --train.steps {STEPS} --train.dtype float64 --train.lift-casts --train.digest-every 1 "
    "--train.timeout-s 20"
)
SPLIT = "--train.sequence-parallel --train.activation-checkpointing --devices emulated --device.rate-tflops 2e-5"


def test_a_loss_and_a_return(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches shares of tokens that stay those of an older degree, or norms that are summed where nothing is split.

    The run that lost nothing splits no tokens. 7, 14 and 21 tokens divide by no degree that the hurt replica has.
    """
    monkeypatch.setattr("runflat.elastic.launch_local.LocalWorkers", ThreadWorkers)
    events = [
        {"event": "kill", "device": "1:1", "step": 2, "phase": "backward"},
        {"event": "return", "device": "1:1", "step": 3},
    ]
    whole = live.train("whole", RUN)
    degrees: set[int] = set()
    real = tokens._reduce_scatter

    def spied(partial: Any, shares: tuple[int, ...], group: Group) -> Any:
        degrees.add(group.size)
        assert shares == even_shares(partial.shape[0], group.size)
        return real(partial, shares, group)

    monkeypatch.setattr(tokens, "_reduce_scatter", spied)
    hurt = live.train("hurt", f"{RUN} {SPLIT}", events)
    assert [(ran.code, ran.error) for ran in (whole, hurt)] == [(0, None)] * 2
    assert [change["joined"] for change in hurt.summary["changes"]] == [["1:1"]]
    assert len(hurt.summary["incidents"]) == 1
    assert degrees == {2, 3}
    ends = [newest_checkpoint(ran.watch.run, pytest.fail) for ran in (whole, hurt)]
    assert [end.progress.step for end in ends] == [STEPS, STEPS]
    found = compare(*ends)
    assert found.whole("weight") <= 1e-11
    assert max(error for error, tensor, _ in found.ranked if tensor == "weight") <= 1e-10
    assert hurt.summary["sample_hash"] == whole.summary["sample_hash"]
