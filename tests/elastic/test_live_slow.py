"""A slow device on emulated devices: found by comparison with peers, named, and given less to do."""

from __future__ import annotations

from typing import Any

import pytest

from runflat.cluster.events import event_to_json
from runflat.elastic.inject import Inject

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

STEPS = 32


def test_a_slow_device_is_named_and_its_replica_gets_fewer_sequences(live: Any, capsys: Any) -> None:
    """Catches a slow device that its replica's reporter does not see, and one that is named for its peer.

    1:1 takes four times as long; replica 1 reports by 1:0. Nobody is thrown out for it.
    """
    events = [event_to_json(event) for event in Inject().slow("1:1", 2, 4.0).events]
    layout = "--layout.tp 2 --layout.replicas 2 --train.global-batch 10"
    flags = f"{layout} --devices emulated --device.rate-tflops 4e-4 --train.steps {STEPS}"
    ran = live.train("slow", flags, events)
    assert (ran.code, ran.error) == (0, None)
    injected, found = ran.watch.happened("slow")
    assert injected["detail"].startswith("injected")
    assert (found["device"], found["detail"].partition(" takes ")[0]) == ("1:1", "replica 1")
    assert found["factor"] == pytest.approx(4.0, rel=0.3)
    assert found["detail"] in capsys.readouterr().out
    last = ran.watch.steps()[-1]
    assert [replica["num_samples"] for replica in last["replicas"]] == [8, 2]
    assert ran.summary["incidents"] == []
    assert ran.watch.happened("drain") == []
    assert ran.summary["device_s"]["imbalance"] > 0
