"""The ledger of a live run: what the seconds of each device are booked as."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from runflat.cluster.ledger import Category
from runflat.elastic.actions import Opened, Planned, Took
from runflat.elastic.device import Standing
from runflat.elastic.fake_world import World
from runflat.elastic.meter import Meter
from runflat.elastic.orders import Resume
from runflat.elastic.roster import Roster
from runflat.elastic.state import Disturbance, Stage, State


@pytest.fixture
def state(make_world: Callable[..., World]) -> State:
    """Training."""
    world = make_world()
    return world.run_until(lambda: world.state.committed == 3)


@pytest.fixture
def meter(state: State) -> Meter:
    """Eight devices in the middle of a step, one second old."""
    assert state.plan is not None
    made = Meter(8)
    made.learn(state, Took(state.plan, 0))
    made.advance(state, 1.0)
    return made


def booked(meter: Meter) -> dict[str, float]:
    return {category.value: round(seconds, 6) for category, seconds in meter.ledger.device_s.items() if seconds}


def opened(detect_s: float) -> Opened:
    return Opened(Disturbance(1, ("1:2",), "x", 0.9, 1.0, 3, 0.5, phases_s=(("detect", detect_s),)))


def planned(state: State, action: str, committed: int) -> Planned:
    assert state.plan is not None
    return Planned(state.plan, Resume(action=action, committed=committed), "why")  # type: ignore[arg-type]  # parametrized


def test_standing_decides_while_stage_decides_for_who_trains(state: State) -> None:
    """Catches a lost device that is booked as idle, or a spare as lost."""
    meter = Meter(8)
    meter.advance(state, 1.0)
    assert booked(meter) == {"start": 8.0}
    assert state.plan is not None
    meter.learn(state, Took(state.plan, 0))
    standings = {"0:0": Standing.LOST, "0:1": Standing.OUT, "0:2": Standing.PARKED, "0:3": Standing.STANDBY}
    devices = Roster({name: replace(d, standing=standings.get(name, d.standing)) for name, d in state.devices.items()})
    meter.advance(replace(state, devices=devices, stage=Stage.ABORT), 2.0)
    assert booked(meter) == {"start": 8.0, "reform": 4.0, "idle": 2.0, "failed": 2.0}


def test_a_discarded_step_is_replay_and_its_detection_detect(meter: Meter, state: State) -> None:
    """Catches work that was thrown away and still counts as productive."""
    meter.learn(state, opened(0.25))
    meter.learn(state, planned(state, "discard", 3))
    assert booked(meter) == {"detect": 2.0, "replay": 6.0}


def test_a_step_that_is_rolled_forward_stays_productive(meter: Meter, state: State) -> None:
    """Catches a step that counts as lost although nothing of it is done again."""
    meter.learn(state, opened(0.25))
    meter.learn(state, planned(state, "forward", 4))
    assert booked(meter) == {"detect": 2.0, "productive": 6.0}


def test_steps_behind_a_checkpoint_become_replay(meter: Meter, state: State) -> None:
    """Catches a return to a checkpoint that costs nothing in the ledger."""
    for step in (3, 4, 5):
        meter.committed(step)
        meter.advance(state, meter.ledger.total_device_s / 8 + 1.0)
    meter.learn(state, opened(0.0))
    meter.learn(state, planned(state, "checkpoint", 4))
    assert booked(meter) == {"productive": 8.0, "replay": 24.0}


def test_waiting_for_a_slower_replica_is_imbalance_and_saving_checkpoint(meter: Meter) -> None:
    """Catches device-seconds of a fast replica that count as work while it waits."""
    meter.committed(3)
    meter.imbalance({0: 0.5, 1: 0.0}, {0: 4, 1: 3})
    meter.saved(0.125)
    assert booked(meter) == {"productive": 5.875, "imbalance": 2.0, "checkpoint": 0.125}
    meter.saved(1e9)
    assert meter.ledger.device_s[Category.PRODUCTIVE] == 0.0, "never below nothing, whatever clocks say"
    meter.ledger.check(8, 1.0)
