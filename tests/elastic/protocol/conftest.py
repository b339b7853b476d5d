"""A toy model and jobs of it, for the protocol and everything around it: no torch, no processes, a fake clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from runflat.elastic.fake_launcher import FakeLauncher, Fault
from runflat.elastic.fake_world import World
from runflat.elastic.planning import Planner
from runflat.elastic.protocol import first_state
from runflat.elastic.state import Limits
from runflat.plan.strategies import JobFacts, Strategy
from runflat.plan.units import Kind, ModelSpec, ParamSpec, Segment

SEQ_LEN = 16
SHORT = {
    "timeout_s": 4.0,
    "start_s": 8.0,
    "heartbeat_floor_s": 1.5,
    "heartbeat_factor": 5.0,
    "progress_floor_s": 2.0,
    "back_off_s": 0.1,
}
"""Limits that keep simulated time, and so the test, short."""


def toy_spec() -> ModelSpec:
    """8 heads of 2, 16 FFN blocks of 2, a replicated norm."""
    return ModelSpec(
        name="toy",
        kinds=(Kind("head", 16, 2), Kind("ffn", 32, 2)),
        params=(
            ParamSpec("q", (16, 8), "sharded", True, 0, 1, 0, (Segment("head", 0),)),
            ParamSpec("up", (32, 8), "sharded", True, 1, 1, 0, (Segment("ffn", 0),)),
            ParamSpec("norm", (8,), "equal", False, 2),
        ),
        hidden_size=8,
        num_layers=1,
        head_dim=2,
    )


def toy_planner(tp: int = 4, replicas: int = 2, num_sequences: int = 8, **fields: Any) -> Planner:
    placement = tuple(((r, slot), f"{r}:{slot}") for r in range(replicas) for slot in range(tp))
    fields = {"chain": (Strategy.NTP, Strategy.DROP), **fields}
    job = JobFacts(num_replicas=replicas, tp_full=tp, num_sequences=num_sequences)
    return Planner(spec=toy_spec(), job=job, placement=placement, seq_len=SEQ_LEN, bytes_per_element=12, **fields)


def toy_world(
    *faults: Fault, num_steps: int = 40, dead: tuple[str, ...] = (), scripted: tuple[str, ...] = (), **fields: Any
) -> World:
    """A world of toy workers. `limits` are those of the protocol; other fields go to the planner."""
    limits = Limits(**{**SHORT, **fields.pop("limits", {})})
    state = first_state(toy_planner(**fields), limits, secret="secret", dead=dead, scripted=scripted)
    return World(state, FakeLauncher(num_steps, faults))


@pytest.fixture(scope="session")
def make_world() -> Callable[..., World]:
    return toy_world


@pytest.fixture(scope="session")
def make_planner() -> Callable[..., Planner]:
    return toy_planner
