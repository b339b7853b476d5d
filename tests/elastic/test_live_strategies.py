"""Each strategy on real processes: whoever leaves, waits or starts again, the run is the one that lost nothing."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from runflat.check.diff import compare
from runflat.check.live import Watch, until
from runflat.cli import run as runflat
from runflat.train.checkpoint import newest_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

STEPS = 12
LAYOUT = f"--layout.tp 2 --layout.replicas 2 --train.global-batch 8 --train.steps {STEPS}"
EXACT = "--train.dtype float64 --train.lift-casts"
PACED = "--devices emulated --device.rate-tflops 1.5e-4"
"""Steps of a quarter of a second, so that a device has the time to come back."""
LOSS = {"event": "kill", "device": "1:1", "step": 3, "phase": "backward"}
RETURN = {"event": "return", "device": "1:1", "step": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, live_text: Any, live_class: Any) -> Watch:
    """The run without failure."""
    ran = live_class(tmp_path_factory.mktemp("whole"), live_text).train("whole", f"{LAYOUT} {EXACT}")
    assert (ran.code, ran.error) == (0, None)
    watch: Watch = ran.watch
    return watch


def check_same(hurt: Watch, whole: Watch) -> None:
    """Weights, samples and steps are those of the run without failure; every device-second is in the ledger."""
    ends = [newest_checkpoint(watch.run, pytest.fail) for watch in (whole, hurt)]
    assert [end.progress.step for end in ends] == [STEPS, STEPS]
    assert compare(*ends).whole("weight") <= 1e-11
    summary = hurt.summary()
    assert summary["sample_hash"] == whole.summary()["sample_hash"]
    assert [row["step"] for row in hurt.steps()] == list(range(STEPS))
    num_devices = len(hurt.devices())
    assert sum(summary["device_s"].values()) == pytest.approx(num_devices * summary["wall_s"], rel=1e-6)


def shares(watch: Watch) -> list[dict[int, int]]:
    """Sequences by replica of each step."""
    return [{r["replica"]: r["num_samples"] for r in row["replicas"]} for row in watch.steps()]


def test_drop(live: Any, whole: Watch) -> None:
    """Catches a hit replica that goes on, loses a committed step as it leaves, or does not come back whole."""
    ran = live.train("drop", f"{LAYOUT} {EXACT} {PACED} --on-failure drop", [LOSS, RETURN])
    assert (ran.code, ran.error) == (0, None)
    check_same(ran.watch, whole)
    (incident,) = ran.summary["incidents"]
    assert (incident["strategy"], incident["devices"]) == ("drop", ["1:1"])
    assert shares(ran.watch)[3] == {0: 8}
    (change,) = ran.summary["changes"]
    assert change["joined"] == ["1:0", "1:1"]
    assert shares(ran.watch)[-1] == {0: 4, 1: 4}
    assert ran.summary["device_s"]["idle"] > 0


def test_spare(live: Any, whole: Watch, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a spare that does not take the slot with the right units, and a returned device that is not one.

    1:1 dies and s0 takes its slot; 1:1 comes back as a spare; 0:1 is asked to leave and 1:1 takes its slot.
    """

    def by_word(watch: Watch) -> None:
        until("s0 to stand by", lambda: watch.state("s0") == "standby", 120)
        assert runflat(["device", str(watch.run), "1:1", "kill"]) == 0
        until("s0 to work", lambda: watch.state("s0") == "active")
        assert runflat(["device", str(watch.run), "1:1", "return"]) == 0
        until("1:1 to stand by", lambda: watch.state("1:1") == "standby")
        assert runflat(["device", str(watch.run), "0:1", "drain"]) == 0
        until("1:1 to have the place", lambda: watch.devices()["1:1"]["replica"] == 0)
        assert runflat(["devices", str(watch.run)]) == 0
        os.kill(os.getpid(), signal.SIGINT)

    arguments = f"{LAYOUT} {EXACT} {PACED} --train.steps 100000 --on-failure spare,ntp --spares 1"
    ran = live.train("spare", arguments, alongside=by_word)
    assert ran.error is None
    (incident,) = ran.summary["incidents"]
    assert (incident["strategy"], incident["devices"], incident["words"]) == ("spare", ["1:1"], [])
    assert [(change["joined"], change["left"]) for change in ran.summary["changes"]] == [(["1:1"], ["0:1"])]
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["s0", "active", "1:1"] in [row[:3] for row in table]
    assert ["1:1", "active", "0:1"] in [row[:3] for row in table]
    assert {tuple(share.values()) for share in shares(ran.watch)} == {(4, 4)}, "never at a lower degree"
    again = live.train("again", f"{LAYOUT} {EXACT} --train.steps 100000 --train.stop-after {ran.summary['step']}")
    ends = [newest_checkpoint(watch.run, pytest.fail) for watch in (again.watch, ran.watch)]
    assert compare(*ends).whole("weight") <= 1e-11


