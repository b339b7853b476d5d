"""Files that somebody else wrote, or half wrote: a report of what is readable or one clear error, never a traceback."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runflat.errors import DataError
from runflat.report.compare_view import compare_views
from runflat.report.device_map import map_json
from runflat.report.metrics import prometheus
from runflat.report.page import render
from runflat.report.run_files import read_run
from runflat.report.scalars import Told, new_scalars
from runflat.report.terminal import screen
from runflat.report.views import result_view, run_view

RESULT = Path(__file__).parents[2] / "experiments" / "availability" / "result.json"
FILES = (
    "config.json",
    "run.json",
    "devices.json",
    "summary.json",
    "plans/generation-000001.json",
    "steps.jsonl",
    "events.jsonl",
)
VALUES = (None, True, -1, 1e308, float("nan"), float("inf"), "x", "", [], {}, [1], {"a": 1}, 10**400)
"""What may stand where something else should."""
JUNK = (b"", b"\x00\xff\xfe", bytes(range(256)), b"[" * 100_000, b'{"a":' * 50_000)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a JSON value; of long lists the first three entries."""
    yield at
    if isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value[:3])
        for key, inner in entries:
            yield from places(inner, (*at, key))


def altered(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """The JSON value with `new` at one place."""
    if not at:
        return new
    whole = inner = json.loads(json.dumps(value))
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = new
    return whole


def samples(value: Any, num: int) -> Iterator[Any]:
    """So many alterations of a JSON value, the same ones each time."""
    pick = random.Random(7)
    found = list(places(value))
    for _ in range(num):
        yield altered(value, pick.choice(found), pick.choice(VALUES))


def show(run: Path) -> None:
    """All that is made of a run's files; only a DataError is allowed."""
    try:
        data = read_run(run)
    except DataError:
        return
    view = run_view(data, "v1")
    if view.map:
        map_json(view.map)
    prometheus(data)
    screen(data, "running", "keys", 80, 24)
    new_scalars(data, Told())


@pytest.mark.parametrize("name", FILES)
def test_no_value_in_a_run_brings_a_report_down(make_run: Callable[..., Path], tmp_path: Path, name: str) -> None:
    """Catches a field that is taken on trust: a traceback, or a layout that fills the memory."""
    run = make_run(tmp_path / "r")
    path = run / name
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for number, row in enumerate(rows if len(rows) < 2 else rows[-8:], start=max(len(rows) - 8, 0)):
        for new in samples(row, 200 // min(len(rows), 8)):
            lines = [*rows[:number], new, *rows[number + 1 :]]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            show(run)


@pytest.mark.parametrize("name", FILES)
def test_junk_in_place_of_a_file_is_told(make_run: Callable[..., Path], tmp_path: Path, name: str) -> None:
    """Catches a file of something else, cut off or too deep, that stops the rest from being shown, or is not told."""
    run = make_run(tmp_path / "r")
    text = (run / name).read_bytes()
    for junk in (*JUNK, text[: len(text) // 2]):
        (run / name).write_bytes(junk)
        assert junk == b"" or read_run(run).problems
        render([run_view(read_run(run), "v1")], "t")
    (run / name).unlink()
    (run / name).mkdir()
    show(run)
    shutil.rmtree(run / name)
    show(run)


@pytest.mark.parametrize("kind", ["simulation", "figure"])
def test_no_value_in_a_result_brings_a_report_down(
    make_simulation: Callable[..., dict[str, Any]], tmp_path: Path, kind: str
) -> None:
    """Catches a number that cannot be drawn and is found out only while drawing."""
    whole = make_simulation(num_points=5) if kind == "simulation" else json.loads(RESULT.read_text())
    path = tmp_path / "x.json"
    for new in samples(whole, 120):
        path.write_text(json.dumps(new))
        try:
            view = result_view(path, "v1")
        except DataError:
            continue
        render([view], "t")


def test_no_value_in_a_comparison_brings_a_report_down(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """Catches a comparison whose fields are taken on trust."""
    make_run(tmp_path / "ntp")
    none = {"words": None, "recovery_s": None, "longest_recovery_s": 0.7, "work_repeated": 0.0, "devices_idle": 0.0}
    row = {"strategies": "ntp", "run": "ntp", "goodput": 0.9, "wall_s": 9.0, "num_incidents": 1, **none}
    path = tmp_path / "compare.json"
    for new in samples({"inject": "f.json", "runs": [row]}, 150):
        path.write_text(json.dumps(new))
        try:
            view, _ = compare_views(path)
        except DataError:
            continue
        render([view], "t")
