"""Runs with sharded optimizer state lose devices and take them back; ranks are threads.

The run that lost nothing keeps all optimizer state on every holder: whatever moves wrongly makes a difference to it.
"""

from __future__ import annotations

from typing import Any

import pytest

from runflat.check.diff import compare
from runflat.elastic.launch_threads import ThreadWorkers
from runflat.train.checkpoint import newest_checkpoint

STEPS = 12
RUN = (
    "--model.num-layers 1 --layout.tp 3 --layout.replicas 2 --train.global-batch 4 --train.micro-batch 2 "
    f"--data.seq-len 8 --train.steps {STEPS} --train.dtype float64 --train.lift-casts --train.digest-every 1 "
    "--train.timeout-s 20"
)
ZERO = f"{RUN} --train.optimizer zero1 --devices emulated --device.rate-tflops 2e-5"
BACK = ("memory", "checkpoint", "start")


def kill(device: str, step: int, phase: str = "backward") -> dict[str, Any]:
    """Returns a kill for --inject."""
    return {"event": "kill", "device": device, "step": step, "phase": phase}


def back(device: str, step: int) -> dict[str, Any]:
    """Returns a return for --inject."""
    return {"event": "return", "device": device, "step": step}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are threads."""
    monkeypatch.setattr("runflat.elastic.launch_local.LocalWorkers", ThreadWorkers)


def check_alike(whole: Any, hurt: Any) -> None:
    """Both runs ended well, with the same weights, moments and samples."""
    assert [(ran.code, ran.error) for ran in (whole, hurt)] == [(0, None)] * 2
    ends = [newest_checkpoint(ran.watch.run, pytest.fail) for ran in (whole, hurt)]
    assert [end.progress.step for end in ends] == [STEPS, STEPS]
    found = compare(*ends)
    assert max(found.whole(tensor) for tensor in ("weight", "exp_avg", "exp_avg_sq")) <= 1e-11
    assert hurt.summary["sample_hash"] == whole.summary["sample_hash"]


@pytest.mark.usefixtures("threads")
def test_losses_and_returns(live: Any) -> None:
    """Catches a piece that moves from who has it not, and weights that are taken for new before they have come.

    The second device goes between the barrier of a step and its update: the others have committed the step, and wait in
    vain for the weights of its pieces, which their mirrors have.
    """
    whole = live.train("whole", RUN)
    events = [kill("1:1", 2), kill("0:2", 4, "update"), back("1:1", 6), back("0:2", 8)]
    hurt = live.train("hurt", f"{ZERO} --train.memory-every 0", events)
    check_alike(whole, hurt)
    assert [incident["devices"] for incident in hurt.summary["incidents"]] == [["1:1"], ["0:2"]]
    assert not {incident["action"] for incident in hurt.summary["incidents"]} & set(BACK)
    assert [change["joined"] for change in hurt.summary["changes"]] == [["1:1"], ["0:2"]]


@pytest.mark.usefixtures("threads")
def test_all_devices_of_a_replica_go_at_once(live: Any) -> None:
    """Catches an owner and a mirror in one replica, which here is a machine: something would be lost with it."""
    whole = live.train("whole", RUN)
    events = [*(kill(f"1:{slot}", 4, "sync") for slot in range(3)), *(back(f"1:{slot}", 6) for slot in range(3))]
    hurt = live.train("hurt", f"{ZERO} --train.memory-every 0", events)
    check_alike(whole, hurt)
    assert {name for incident in hurt.summary["incidents"] for name in incident["devices"]} == {"1:0", "1:1", "1:2"}
    assert not {incident["action"] for incident in hurt.summary["incidents"]} & set(BACK)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("memory_every", "action"), [(2, "memory"), (0, "checkpoint")])
def test_where_there_is_no_mirror_the_run_goes_back(
    live: Any, capsys: pytest.CaptureFixture[str], memory_every: int, action: str
) -> None:
    """Catches a run that goes on without the moments that only the lost device had, or that is not told so before."""
    alone = "--layout.replicas 1 --train.checkpoint-every 3"
    whole = live.train("whole", f"{RUN} {alone}")
    capsys.readouterr()
    hurt = live.train("hurt", f"{ZERO} {alone} --train.memory-every {memory_every}", [kill("0:1", 5)])
    assert "have no mirror" in " ".join(capsys.readouterr().out.split())
    check_alike(whole, hurt)
    assert [incident["action"] for incident in hurt.summary["incidents"]] == [action]
