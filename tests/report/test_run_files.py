"""Reading a run's folder: whole, damaged, foreign, growing."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from runflat.errors import DataError
from runflat.report.run_files import RunFiles, read_run

MakeRun = Callable[..., Path]


def test_all_files_are_read(run_folder: Path) -> None:
    """Catches a reader that drops or alters what the run wrote."""
    data = read_run(run_folder)
    summary = json.loads((run_folder / "summary.json").read_text())
    assert [step.step for step in data.steps] == list(range(10))
    assert data.incidents[0].phases_s[0] == ("detect", 0.02)
    assert data.incidents[0].stopped_s == 0.13
    assert data.changes[0].joined == ("1:1",)
    assert dict(data.ledger) == summary["device_s"]
    assert data.goodput == summary["goodput"]
    assert [data.plans[number].replicas[1].degree for number in (0, 1, 2)] == [2, 1, 2]
    assert (data.emulated, data.total_steps, data.layout, data.problems) == (True, 10, (2, 2), ())


def test_damage_costs_what_is_damaged(run_folder: Path) -> None:
    """Catches a reader that gives up, or says nothing, when files are cut off, missing or of something else."""
    text = (run_folder / "steps.jsonl").read_text()
    (run_folder / "steps.jsonl").write_text("not json\n" + text[:-30])
    (run_folder / "summary.json").write_text("[1, 2]")
    (run_folder / "plans" / "generation-000001.json").write_text('{"generation": 1}')
    with (run_folder / "events.jsonl").open("a") as file:
        file.write('{"record": "incident", "number": "seven"}\n')
    data = read_run(run_folder)
    assert [step.step for step in data.steps] == list(range(9))
    assert sorted(data.plans) == [0, 2]
    assert len(data.incidents) == 1
    said = "\n".join(data.problems)
    for words in (
        "steps.jsonl: 1 lines cannot be used: not JSON",
        "steps.jsonl: its last line is cut off",
        "summary.json cannot be used: it holds no JSON object",
        "events.jsonl: 1 lines cannot be used: number is 'seven'",
        "generation-000001.json: not a plan",
    ):
        assert words in said


@pytest.mark.parametrize("what", ["no folder", "empty", "foreign"])
def test_a_folder_without_a_run_is_refused_with_what_is_there(tmp_path: Path, what: str) -> None:
    """Catches an empty report of something that is no run."""
    folder = tmp_path / "x"
    if what != "no folder":
        folder.mkdir()
    if what == "foreign":
        (folder / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(DataError, match="holds nothing that can be reported") as caught:
        read_run(folder)
    assert ("it has config.json" if what == "foreign" else "none of these is there") in str(caught.value)


def test_growing_files_are_followed(run_folder: Path) -> None:
    """Catches a follower that reads lines twice, takes half a line for a whole one, or misses a file written anew."""
    steps = run_folder / "steps.jsonl"
    rows = steps.read_text().splitlines(keepends=True)
    steps.write_text("".join(rows[:3]) + rows[3][:20])
    files = RunFiles(run_folder)
    first = files.poll()
    assert first is not None
    assert len(first.steps) == 3
    assert files.poll() is None
    with steps.open("a") as file:
        file.write(rows[3][20:])
    second = files.poll()
    assert second is not None
    assert [step.step for step in second.steps] == [0, 1, 2, 3]
    steps.write_text(rows[0])  # the run went back
    third = files.poll()
    assert third is not None
    assert [step.step for step in third.steps] == [0]
    assert third.problems == ()


def test_sessions_follow_each_other_in_time(make_run: MakeRun, tmp_path: Path) -> None:
    """Catches a resumed run whose second session is drawn on top of the first."""
    folder = make_run(tmp_path / "twice")
    for name in ("steps.jsonl", "events.jsonl"):
        path = folder / name
        path.write_text(path.read_text() * 2)
    data = read_run(folder)
    assert data.starts_s == (0.0, 10.0)
    times = [step.time_s for step in data.steps]
    assert times == sorted(times)
    assert [row.started_s for row in data.incidents] == [5.2, 15.2]
    assert data.ledgers[-1].time_s == 20.0


def test_a_ledger_before_the_start_is_no_session(make_run: MakeRun, tmp_path: Path) -> None:
    """Catches a run that seems to have been resumed because its workers were slow to come."""
    folder = make_run(tmp_path / "slow")
    path = folder / "events.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    start = next(i for i, row in enumerate(rows) if row.get("record") == "plan" and row.get("action") == "start")
    early = {**next(row for row in rows if row.get("record") == "ledger"), "time_s": rows[start]["time_s"] - 0.01}
    rows.insert(start, early)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_run(folder).starts_s == (0.0,)
