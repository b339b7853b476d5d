"""Two faults in every pair of phases, with every kind of second fault: one table, each row with its outcome.

The world holds every decision against `fake_rules` (waits, generations, committed steps, sequences, units); the fake
workers refuse what a real one would suffer from. What a row says on top is how it ends.
"""

import itertools
from collections.abc import Callable, Sequence
from enum import StrEnum

import pytest

from runflat.elastic.actions import Planned, Published
from runflat.elastic.fake_launcher import Fault
from runflat.elastic.fake_world import World

STEP_PHASES = ("forward", "backward", "sync", "commit", "update", "checkpoint")
RECOVERY_PHASES = ("detect", "abort", "barrier", "form", "transfer", "digest")
RETURN_PHASES = ("import", "selftest", "copy", "join", "switch")
PHASES = STEP_PHASES + RECOVERY_PHASES + RETURN_PHASES
KINDS = ("kill", "stop", "hang", "flake", "raise")
FIRST, SECOND, TWIN, CAUSE = "1:1", "0:0", "0:1", "1:0"
"""Who is hit first; who is hit then; who holds what FIRST holds; whose links flake so that there is a recovery."""
SAVED, STRIKES, MORE = 3, 4, 3
"""Step of the checkpoint; step from which faults strike; steps after the last one."""
COMPUTE_S = 0.6
"""Of four sequences, so that few steps pass while a device returns."""
LIMIT_S = 60.0
"""Longest run of the fake clock."""


class Outcome(StrEnum):
    """How a row ends."""

    GOES_ON = "goes on without losing a step"
    GOES_BACK = "goes on, from the checkpoint if nobody alive holds a unit"
    STOPS = "stops with the error's text"


def outcome(kind: str, phase: str, device: str) -> Outcome:
    """How a second fault of `kind` ends that strikes `device` in `phase`, the first one being a loss of FIRST."""
    # An error of a device that trains would come again on the next one; a newcomer's is its own affair.
    if kind == "raise" and phase not in ("import", "selftest", "copy", "join"):
        return Outcome.STOPS
    return Outcome.GOES_BACK if device == TWIN else Outcome.GOES_ON


ROWS = [
    *((first, kind, second, SECOND) for first, kind, second in itertools.product(PHASES, KINDS, PHASES)),
    *((first, "kill", second, TWIN) for first, second in itertools.product(STEP_PHASES, STEP_PHASES + RECOVERY_PHASES)),
]


LOSS_OF = {device: Fault("kill", device, "forward", STRIKES) for device in (FIRST, SECOND)}
FLAKE = Fault("flake", CAUSE, "sync", STRIKES)
LATER = Fault("flake", CAUSE, "sync", STRIKES + 12)
"""When FIRST is back: a second flake right after a first one would drive CAUSE out."""


def causes(phase: str, device: str) -> tuple[Fault, ...]:
    """What must strike first so that `device` comes to `phase` at all."""
    if phase in RETURN_PHASES:
        return (LOSS_OF[device],)
    return (FLAKE,) if phase in RECOVERY_PHASES else ()


def causes_then(first: str, second: str) -> tuple[Fault, ...]:
    """What must strike so that SECOND comes to `second` after FIRST was lost in `first`."""
    if second not in RECOVERY_PHASES or first in ("import", "selftest", "copy", "join"):
        return causes(second, SECOND)
    return (LATER,) if {first, second} <= {"detect", "abort"} else ()  # there SECOND has answered already


def play(world: World, then: Sequence[Fault]) -> None:
    """Run until both faults have struck, and some steps more; the second is armed when the first one strikes."""
    launcher = world.launcher
    world.run_until(lambda: world.state.committed >= SAVED, LIMIT_S)
    world.happen(Published(SAVED, "step3"))
    first = launcher.faults[-1]
    world.run_until(lambda: first in launcher.struck, LIMIT_S)
    launcher.faults += then
    world.run_until(lambda: not launcher.faults, LIMIT_S)
    launcher.num_steps = max(worker.committed for worker in launcher.workers.values()) + MORE
    world.run(LIMIT_S)


@pytest.mark.parametrize(("first", "kind", "second", "device"), ROWS)
def test_second_fault(make_world: Callable[..., World], first: str, kind: str, second: str, device: str) -> None:
    """Catches a pair that hangs, splits the generation, loses a step, a sequence or a unit, or stops for no reason."""
    world = make_world(
        *(*causes(first, FIRST), Fault("kill", FIRST, first, STRIKES)),
        **{"num_steps": 1000, "tp": 2, "replicas": 2, "num_sequences": 4},
    )
    world.launcher.compute_s = COMPUTE_S
    play(world, (*causes_then(first, second), Fault(kind, device, second, STRIKES)))
    assert world.finished is not None
    text, expected = world.finished.text, outcome(kind, second, device)
    assert (text is not None) == (expected is Outcome.STOPS), text
    assert not world.launcher.faults, "not all faults struck: the row tests nothing"
    if text is not None:
        assert "bad sample" in text
        return
    check_end(world, may_go_back=expected is Outcome.GOES_BACK)


def check_end(world: World, *, may_go_back: bool) -> None:
    """All steps are done, each under one plan by all who lived, and everybody holds what the last plan says."""
    state, launcher = world.state, world.launcher
    assert state.committed == launcher.num_steps
    assert set(launcher.uses) == set(range(launcher.num_steps))
    back = any(
        action.resume.back for _, action in world.actions if isinstance(action, Planned) if action.plan.generation
    )
    assert may_go_back or not back
    assert state.plan is not None
    assert {launcher.workers[name].holds for name in state.members()} == {state.plan.generation}
    survivors = {name for name, device in state.devices.items() if device.failures == 0}
    for step, plans in launcher.uses.items():
        under = [generation for generation, devices in plans.items() if devices & survivors]
        assert len(under) <= 1 or back, f"step {step} was applied under the plans {under}"
