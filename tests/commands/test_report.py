"""`runflat report`: what it writes, and what it says when it cannot."""

import json
from pathlib import Path

import pytest

from runflat import cli
from runflat.commands import report
from runflat.errors import DataError

RESULT = Path(__file__).parents[2] / "experiments" / "availability" / "result.json"


def test_page_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a report that leaves out the files it promises; a result of this repository is its input."""
    page, figures = tmp_path / "out" / "r.html", tmp_path / "figures"
    assert cli.run(["report", str(RESULT), "-o", str(page), "--figures", str(figures)]) == 0
    said = capsys.readouterr().out
    assert str(page) in said
    assert "figures: 3 files" in said
    assert page.read_text().startswith("<!doctype html>")
    assert {path.suffix for path in figures.iterdir()} == {".svg", ".png", ".csv"}
    svg = next(figures.glob("*.svg")).read_text()
    assert "var(" not in svg
    assert str(RESULT) in svg
    assert next(figures.glob("*.png")).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("absent.json", None, "holds nothing that can be reported"),
        ("cut.json", '{"name": "x", "results": [', "cannot be reported"),
        ("list.json", "[]", "holds no JSON object"),
        ("other.json", '{"a": 1}', "none of the keys results"),
        ("half.json", '{"name": "x", "results": [{"candidate": "ntp"}]}', "damaged or of another version"),
    ],
)
def test_bad_input_is_one_paragraph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, says: str
) -> None:
    """Catches a traceback, or an empty page, for files that are missing, cut off or of something else."""
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    assert cli.run(["report", str(path), "-o", str(tmp_path / "r.html")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert says in said
    assert "Traceback" not in said
    assert not (tmp_path / "r.html").exists()


def test_a_folder_of_runs_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a user who has to guess which folder of `runs/demo` is a run."""
    for name in ("whole", "hurt", "other"):
        (tmp_path / name).mkdir()
        if name != "other":
            (tmp_path / name / "steps.jsonl").touch()
    assert cli.run(["report", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 2
    said = "".join(capsys.readouterr().err.split())
    assert f"hasrunsinit:name{tmp_path / 'hurt'},{tmp_path / 'whole'}." in said


def test_nothing_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a page about nothing."""
    assert cli.run(["report"]) == 2
    assert "nothing to report" in capsys.readouterr().err


def test_a_damaged_run_is_reported_with_a_warning(tmp_path: Path) -> None:
    """Catches damage that is left out in silence."""
    run = tmp_path / "r"
    run.mkdir()
    (run / "summary.json").write_text(json.dumps({"step": 3, "device_s": {"productive": 3.0, "failed": 1.0}}))
    said = report.write_report(report.ReportArgs((run,), tmp_path / "r.html"))
    assert "warning: r: steps.jsonl is missing" in said
    assert "steps.jsonl is missing" in (tmp_path / "r.html").read_text()


def test_a_comparison_shows_each_strategy(tmp_path: Path) -> None:
    """Catches a comparison whose runs are not found, or whose numbers are not those of compare.json."""
    for name in ("ntp", "drop"):
        (tmp_path / name).mkdir()
        row = {"step": 0, "time_s": 1.0, "step_s": 0.5, "tokens_per_s": 100.0, "loss": 5.0, "generation": 0}
        (tmp_path / name / "steps.jsonl").write_text(json.dumps(row) + "\n")
    none = {"words": None, "recovery_s": None, "longest_recovery_s": 0.7, "work_repeated": 0.0, "devices_idle": 0.0}
    rows = [
        {"strategies": name, "run": name, "goodput": goodput, "wall_s": 9.0, "num_incidents": 1, **none}
        for name, goodput in (("ntp", 0.9), ("drop", 0.8))
    ]
    (tmp_path / "compare.json").write_text(json.dumps({"inject": "f.json", "runs": rows}))
    report.write_report(report.ReportArgs((tmp_path,), tmp_path / "r.html"))
    page = (tmp_path / "r.html").read_text()
    assert page.count('role="tab"') == 3
    assert "90 %" in page
    assert "Tokens per second under each strategy" in page
    (tmp_path / "compare.json").write_text(json.dumps({"runs": [{"strategies": "ntp"}]}))
    with pytest.raises(DataError, match="no comparison of this version"):
        report.write_report(report.ReportArgs((tmp_path,), tmp_path / "r.html"))


def test_a_run_of_something_else_is_not_compared(tmp_path: Path) -> None:
    """Catches a loss that is drawn over that of another model, with a difference that means nothing."""
    for name, preset in (("whole", "tiny"), ("same", "tiny"), ("other", "demo")):
        (tmp_path / name).mkdir()
        rows = [
            {"step": step, "time_s": 1.0 + step, "loss": 5.0 - step - 0.1 * (name == "same"), "generation": 0}
            for step in range(3)
        ]
        (tmp_path / name / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / name / "config.json").write_text(json.dumps({"model": {"preset": preset}}))
    runs = (tmp_path / "same", tmp_path / "other")
    report.write_report(report.ReportArgs(runs, tmp_path / "r.html", whole=tmp_path / "whole"))
    page = (tmp_path / "r.html").read_text()
    assert 'id="v1-loss-difference"' in page
    assert 'id="v2-loss"' in page
    assert 'id="v2-loss-difference"' not in page