@pytest.mark.parametrize(("kept", "action", "done_again"), [("checkpoint", "checkpoint", 2), ("memory", "memory", 1)])
def test_restart(live: Any, whole: Watch, kept: str, action: str, done_again: int) -> None:
    """Catches a restart that goes on with a hit replica, in old processes, from an older state, or past lost steps."""
    every = {"checkpoint": "--train.checkpoint-every 4 --train.memory-every 0", "memory": "--train.memory-every 5"}
    loss = LOSS | {"step": 6}
    ran = live.train("restart", f"{LAYOUT} {EXACT} {PACED} {every[kept]} --on-failure restart", [loss])
    assert (ran.code, ran.error) == (0, None)
    check_same(ran.watch, whole)
    (incident,) = ran.summary["incidents"]
    assert (incident["strategy"], incident["action"]) == ("restart", action)
    assert done_again <= incident["replayed_steps"] <= done_again + 1.5
    assert shares(ran.watch)[-1] == {0: 8}
    assert ran.summary["device_s"]["replay"] > 0
    incarnations = {name: row["incarnation"] for name, row in ran.watch.devices().items()}
    fresh = int(kept == "checkpoint")
    assert incarnations == {"0:0": fresh, "0:1": fresh, "1:0": 0, "1:1": 0}
    assert ran.summary["device_s"]["restart"] > 0


def test_capped(live: Any, whole: Watch) -> None:
    """Catches steps below the target, and a pause that is not booked, loses a step, or does not end at a return."""

    def give_back(watch: Watch) -> None:
        until("a pause", lambda: "paused" in str(watch.job().get("waiting")))
        assert runflat(["device", str(watch.run), "1:1", "return"]) == 0

    ran = live.train("capped", f"{LAYOUT} {EXACT} {PACED} --rule capped", [LOSS], alongside=give_back)
    assert (ran.code, ran.error) == (0, None)
    check_same(ran.watch, whole)
    assert {tuple(share.values()) for share in shares(ran.watch)} == {(4, 4)}
    assert ran.summary["incidents"][0]["phases_s"]["pause"] > 0
    assert ran.summary["device_s"]["pause"] > 0


def test_flexible(live: Any) -> None:
    """Catches sequences that are left out or used twice where steps differ in size, also after the run is resumed."""
    arguments = f"{LAYOUT} {EXACT} {PACED} --rule flexible --train.stop-after 6"
    first = live.train("flexible", arguments, [LOSS])
    assert (first.code, first.error) == (0, None)
    assert [sum(share.values()) for share in shares(first.watch)] == [8, 8, 8, 6, 6, 6]
    second = live.train("flexible", f"--resume {first.watch.run} --on-failure ntp")
    assert (second.code, second.error) == (0, None)
    assert [sum(share.values()) for share in shares(second.watch)] == [8, 8, 8, 6, 6, 6, *[8] * 6]
    end = newest_checkpoint(second.watch.run, pytest.fail).progress
    assert (second.summary["num_samples"], end.num_samples) == (90, 90)
    assert second.summary["sample_hash"] == end.sample_hash, "as the controller and as the workers count"
