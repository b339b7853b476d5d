"""What the controller hears and says for each device does not grow with their number; workers that only talk."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from runflat.commands.models import model_config
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.units import ModelSpec

FEW, MANY = 16, 64
ONE_LOST = 1


@pytest.fixture(scope="module")
def scaling(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("scaling/run.py")


@pytest.fixture(scope="module")
def model() -> ModelSpec:
    return read_rules(build_meta_model(model_config("demo"), torch.float32), 8).spec


def test_messages_grow_at_most_with_the_devices(scaling: ModuleType, model: ModelSpec, tmp_path: Path) -> None:
    """Catches a message from each device about each other one, and an order whose length grows with the job's size."""
    few, many = (scaling.alone(number, model, tmp_path) for number in (FEW, MANY))
    growth = MANY / FEW
    assert few["step"]
    assert set(few["loss"]) == {"abort", "status", "plan", "ready", "go", "formed", "running"}
    for what, lost in (("step", 0), ("loss", ONE_LOST)):
        assert set(few[what]) == set(many[what])
        for kind, count in few[what].items():
            assert count <= FEW - lost, f"{kind}: one for each device at most"
            assert many[what][kind] <= growth * (count + lost), kind
    assert many["messages"]["heartbeat"] <= growth * 1.1 * few["messages"]["heartbeat"]
    assert many["plan_order_bytes"] <= 2 * few["plan_order_bytes"], "a plan names a replica that is like others once"
