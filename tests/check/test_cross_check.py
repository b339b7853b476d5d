"""The simulator against the runtime: same plans, and goodput and ledger as the committed result says."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "cross_check"
WITHIN = 0.03


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """Returns what the benchmark's script defines."""
    return runpy.run_path(str(FOLDER / "run.py"))


def check_judged(result: dict[str, Any]) -> None:
    """The bounds that a cross-check must keep."""
    assert result["judged"]
    for seed, found in result["judged"].items():
        assert found["plans_identical"], seed
        assert abs(found["goodput_predicted"] / found["goodput"] - 1) <= WITHIN, seed
        assert max(abs(error) for error in found["category_errors"].values()) <= WITHIN, seed


def test_the_committed_result_keeps_its_bounds() -> None:
    """Catches a result file that was written although the simulator was off, or judged on the seeds it was fed with."""
    result = json.loads((FOLDER / "result.json").read_text())
    assert len(result["judged"]) >= 5
    assert not set(map(str, result["measured"])) & result["judged"].keys()
    check_judged(result)


@pytest.mark.process
@pytest.mark.timeout(300)
def test_runtime_and_simulator_decide_alike(script: dict[str, Any], tmp_path: Path) -> None:
    """Catches a decision that only one of the two takes: two losses, live and predicted.

    Short steps: durations are for the benchmark, on a machine that nobody else uses.
    """
    run = script["train"](11, tmp_path, returns=False, keep=False, rate_tflops=4e-4)
    costs = script["RecoveryConfig"]()
    predicted = script["predict"](costs, script["scenario"](11, False))
    assert len(predicted.decisions) == 2
    assert script["same_plans"](run, predicted)


@pytest.mark.soak
@pytest.mark.process
def test_the_simulator_predicts_the_runtime(script: dict[str, Any], tmp_path: Path) -> None:
    """Catches a cost or a category that the simulator has wrong, on a quiet machine (about seven minutes)."""
    check_judged(script["cross_check"]([0, 1, 2, 3, 4], [5, 6, 7, 8, 9], tmp_path))
