"""Replicas on two hosts: one is cut off, goes its way to the end without harm, and is joined again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from two_hosts import Hosts, TwoHosts

from runflat.check.diff import compare
from runflat.check.live import Watch, is_alive, until
from runflat.cli import run as runflat
from runflat.train.checkpoint import newest_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.needs_netns, pytest.mark.timeout(300)]

PAIRS = "--layout.tp 2 --layout.replicas 2 --train.global-batch 8"
EXACT = "--train.steps 1000 --train.dtype float64 --train.lift-casts"
PACED = "--devices emulated --device.rate-tflops 4e-4"
TIMEOUT_S = 15.0
ON_B = ("1:0", "1:1")


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Returns two hosts, on which runs of this process start their workers."""
    made = Hosts()
    try:
        monkeypatch.setattr("runflat.elastic.launch_local.LocalWorkers", lambda job: TwoHosts(job, made))
        yield made
    finally:
        made.close()


def test_a_host_cut_off_and_joined_again(live: Any, hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a job that stops or waits without end with a host that is cut off, and a host that goes on without it.

    Nobody tells anybody that the cable is cut, and nobody can kill a process at its other end.
    """
    stays_away = [{"event": "return", "device": device, "step": 10**6} for device in ON_B]

    def cut_and_join(watch: Watch) -> None:
        watch.reached(3, 120)
        left = [watch.pid(device) for device in ON_B]
        hosts.cut()
        until("the job to go on alone", lambda: len(watch.steps()[-1]["replicas"]) == 1)
        until("the end of those cut off", lambda: not any(map(is_alive, left)), 4 * TIMEOUT_S)
        assert not list((watch.run / "checkpoints").glob("step-*")), "a checkpoint without the controller"
        alone = watch.num_steps()
        watch.reached(alone + 1)
        hosts.join()
        for device in ON_B:
            assert runflat(["device", str(watch.run), device, "return"]) == 0
        until("the return of host B", lambda: {watch.state(device) for device in ON_B} == {"active"})
        watch.reached(watch.num_steps() + 3)
        os.kill(os.getpid(), signal.SIGINT)

    arguments = f"{PAIRS} {EXACT} {PACED} --train.timeout-s {TIMEOUT_S:g}"
    ran = live.train("hosts", arguments, stays_away, cut_and_join)
    assert ran.error is None
    assert {event["device"] for event in ran.watch.happened("fail")} == set(ON_B)
    num_steps = ran.summary["step"]
    assert [row["step"] for row in ran.watch.steps()] == list(range(num_steps))
    widths = [len(row["replicas"]) for row in ran.watch.steps()]
    assert (widths[0], min(widths), widths[-1]) == (2, 1, 2)

    monkeypatch.undo()
    whole = live.train("whole", f"{PAIRS} {EXACT} --train.stop-after {num_steps}").watch
    ends = [newest_checkpoint(watch.run, pytest.fail) for watch in (whole, ran.watch)]
    assert compare(*ends).whole("weight") <= 1e-11
    assert ran.summary["sample_hash"] == whole.summary()["sample_hash"]
