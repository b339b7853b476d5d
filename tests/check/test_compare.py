"""Strategies on one trace: what is read off each run, and what is refused before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runflat.check.compare import result_of, spans, table
from runflat.commands.compare import read_candidates
from runflat.errors import ConfigError

ROOT = Path(__file__).parents[2]
SEQ_LEN = 10
EXAMPLE = ["examples/compare.toml", "--inject", "examples/two_failures.json"]


def step(number: int, time_s: float, generation: int = 0, batch: int = 8) -> dict[str, Any]:
    """A line of steps.jsonl: one second a step."""
    replicas = [{"replica": r, "num_samples": batch // 2} for r in range(2)]
    return {"step": number, "time_s": time_s, "step_s": 1.0, "generation": generation, "replicas": replicas}


STEPS = [*(step(n, 3.0 + n) for n in range(4)), *(step(n, 8.0 + 2 * (n - 3), 2) for n in range(4, 8))]
INCIDENT = {"record": "incident", "started_s": 6.5, "generation": 2}


def test_spans_are_cut_by_what_happened() -> None:
    """Catches the time of a recovery counted as before or after, and the start of the run counted as training."""
    found = spans(STEPS, [INCIDENT], SEQ_LEN)
    assert found == {"before": pytest.approx(80.0), "during": pytest.approx(80 / 3.5), "after": pytest.approx(40.0)}


def test_a_change_of_plan_is_still_during() -> None:
    """Catches the speed before a device is back counted as that after it."""
    change = {"record": "change", "time_s": 14.0}
    found = spans(STEPS, [INCIDENT, change], SEQ_LEN)
    assert found["during"] == pytest.approx(3 * 80 / 7.5)
    assert found["after"] == pytest.approx(40.0)


def test_a_run_without_failures_has_only_a_before() -> None:
    """Catches a division by a span without steps."""
    assert spans(STEPS[:4], [], SEQ_LEN) == {"before": pytest.approx(80.0), "during": None, "after": None}
    assert set(spans([], [], SEQ_LEN).values()) == {None}


def test_a_run_that_stopped_early_has_its_words_and_no_goodput(tmp_path: Path) -> None:
    """Catches a comparison that fails because one candidate could not go on."""
    run = tmp_path / "drop"
    run.mkdir()
    (run / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in STEPS))
    result = result_of("drop", run, "no device is left that can work.", SEQ_LEN)
    assert (result.goodput, result.wall_s, result.run) == (None, None, "drop")
    assert "drop: no device is left that can work." in table([result])
    summary = {"goodput": 0.9, "wall_s": 20.0, "device_s": {"replay": 1.5, "idle": 30.0}}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "events.jsonl").write_text(json.dumps(INCIDENT) + "\n")
    result = result_of("drop", run, None, SEQ_LEN)
    assert (result.goodput, result.work_repeated, result.devices_idle) == (0.9, 1.5, 1.5)
    assert (result.recovery_s, result.num_incidents) == (pytest.approx(3.5), 1)


def test_candidates_and_flags_of_train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a chain that is torn at its comma, a run that overwrites another's, a flag of train that is lost."""
    monkeypatch.chdir(ROOT)
    folder = str(tmp_path / "c")
    args, found = read_candidates([*EXAMPLE, "--strategies", "ntp", "ntp,drop", "--run", folder, "--train.steps", "20"])
    assert args.strategies == ("ntp", "ntp,drop")
    assert [(chain, config.on_failure, config.train.steps) for chain, config in found] == [
        ("ntp", "ntp", 20),
        ("ntp,drop", "ntp,drop", 20),
    ]
    assert [config.run for _, config in found] == [tmp_path / "c" / "ntp", tmp_path / "c" / "ntp+drop"]


def test_only_candidates_that_use_spares_hold_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches idle spares counted against strategies that never use them, and a flag that one candidate refuses."""
    monkeypatch.chdir(ROOT)
    argv = [*EXAMPLE, "--strategies", "ntp", "spare,ntp", "--spares", "2", "--run", str(tmp_path / "c")]
    assert [(chain, config.spares) for chain, config in read_candidates(argv)[1]] == [("ntp", 0), ("spare,ntp", 2)]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["examples/compare.toml"], "--inject is missing"),
        ([*EXAMPLE, "--strategies", "ntp", "ntp"], "name each candidate once"),
        ([*EXAMPLE, "--strategies", "ntp", "pray"], "pray"),
        ([*EXAMPLE, "--train.step", "3"], "train.step"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_a_run(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a comparison that fails after its first run of ten minutes."""
    monkeypatch.chdir(ROOT)
    with pytest.raises((ConfigError, SystemExit)) as caught:
        read_candidates(argv)
    assert words in str(caught.value) + capsys.readouterr().err
