"""Silent faults in real processes: bits that flip are found, named and healed, and the run is the failure-free one."""

from __future__ import annotations

from typing import Any

import pytest

from runflat.check.diff import compare
from runflat.check.live import Watch
from runflat.cluster.events import event_to_json
from runflat.elastic.inject import Inject
from runflat.train.checkpoint import newest_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

STEPS = 12
EXACT = f"--train.steps {STEPS} --train.dtype float64 --train.lift-casts"
PACED = "--devices emulated --device.rate-tflops 1e-3"


def check_same(hurt: Watch, whole: Watch) -> None:
    """Weights, moments and samples are those of the run without a fault."""
    ends = [newest_checkpoint(watch.run, pytest.fail) for watch in (whole, hurt)]
    assert [end.progress.step for end in ends] == [STEPS, STEPS]
    found = compare(*ends)
    assert max(error for error, _, _ in found.ranked) <= 1e-11
    assert hurt.summary()["sample_hash"] == whole.summary()["sample_hash"]
    assert [row["step"] for row in hurt.steps()] == list(range(STEPS))


def test_flipped_bits_are_found_named_and_healed(live: Any) -> None:
    """Catches a fault that is not seen or blamed on a peer, gradients of wrong bits that are kept, a rate that stays.

    A weight flips before it is used, a moment as a step is applied, the learning rate before and after it is used.
    """
    events = (
        Inject()
        .corrupt("1:1", 2, "forward", "weight", seed=1)
        .corrupt("0:0", 4, "update", "moment", seed=2)
        .corrupt("2:1", 6, "update", "lr", seed=3)
        .corrupt("1:0", 9, "forward", "lr", seed=4)
        .events
    )
    layout = "--layout.tp 2 --layout.replicas 3 --train.global-batch 6"
    whole = live.train("whole", f"{layout} {EXACT}").watch
    ran = live.train("hurt", f"{layout} {EXACT} {PACED} --train.digest-every 1", [event_to_json(e) for e in events])
    assert (ran.code, ran.error) == (0, None)
    check_same(ran.watch, whole)
    found = [(i["devices"], i["step"], i["action"]) for i in ran.summary["incidents"]]
    assert found == [
        (["1:1"], 2, "heal"),
        (["0:0"], 5, "heal"),
        (["2:1"], 7, "heal"),
        (["1:0"], 9, "heal"),
    ]
    weight, moment, used, unused = ran.summary["incidents"]
    assert all(incident["cause"].startswith("digest of ") for incident in ran.summary["incidents"])
    assert 0 < weight["bytes_moved"] < used["bytes_moved"]
    assert 0 < moment["bytes_moved"] < used["bytes_moved"]
    assert unused["bytes_moved"] == 0
    assert "scalars" in unused["cause"]
    assert {event["event"] for event in ran.watch.happened("corrupt")} == {"corrupt"}


def test_two_holders_go_back_to_a_state_that_was_compared(live: Any) -> None:
    """Catches a wrong copy taken for a right one: the newest copies in memory are those of the flipped bit."""
    events = [event_to_json(e) for e in Inject().corrupt("1:1", 7, "update", "weight", seed=3).events]
    layout = "--layout.tp 2 --layout.replicas 2 --train.global-batch 4"
    whole = live.train("whole", f"{layout} {EXACT}").watch
    flags = f"{layout} {EXACT} {PACED} --train.digest-every 4 --train.memory-every 2"
    ran = live.train("hurt", flags, events)
    assert (ran.code, ran.error) == (0, None)
    check_same(ran.watch, whole)
    (incident,) = ran.summary["incidents"]
    assert (incident["devices"], incident["step"], incident["action"]) == (["0:1", "1:1"], 8, "memory")
    plan = ran.watch.records("plan")[-1]
    assert plan["committed"] == 6
    assert "no majority" in plan["reason"]
