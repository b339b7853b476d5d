"""Two faults, in every pair of phases: training goes on, or the run stops with clear words; never silence.

The fake workers refuse what a real one would suffer from (a step applied without its gradients, a plan taken up from
the wrong step), and the world refuses a wait without a deadline, so that a run which ends has also kept these.
"""

import itertools
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runflat.elastic.actions import Planned
from runflat.elastic.fake_launcher import Fault
from runflat.elastic.fake_world import World
from runflat.elastic.state import Stage

STEP_PHASES = ("forward", "sync", "commit", "update", "checkpoint")
RECOVERY_PHASES = ("abort", "barrier", "form", "transfer", "digest")
RETURN_PHASES = ("selftest", "copy", "join", "switch")
PHASES = STEP_PHASES + RECOVERY_PHASES + RETURN_PHASES
KINDS = ("kill", "stop", "hang", "flake", "kill")
CLEAR = ("in a row", "failed: ValueError: bad sample", "no device is left", "no live device holds", "failures at step")


def faults(first: str, second: str, kinds: tuple[str, str], other: str) -> tuple[Fault, ...]:
    """A fault in phase `first` of 1:2 and one in `second` of `other`, after a loss where the first needs a recovery."""
    needs = () if first in STEP_PHASES else (Fault("kill", "1:2" if first in RETURN_PHASES else "0:3", "forward", 3),)
    return (*needs, Fault(kinds[0], "1:2", first, 4), Fault(kinds[1], other, second, 4))


def pairs() -> Iterator[tuple[str, str, tuple[str, str], str]]:
    """Every pair of phases; kinds and the second device take turns."""
    kinds = itertools.cycle(itertools.product(KINDS, KINDS))
    others = itertools.cycle(("1:3", "0:1", "1:2"))
    for first, second in itertools.product(PHASES, PHASES):
        yield first, second, next(kinds), next(others)


def check_end(world: World) -> None:
    """The run is over, and whoever lived to its end has used each step under one plan, unless it went back."""
    finish = world.run()
    assert world.state.stage is Stage.FINISHED
    assert finish.text is None or any(text in finish.text for text in CLEAR), finish.text
    if finish.text is None:
        assert world.state.committed == world.launcher.num_steps
        assert set(world.launcher.uses) == set(range(world.launcher.num_steps))
    back = any(isinstance(a, Planned) and a.resume.action in ("memory", "checkpoint") for _, a in world.actions)
    if not back:
        alive = {name for name, device in world.state.devices.items() if device.failures == 0}
        for step, plans in world.launcher.uses.items():
            used = [generation for generation, devices in plans.items() if devices & alive]
            assert len(used) <= 1, f"step {step} was applied under the plans {used}"


@pytest.mark.parametrize("first", PHASES)
def test_every_pair_of_phases(make_world: Callable[..., World], first: str) -> None:
    """Catches a phase in which a second fault leaves the run waiting for ever, or two halves at different steps."""
    struck = 0
    for one, two, kinds, other in pairs():
        if one == first:
            world = make_world(*faults(one, two, kinds, other))
            check_end(world)
            struck += len(world.launcher.struck)
    assert struck >= len(PHASES), "hardly any fault was reached: the test tests nothing"


@given(
    st.lists(
        st.builds(
            Fault,
            kind=st.sampled_from((*KINDS, "raise", "formfail", "lowmem")),
            device=st.sampled_from(("0:0", "0:1", "1:0", "1:1", "2:0", "2:1")),
            phase=st.sampled_from(PHASES),
            step=st.sampled_from((0, 4, 20)),
            nth=st.sampled_from((1, 1, 2)),
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=60)
def test_any_faults(make_world: Callable[..., World], drawn: list[Fault]) -> None:
    """Catches what nobody thought of: up to four faults of any kind, in any phase, in three replicas of two."""
    check_end(make_world(*drawn, tp=2, replicas=3))
