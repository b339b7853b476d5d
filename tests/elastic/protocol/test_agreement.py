"""The live protocol and the simulator come to the same plans for the same losses and returns."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from runflat.elastic.actions import Asked, Published
from runflat.elastic.device import Standing
from runflat.elastic.fake_world import World
from runflat.elastic.state import Stage
from runflat.plan.batch import BatchRule
from runflat.plan.strategies import parse_chain
from runflat.sim.decided import Decided
from runflat.sim.times import Line

CHAINS = [
    "ntp",
    "drop",
    "restart",
    "spare,ntp",
    "spare,drop",
    "spare,restart",
    "ntp,drop,restart",
    "spare,ntp,drop,restart",
]
LOST = ("1:1", "0:0")


def settled(world: World, devices: set[str]) -> bool:
    """Training goes on undisturbed, and nobody of the job is on the way."""
    starting = set(world.state.standing(Standing.STARTING)) & devices
    return world.state.stage is Stage.RUN and world.state.growth is None and not starting and not world.state.dying()


@pytest.mark.parametrize("rule", [BatchRule.CONSTANT, BatchRule.FLEXIBLE])
@pytest.mark.parametrize("chain", CHAINS)
def test_same_losses_same_plans(make_world: Callable[..., World], chain: str, rule: BatchRule) -> None:
    """Catches a live job that does with a chain what the simulator never priced."""
    spares = ("s0",) if "spare" in chain else ()
    limits = {"auto_return": False, "slow_factor": math.inf}  # these workers are as fast at any degree
    fields = {"tp": 2, "replicas": 3, "num_sequences": 12, "limits": limits, "num_steps": 4000}
    world = make_world(chain=parse_chain(chain), spares=spares, **fields)
    planner = world.state.planner
    planner = replace(planner, job=replace(planner.job, rule=rule))
    world.state = replace(world.state, planner=planner)
    simulated = Decided(
        planner.job,
        planner.chain,
        planner.devices,
        lambda dead: Line(0.0, planner.work(0, dead)),
        lambda degree: True,
    )

    def step(device: str, *, failed: bool) -> None:
        target = world.state.committed + 3
        if failed:
            world.launcher.workers[device].die(-9)
            world.run_until(lambda: world.state.devices[device].standing is Standing.LOST)
        else:
            world.happen(Asked("return", device))
        every = set(planner.devices)
        world.run_until(lambda: settled(world, every) and world.state.committed >= target)
        target = world.state.committed + 12
        world.run_until(lambda: settled(world, every) and world.state.committed >= target)
        simulated.see([device], failed=failed)
        plan = world.state.plan
        assert plan is not None
        assert {place: plan.device(place) for place in plan.places} == dict(simulated.decision.devices)
        assert {r.replica: r.num_sequences for r in plan.replicas} == dict(simulated.decision.shares)

    world.run_until(lambda: world.state.committed == 30)
    world.happen(Published(30, "thirty"))
    for device in LOST:
        step(device, failed=True)
    for device in LOST:
        step(device, failed=False)
