"""A step that some have committed is applied by all others too, from the gradients that they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runflat.check.diff import compare
from runflat.train.checkpoint import newest_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

LOOP = f"{Path(__file__).with_name('lagging_loop.py')}:train"
STEP = 3
ARGUMENTS = "--layout.tp 2 --layout.replicas 2 --train.global-batch 8 --train.steps 6 --train.dtype float64"


def test_who_has_not_seen_the_barrier_rolls_forward(live: Any) -> None:
    """Catches a committed step that is thrown away or run twice because one survivor had not applied it.

    1:1 does not learn that the barrier of step 3 is passed; 0:1 is killed when it has learnt it but not applied it;
    the two others have applied the step.
    """
    whole = live.train("whole", f"{ARGUMENTS} --train.lift-casts", loop=LOOP)
    events = [{"event": "kill", "device": "0:1", "step": STEP, "phase": "update"}]
    hurt = live.train("hurt", f"{ARGUMENTS} --train.lift-casts", events, loop=LOOP)
    for ran in (whole, hurt):
        assert (ran.code, ran.error) == (0, None)
        assert [row["step"] for row in ran.watch.steps()] == list(range(6))
    assert whole.summary["incidents"] == []
    (incident,) = hurt.summary["incidents"]
    assert (incident["action"], incident["devices"], incident["step"]) == (
        "forward",
        ["0:1"],
        STEP + 1,
    )
    plan = hurt.watch.records("plan")[-1]
    assert (plan["action"], plan["committed"]) == ("forward", STEP + 1)
    assert "1:1" in plan["reason"]
    ends = [newest_checkpoint(ran.watch.run, pytest.fail) for ran in (whole, hurt)]
    found = compare(*ends)
    assert max(found.whole(tensor) for tensor in ("weight", "exp_avg", "exp_avg_sq")) <= 1e-11
    assert hurt.summary["sample_hash"] == whole.summary["sample_hash"]
