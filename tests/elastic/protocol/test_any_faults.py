"""Up to four faults of any kind: training goes on, or the run stops with clear words; never silence.

The fake workers refuse what a real one would suffer from (a step applied without its gradients, a plan taken up from
the wrong step), and the world whatever breaks its rules, so that a run which ends has also kept these.
"""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from runflat.elastic.actions import Planned
from runflat.elastic.fake_launcher import Fault
from runflat.elastic.fake_world import World
from runflat.elastic.state import Stage

STEP_PHASES = ("forward", "backward", "sync", "commit", "update", "checkpoint")
RECOVERY_PHASES = ("detect", "abort", "barrier", "form", "transfer", "digest")
RETURN_PHASES = ("import", "selftest", "copy", "join", "switch")
PHASES = STEP_PHASES + RECOVERY_PHASES + RETURN_PHASES
KINDS = ("kill", "stop", "hang", "flake")
CLEAR = ("in a row", "failed: ValueError: bad sample", "no device is left", "no live device holds", "failures at step")


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


@given(
    st.lists(
        st.builds(
            Fault,
            kind=st.sampled_from((*KINDS, "kill", "raise", "formfail", "lowmem")),
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
