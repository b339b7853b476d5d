"""Devices that leave and come back: by word of a person, over a slow link, again and again."""

from __future__ import annotations

import json
import os
import signal
import statistics
from typing import Any

import pytest

from runflat.check.live import Footprint, Watch, footprint, until
from runflat.cli import run as runflat

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

PAIRS = "--layout.tp 2 --layout.replicas 2 --train.global-batch 8"
PACED = "--devices emulated --device.rate-tflops 4e-4"
SURVIVORS = ("0:0", "0:1", "1:0")
ALIVE = ("active", "draining")
SLACKS = {"num_descriptors": 2, "num_threads": 2, "num_sockets": 2, "resident_bytes": 16 << 20}
"""What may be in passing when it is counted."""


def wish(watch: Watch, action: str, device: str = "1:1") -> int:
    """The exit code of `runflat device`, as it is typed."""
    return runflat(["device", str(watch.run), device, action])


def away_and_back(watch: Watch, action: str) -> dict[str, Footprint]:
    """One loss and one return of 1:1 by command; what the survivors occupy afterwards."""
    assert wish(watch, action) == 0
    until(f"1:1 to leave after {action}", lambda: watch.state("1:1") in ("parked", "lost"))
    assert wish(watch, "return") == 0
    until("1:1 to be back", lambda: watch.state("1:1") == "active")
    watch.reached(watch.num_steps() + 2)
    return {name: footprint(watch.pid(name)) for name in SURVIVORS}


def check_flat(sizes: list[dict[str, Footprint]]) -> None:
    """What survivors occupy after the last cycles is what they occupied after the first.

    Of many cycles the least of the last ten counts: a leak is in each of them, a connection that is being made is not.
    """
    window = min(10, len(sizes) // 10 + 1)
    for name in SURVIVORS:
        for field, slack in SLACKS.items():
            first, last = ([getattr(size[name], field) for size in part] for part in (sizes[:window], sizes[-window:]))
            assert min(last) <= max(first) + slack, f"{name} {field}: {first} at first, {last} at last"


CYCLES = [
    pytest.param(("drain", "kill"), id="short"),
    pytest.param(("drain", "kill") * 50, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
]


@pytest.mark.parametrize("actions", CYCLES)
def test_leave_and_return_by_word(live: Any, capsys: pytest.CaptureFixture[str], actions: tuple[str, ...]) -> None:
    """Catches a drain that loses a step, a command that nobody answers, and what grows with every loss and return."""
    sizes: list[dict[str, Footprint]] = []

    def by_word(watch: Watch) -> None:
        watch.reached(2, 120)
        assert wish(watch, "return") == 1
        assert wish(watch, "kill", "2:0") == 1
        sizes.append(away_and_back(watch, "kill"))
        for action in actions:
            sizes.append(away_and_back(watch, action))
        capsys.readouterr()
        assert runflat(["devices", str(watch.run), "--json"]) == 0
        rows = json.loads(capsys.readouterr().out.partition("\n}\n")[0] + "\n}")["devices"]
        assert {row["device"]: row["state"] for row in rows} == dict.fromkeys((*SURVIVORS, "1:1"), "active")
        os.kill(os.getpid(), signal.SIGINT)

    ran = live.train("cycles", f"{PAIRS} {PACED} --train.steps 100000", alongside=by_word)
    assert ran.error is None
    left = [change["left"] for change in ran.summary["changes"] if change["left"]]
    assert left == [["1:1"]] * actions.count("drain")
    assert len(ran.summary["incidents"]) == 1 + actions.count("kill")
    assert [row["step"] for row in ran.watch.steps()] == list(range(ran.summary["step"]))
    check_flat(sizes)


def test_return_over_a_slow_link_does_not_stop_training(live: Any) -> None:
    """Catches a copy at the boundary.

    The link takes about 2.4 steps for the state alone, and more with the gradients that follow what is there already;
    at the boundary only those of the last step are left, which take it 0.8 steps.
    """
    events = [
        {"event": "kill", "device": "1:1", "step": 2, "phase": "backward"},
        {"event": "return", "device": "1:1", "step": 3},
    ]
    link = "--devices emulated --device.rate-tflops 1.35e-4 --device.domain-link-gbps 0.0185 --data.seq-len 8"
    ran = live.train("slow", f"{PAIRS} {link} --train.steps 30", events)
    assert (ran.code, ran.error) == (0, None)
    (change,) = ran.summary["changes"]
    assert change["joined"] == ["1:1"]
    step_s = statistics.median(row["step_s"] for row in ran.watch.steps() if row["generation"] == 1)
    assert change["stages_s"]["feed"] >= 3.5 * step_s
    assert change["stopped_s"] <= 2.0 * step_s
    assert [row["step"] for row in ran.watch.steps()] == list(range(30))
