"""Two faults at once, against real processes: SIGKILL in one phase, then SIGKILL or SIGSTOP in the recovery from it."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from runflat.check.chaos import RECOVERY_PHASES
from runflat.check.diff import compare
from runflat.check.live import Watch, until
from runflat.elastic.requests import post
from runflat.train.checkpoint import newest_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

LAYOUT = "--layout.tp 2 --layout.replicas 3 --train.global-batch 6 --train.dtype float64 --train.lift-casts"
PACED = "--devices emulated --device.rate-tflops 8e-4"
STEPS = "--train.steps 1000000 --train.checkpoint-every 5"
FIRST_PHASES = ("forward", "backward", "sync", "commit", "update", "checkpoint")
DEVICES = (("0:0", "1:1"), ("1:0", "2:1"), ("2:0", "0:1"), ("0:1", "0:0"))
"""(first, second) that are hit; the last pair leaves its replica without a device."""
STRIKE_S = 60.0

Pair = tuple[str, str, str]
"""Phase of the first fault, kind and phase of the second."""

EIGHT: tuple[Pair, ...] = (
    ("forward", "stop", "form"),
    ("backward", "kill", "abort"),
    ("sync", "stop", "barrier"),
    ("commit", "kill", "transfer"),
    ("update", "stop", "digest"),
    ("checkpoint", "kill", "digest"),
    ("sync", "kill", "detect"),
    ("backward", "stop", "transfer"),
)
"""Every first phase, every phase of the recovery, and each kind four times."""


def every() -> tuple[Pair, ...]:
    """Every pair of a first phase with each kind in each phase of the recovery, in any order."""
    pairs = list(itertools.product(FIRST_PHASES, ("kill", "stop"), RECOVERY_PHASES))
    random.Random(0).shuffle(pairs)
    return tuple(pairs)


def all_active(watch: Watch) -> bool:
    """Whether all devices train; those that are away are asked back, if they have not come by themselves."""
    states = {name: row["state"] for name, row in watch.devices().items()}
    for name, state in states.items():
        if state in ("lost", "out", "parked") and not (watch.run / "requests" / f"{name}.json").exists():
            post(watch.run, name, "return", name)
    return bool(states) and set(states.values()) == {"active"}


def struck(watch: Watch) -> int:
    """How many injected faults have struck."""
    return sum("injected" in (row.get("detail") or "") for row in [*watch.happened("kill"), *watch.happened("stop")])


def strike(watch: Watch, pair: Pair, devices: tuple[str, str]) -> None:
    """Let the second fault wait for the recovery from the first; returns when both have struck and training goes on."""
    before, step = struck(watch), watch.num_steps()
    rows = [
        {"event": pair[1], "device": devices[1], "step": step, "phase": pair[2]},
        {"event": "kill", "device": devices[0], "step": step + 2, "phase": pair[0]},
    ]
    for number, row in enumerate(rows):
        post(watch.run, f"pair-{before + number:04d}", "inject", str(row["device"]), row)
    until(
        f"both faults of {pair} to strike",
        lambda: struck(watch) == before + 2,
        STRIKE_S,
    )
    stood = watch.num_steps()  # a checkpoint may have been some steps away
    until(f"the next steps after {pair}", lambda: watch.num_steps() > stood + 2, STRIKE_S)


CASES = [
    pytest.param(EIGHT, id="eight"),
    pytest.param(every(), id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
]


@pytest.mark.parametrize("pairs", CASES)
def test_a_second_fault_during_recovery_changes_nothing(live: Any, pairs: Sequence[Pair]) -> None:
    """Catches a phase of the recovery in which a second death, or silence, hangs the run, loses a step or a bit."""
    hit = list(itertools.islice(itertools.cycle(DEVICES), len(pairs)))

    def act(watch: Watch) -> None:
        watch.reached(2, 120)
        for pair, devices in zip(pairs, hit, strict=True):
            until(f"all devices to be there before {pair}", lambda: all_active(watch), 120)
            strike(watch, pair, devices)
        os.kill(os.getpid(), signal.SIGINT)

    hurt = live.train("hurt", f"{LAYOUT} {STEPS} {PACED}", alongside=act)
    assert hurt.error is None
    assert hurt.summary["stopped"]
    end = hurt.summary["step"]
    assert [row["step"] for row in hurt.watch.steps()] == list(range(end))
    incidents = [set(incident["devices"]) for incident in hurt.summary["incidents"]]
    apart = [devices for devices in hit if not any(set(devices) <= incident for incident in incidents)]
    assert not apart, "the second fault did not strike in the recovery from the first"

    whole = live.train("whole", f"{LAYOUT} {STEPS} --train.stop-after {end}").watch
    ends = [newest_checkpoint(watch.run, pytest.fail) for watch in (whole, hurt.watch)]
    assert [found.progress.step for found in ends] == [end, end]
    # Rounding grows with the steps, of which a busy machine needs more.
    assert compare(*ends).whole("weight") <= 1e-9
    assert hurt.summary["sample_hash"] == whole.summary()["sample_hash"]
