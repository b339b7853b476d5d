"""The simulator against the plan of a small model, step by step: what the runtime bills, the simulator predicts."""

import pytest

from runflat.cluster.events import parse_events
from runflat.plan.cost import loads
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.units import Kind, ModelSpec, ParamSpec, Segment
from runflat.sim.config import ClusterConfig, JobConfig, RecoveryConfig, SimConfig
from runflat.sim.emulated import emulated_line, emulated_times
from runflat.sim.replay import replay
from runflat.traces.generate import Component, FailureSource

HEADS, HEAD_DIM, FFN, VOCAB, TP, DP, SEQ_LEN = 10, 4, 50, 30, 4, 3, 8
RATE = 1e5


def spec() -> ModelSpec:
    """One layer whose heads, columns and vocabulary do not divide by the degrees."""
    hidden = HEADS * HEAD_DIM
    kinds = (Kind("head", hidden, HEAD_DIM), Kind("ffn", FFN, 5), Kind("vocab", VOCAB, 2))
    shapes = {
        "q": ((hidden, hidden), "head"),
        "up": ((FFN, hidden), "ffn"),
        "head": ((VOCAB, hidden), "vocab"),
    }
    params = tuple(
        ParamSpec(name, shape, "sharded", True, index, 1, 0, (Segment(kind, 0),))
        for index, (name, (shape, kind)) in enumerate(shapes.items())
    )
    return ModelSpec("small", kinds, params, hidden, 1, HEAD_DIM)


def config() -> SimConfig:
    """Three replicas without recovery costs."""
    free = RecoveryConfig(detect_s=0, reform_s=0, transfer_s=0, join_s=0, checkpoint_save_s=0)
    return SimConfig(
        job=JobConfig(tp=TP, dp=DP, local_batch=7),
        cluster=ClusterConfig(domain_size=TP),
        failures=FailureSource(components=(Component(name="none", per_device_day=0.0),)),
        recovery=free,
    )


def billed_step_s(dead: set[tuple[int, int]]) -> tuple[float, dict[int, int]]:
    """(seconds of a step, sequences by replica) as planner and emulated devices have them."""
    plan = build_plan(spec(), live_devices(TP, DP, dead), TP, DP * 7, SEQ_LEN)
    seconds = {
        replica.replica: max(loads(spec(), replica, SEQ_LEN).values()) / RATE * replica.num_sequences
        for replica in plan.replicas
    }
    return max(seconds.values()), {replica.replica: replica.num_sequences for replica in plan.replicas}


def test_a_replay_has_the_shares_and_the_wall_time_of_the_plan() -> None:
    """Catches uneven units that the simulator treats as even, and shares that differ from the planner's."""
    kills = [(1, (0, 3)), (3, (2, 0)), (5, (0, 1)), (8, (0, 0))]
    text = "\n".join(f'{{"event": "kill", "device": "{r}:{s}", "step": {step}}}' for step, (r, s) in kills)
    line = emulated_line(spec(), tp_full=TP, seq_len=SEQ_LEN, rate_flops=RATE)
    result = replay(config(), "ntp,drop", parse_events(text), num_steps=12, line=line)
    wall_s, dead = 0.0, set()
    for index, (start, place) in enumerate([(0, None), *kills]):
        if place is not None:
            dead.add(place)
        step_s, shares = billed_step_s(dead)
        end = kills[index][0] if index < len(kills) else 12
        wall_s += (end - start) * step_s
        if place is not None:
            assert dict(result.decisions[index - 1][1].shares) == shares
    assert result.wall_s == pytest.approx(wall_s, rel=1e-9)


def test_a_step_has_a_part_that_does_not_depend_on_its_work() -> None:
    """Catches a measured overhead that is lost, or that is boosted or counted for each sequence."""
    plain = emulated_times(spec(), tp_full=TP, seq_len=SEQ_LEN, rate_flops=RATE)
    slow = emulated_times(spec(), tp_full=TP, seq_len=SEQ_LEN, rate_flops=RATE, step_s=0.5)
    first, second = plain.line(1), slow.line(1)
    assert first is not None
    assert second is not None
    assert second.at(7) == pytest.approx(first.at(7) + 0.5)
    assert plain.line(TP) is None
    assert plain.fits(3)
