"""A run goes on where another stopped, whether optimizer state was sharded there or is here; ranks are threads."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from safetensors.torch import load_file

from runflat.check.diff import compare
from runflat.elastic.launch_threads import ThreadWorkers
from runflat.train.checkpoint import newest_checkpoint
from runflat.train.export import export

STEPS = 4
RUN = (
    "--model.num-layers 1 --layout.tp 3 --layout.replicas 3 --layout.dead 0:1 --train.global-batch 5 "
    f"--train.micro-batch 2 --data.seq-len 8 --train.steps {STEPS} --train.dtype float64 --train.lift-casts "
    "--train.digest-every 1 --train.timeout-s 20 --devices emulated --device.rate-tflops 2e-5"
)
KINDS = {"replicated": "zero1", "zero1": "replicated"}


@pytest.mark.parametrize("first", KINDS)
def test_goes_on_under_the_other_kind(
    live: Any, first: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches moments that do not come along, a mode that stays what it was, and a run that does not say what it does.

    The dead slot is alive again after the break: the checkpoint is read under another layout too.
    """
    monkeypatch.setattr("runflat.elastic.launch_local.LocalWorkers", ThreadWorkers)
    whole = live.train("whole", f"{RUN} --train.optimizer replicated")
    assert "zero1" not in capsys.readouterr().out
    begun = live.train("begun", f"{RUN} --train.optimizer {first} --train.stop-after 2")
    said = capsys.readouterr().out
    ended = live.train("ended", f"--resume {begun.watch.run} --train.optimizer {KINDS[first]}")
    said += capsys.readouterr().out
    assert [(ran.code, ran.error) for ran in (whole, begun, ended)] == [(0, None)] * 3
    assert said.count("optimizer: zero1, up to ") == 1
    ends = [newest_checkpoint(ran.watch.run, pytest.fail) for ran in (whole, begun)]
    assert [end.progress.step for end in ends] == [STEPS, STEPS]
    found = compare(*ends)
    assert max(found.whole(tensor) for tensor in ("weight", "exp_avg", "exp_avg_sq")) <= 1e-11
    weights = []
    for ran, end in zip((whole, begun), ends, strict=True):
        to = ran.watch.run.with_name(f"{ran.watch.run.name}-model")
        export(end, ran.watch.run, to, "float64", lambda *_: None)
        weights.append(load_file(to / "model.safetensors"))
        shutil.rmtree(to)
    assert weights[0].keys() == weights[1].keys()
    assert all((weights[1][name] - tensor).abs().max() <= 1e-11 for name, tensor in weights[0].items())


def test_reshard_is_refused(live: Any) -> None:
    """Catches a run whose units have owners that do not sum their gradient, and a refusal without a remedy."""
    ran = live.train("refused", f"{RUN} --train.optimizer zero1 --train.sync reshard")
    assert ran.code == 2
    assert "train.optimizer is zero1 and train.sync is reshard" in ran.error
    assert "use train.sync direct" in ran.error
