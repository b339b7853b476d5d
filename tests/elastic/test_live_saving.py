"""A disk that is slow while devices are lost: training goes on, and what becomes visible is whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from runflat.check.diff import compare
from runflat.check.live import Watch, until
from runflat.train.checkpoint import newest_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]
LOOP = f"{Path(__file__).with_name('slow_disk_loop.py')}:train"
STEP, EVERY = 4, 4
ARGUMENTS = (
    f"--layout.tp 2 --layout.replicas 2 --train.global-batch 8 --train.checkpoint-every {EVERY} "
    "--train.keep-checkpoints 2 --train.dtype float64 --train.lift-casts --train.steps 1000000 "
)


def test_a_loss_while_a_save_is_in_flight(live: Any) -> None:
    """Catches training that waits for the disk, and a save of a plan that is over published late, or in the way.

    One device's disk holds up the save of step 4. Training goes on, a device is lost, and the next save waits.
    """
    published: list[set[str]] = []

    def checkpoints(run: Path) -> set[str]:
        return {path.name for path in (run / "checkpoints").glob("step-*")}

    def act(watch: Watch) -> None:
        until("the slow disk", (watch.run / "busy").exists, 100.0)
        watch.reached(STEP + 2)  # while the shard of step 4 is in the making
        published.append(checkpoints(watch.run))
        os.kill(watch.pid("1:1"), signal.SIGKILL)
        until("the loss", lambda: watch.records("incident"))
        (watch.run / "go").touch()
        watch.reached(3 * EVERY + 1)
        until("a checkpoint", lambda: f"step-{3 * EVERY:08d}" in checkpoints(watch.run))
        os.kill(os.getpid(), signal.SIGINT)

    hurt = live.train("hurt", ARGUMENTS, alongside=act, loop=LOOP)
    assert (hurt.code, hurt.error) == (130, None)
    assert published == [set()]
    end = hurt.summary["step"]
    names = sorted(path.name for path in (hurt.watch.run / "checkpoints").iterdir())
    assert len(names) == 2
    assert names[-1] == f"step-{end:08d}"
    whole = live.train("whole", f"{ARGUMENTS} --train.stop-after {end} --layout.dead 1:1", loop=LOOP, alongside=go)
    ends = [newest_checkpoint(ran.watch.run, pytest.fail) for ran in (whole, hurt)]
    assert compare(*ends).whole("weight") <= 1e-10
    assert hurt.summary["sample_hash"] == whole.summary["sample_hash"]


def go(watch: Watch) -> None:
    """No slow disk here."""
    until("the folder", watch.run.exists)
    (watch.run / "go").touch()
