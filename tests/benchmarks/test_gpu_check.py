"""The check for machines with a GPU: what it makes of what it sees, and what it says where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

GOOD = {"losses": [5.0, 4.0], "tokens_per_s": 100.0, "mfu": None, "peak_bytes": 10**6, "wall_s": 1.0}


@pytest.fixture(scope="module")
def gpu_check(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("gpu/check.py")


def good(training: Any, limit_s: float) -> dict[str, Any]:
    """What a training gives that went as it should."""
    events = training.events
    stopped = [0.5 for event in events if event["event"] == "kill"]
    joined = [event["device"] for event in events if event["event"] == "return"]
    return {**GOOD, "device_spans": 9, "stopped_s": stopped, "joined": joined}


def checked(module: ModuleType, out: Path, *, num_gpus: int = 1, tests: Any = None, training: Any = good) -> list[str]:
    """The problems that the check finds; its tests and trainings give what they are told."""
    ran = [module.Test("test_one", "passed", 1.0)] if tests is None else tests
    found: list[str] = module.check(out, {"gpu": "stand-in", "num_gpus": num_gpus}, lambda limit_s: ran, training)
    return found


def test_no_gpu_is_said_and_nothing_is_written(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a check that passes because everything was skipped, and a result written where nothing was measured."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert f"torch {torch.__version__}" in said.err
    assert "sees no CUDA device here" in said.err
    assert not said.out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("num_gpus", "largest"), [(1, 0), (2, 2), (3, 2), (4, 4), (8, 8), (16, 8)])
def test_all_is_kept(gpu_check: ModuleType, tmp_path: Path, num_gpus: int, largest: int) -> None:
    """Catches a layout that needs more GPUs than there are, a run compared with a later one, and a lost result."""
    assert checked(gpu_check, tmp_path, num_gpus=num_gpus) == []
    kept = json.loads((tmp_path / "result.json").read_text())
    assert kept["gpu"]["num_gpus"] == num_gpus
    assert kept["tests"][0]["outcome"] == "passed"
    assert kept["problems"] == []
    several = [name for name in kept["trainings"] if "GPUs" in name]
    assert bool(several) == bool(largest)
    assert all(name.startswith(f"{largest} GPUs") for name in several)
    assert "tests passed" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("outcome", "reason"), [("failed", "assert 1 == 2"), ("skipped", "gpu: torch sees no CUDA device")]
)
def test_a_test_that_did_not_pass_is_named(gpu_check: ModuleType, tmp_path: Path, outcome: str, reason: str) -> None:
    """Catches a check that counts what was skipped as good."""
    tests = [gpu_check.Test("test_one", "passed", 1.0), gpu_check.Test("test_two", outcome, 0.0, reason)]
    assert checked(gpu_check, tmp_path, tests=tests) == [f"test test_two: {outcome}. {reason}"]
    assert checked(gpu_check, tmp_path, tests=[]) == ["no test ran"]


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("bfloat16", {"losses": [5.0, 4.2]}, "its losses differ by 5.0e-02 from those of 'CPU, float32'"),
        ("float32", {"device_spans": 0}, "its profile has nothing of what the device did"),
        ("float32", {"losses": [5.0]}, "its losses differ by inf"),
        ("float32", {"losses": [5.0, float("nan")]}, "its losses differ by inf"),
        ("process killed, a spare takes over", {"stopped_s": []}, "0 incidents, 1 faults"),
        ("float64", {"stopped_s": [1.0]}, "1 incidents, 0 faults"),
        ("4 GPUs, one lost and taken back", {"joined": []}, "[] came back, not ['1:1']"),
        ("CPU, float32", {"problem": "it ended with code 1"}, "it ended with code 1"),
    ],
)
def test_a_training_that_went_wrong_is_named(
    gpu_check: ModuleType, tmp_path: Path, name: str, change: dict[str, Any], said: str
) -> None:
    """Catches a comparison that nothing can fail, NaN among the losses, a fault that never struck, a lost return."""

    def training(wanted: Any, limit_s: float) -> dict[str, Any]:
        return good(wanted, limit_s) | (change if wanted.name == name else {})

    problems = checked(gpu_check, tmp_path, num_gpus=4, training=training)
    assert f"training '{name}': {said}" in problems[0]
    assert all(f"'{name}'" in problem for problem in problems), "others fail by what they are compared with only"
    assert json.loads((tmp_path / "result.json").read_text())["problems"] == problems


def test_it_ends_in_time(gpu_check: ModuleType, tmp_path: Path) -> None:
    """Catches a check that hangs with its GPU: what is left of the ten minutes bounds each part."""
    now, limits = [0.0], []

    def training(wanted: Any, limit_s: float) -> dict[str, Any]:
        limits.append(limit_s)
        now[0] += limit_s
        return {"problem": "it did not end"}

    def tests(limit_s: float) -> list[Any]:
        now[0] += limit_s
        return [gpu_check.Test("all of them", "failed", limit_s, "they did not end")]

    problems = gpu_check.check(tmp_path, {"num_gpus": 1}, tests, training, clock=lambda: now[0])
    assert now[0] <= gpu_check.DEADLINE_S < 600
    assert 0 < limits[-1] < limits[0]
    assert "there was no time left for it" in problems[-1]
    assert len(problems) == 1 + len(gpu_check.trainings(1))


def test_the_tests_are_found() -> None:
    """Catches a test for GPUs that lies where the check does not look."""
    tests = Path(__file__).parents[1]
    marked = {path for path in tests.rglob("test_*.py") if "mark." + "gpu" in path.read_text()}
    assert marked
    assert marked == set((tests / "gpu").glob("test_*.py"))


def test_reports_of_tests_are_read(gpu_check: ModuleType) -> None:
    """Catches a failed or skipped test read as passed: pytest's report has them as children of the case."""
    xml = """<testsuites><testsuite>
    <testcase name="test_a[x]" time="0.5" />
    <testcase name="test_b" time="0.1"><failure message="assert 1 == 2&#10;more">trace</failure></testcase>
    <testcase name="test_c" time="0.0"><skipped type="pytest.skip" message="gpu: none">here</skipped></testcase>
    <testcase name="test_d" time="0.0"><error message="failed on setup">trace</error></testcase>
    </testsuite></testsuites>"""
    assert [(test.name, test.outcome, test.reason) for test in gpu_check.parse_tests(xml)] == [
        ("test_a[x]", "passed", ""),
        ("test_b", "failed", "assert 1 == 2"),
        ("test_c", "skipped", "gpu: none"),
        ("test_d", "failed", "failed on setup"),
    ]
