"""Ranks as threads: results, errors, and nothing left behind. And the comparison that judges them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runflat.check.ranks import run_ranks
from runflat.check.small import proof_config
from runflat.check.verify import Case, Errors, parameter_errors, plan_case
from runflat.parallel.comms import Comms
from runflat.parallel.tp_plan import ShardingRules, build_meta_model, read_rules
from runflat.plan.plan import Place, Plan
from runflat.plan.sync_groups import SyncLayout
from runflat.plan.units import param_ranges

CASE = Case(tp=3, dead=((1, 1),))
BOTH = pytest.mark.parametrize("in_memory", [False, True], ids=["gloo", "in memory"])


@pytest.fixture(scope="module")
def planned() -> tuple[ShardingRules, Plan, SyncLayout]:
    """Returns a small plan: replicas at TP 3 and TP 2."""
    rules = read_rules(build_meta_model(proof_config("llama-gqa4"), torch.float32), CASE.tp)
    return (rules, *plan_case(rules, CASE))


def settles(folder: str, most: int) -> bool:
    """Returns whether the number of entries falls to `most` soon: the system ends a thread a little after its join."""
    deadline = time.monotonic() + 10
    while len(os.listdir(folder)) > most and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    return len(os.listdir(folder)) <= most


@BOTH
def test_collectives(planned: tuple[ShardingRules, Plan, SyncLayout], in_memory: bool) -> None:
    """Catches a network whose sum, maximum or exchange is wrong, or that mixes up two groups or two turns."""
    _, plan, layout = planned

    def work(place: Place, comms: Comms) -> None:
        rank = comms.world.rank
        for turn in range(3):
            total = torch.tensor([float(rank + turn), 1.0])
            comms.world.all_reduce(total)
            assert total.tolist() == [10.0 + 5 * turn, 5.0]
            largest = torch.tensor([float(rank), -float(rank)])
            comms.tp.all_reduce(largest, "max")
            assert largest.tolist() == ([2.0, 0.0] if place[0] == 0 else [4.0, -3.0])
        # Rank r sends r+1 copies of 10 r + s to each rank s.
        source = torch.cat([torch.full((rank + 1,), 10.0 * rank + peer) for peer in range(5)])
        output = torch.zeros(15)
        work = comms.world.launch_all_to_all(output, source, [1, 2, 3, 4, 5], [rank + 1] * 5)
        comms.wait([work], "exchange")
        assert output.tolist() == [10.0 * peer + rank for peer in range(5) for _ in range(peer + 1)]

    run_ranks(plan, layout, work, in_memory=in_memory)


@BOTH
def test_first_error_reaches_the_caller(planned: tuple[ShardingRules, Plan, SyncLayout], in_memory: bool) -> None:
    """Catches ranks that wait for one that has failed until a time-out, or report its peers' errors instead."""
    _, plan, layout = planned

    def work(place: Place, comms: Comms) -> None:
        comms.world.all_reduce(torch.ones(1))
        if place == (0, 1):
            raise KeyError("the real cause")
        comms.world.all_reduce(torch.ones(1))

    with pytest.raises(KeyError, match="the real cause"):
        run_ranks(plan, layout, work, in_memory=in_memory)


@BOTH
def test_nothing_is_left_behind(planned: tuple[ShardingRules, Plan, SyncLayout], in_memory: bool) -> None:
    """Catches threads and descriptors that add up over runs until a long session has none left."""
    _, plan, layout = planned

    def work(place: Place, comms: Comms) -> None:
        comms.world.all_reduce(torch.ones(4))

    run_ranks(plan, layout, work, in_memory=in_memory)
    threads, descriptors = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        run_ranks(plan, layout, work, in_memory=in_memory)
    assert settles("/proc/self/task", threads)
    assert settles("/proc/self/fd", descriptors)


def test_a_process_ends_quietly() -> None:
    """Catches warnings, and `terminate called` from a network thread that outlives the interpreter."""
    root = Path(__file__).parents[2]
    program = "import sys\nfrom runflat.cli import run\nsys.exit(run(['verify', '--model', 'llama', '--tp', '2', "
    program += "'--dead', '0:1', '--json']))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=root, capture_output=True, text=True, timeout=55, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_comparison_can_fail(planned: tuple[ShardingRules, Plan, SyncLayout]) -> None:
    """Catches a comparison that passes two holders that differ, a lost element, or a number that is none."""
    rules, plan, _ = planned
    full = {param.name: torch.rand(param.shape) for param in rules.spec.params}

    def cut() -> dict[Place, dict[str, torch.Tensor]]:
        parts: dict[Place, dict[str, torch.Tensor]] = {}
        for place in plan.places:
            held = plan.replica(place[0]).held(rules.spec.kinds, place[1])
            parts[place] = {
                p.name: full[p.name].clone()
                if p.dim is None
                else torch.cat(
                    [full[p.name].narrow(p.dim, a, b - a) for a, b in param_ranges(rules.spec, p, held)], p.dim
                )
                for p in rules.spec.params
            }
        return parts

    assert max(parameter_errors(rules, plan, cut(), full).values()) == 0.0
    for name in ("model.norm.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"):
        kind = name.removeprefix("model.").removeprefix("layers.1.")
        parts = cut()
        flat = parts[1, 2][name].view(-1)
        flat[-1] = torch.nextafter(flat[-1], torch.tensor(2.0))
        assert parameter_errors(rules, plan, parts, full)[kind] == math.inf
        for place, part in cut().items():
            parts[place][name] = torch.full_like(part[name], math.nan)
        assert parameter_errors(rules, plan, parts, full)[kind] == math.inf
        for place, part in cut().items():
            parts[place][name] = part[name] * 1.5
        assert parameter_errors(rules, plan, parts, full)[kind] == pytest.approx(0.5)


def test_largest_error_is_the_largest() -> None:
    """Catches a table or a scalar that the verdict does not look at."""
    table = {"a": 1e-15}
    errors = Errors(table, table, table, table, 1e-15, 1e-15)
    assert errors.largest == 1e-15
    for field in ("grads", "weights", "first_moments", "second_moments"):
        assert replace(errors, **{field: {"a": 1e-16, "b": 3.0}}).largest == 3.0
    assert replace(errors, grad_norm=2.0).largest == 2.0
    assert replace(errors, loss=math.inf).largest == math.inf
