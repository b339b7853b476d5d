"""Figures: their numbers are those of the files, and every drawing holds what it was given."""

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runflat.report.chart import Bars, Figure, Line, Lines, Waterfall, decimate, log_ticks, people, ticks, to_csv
from runflat.report.device_map import at_frame, device_map, map_json, worst_frame
from runflat.report.map_svg import draw_map
from runflat.report.run_figures import MOST_BARS, incident_figure, run_figures
from runflat.report.run_files import read_run
from runflat.report.sim_figures import simulation_figures
from runflat.report.svg import NARROW, WIDE, draw

MakeRun = Callable[..., Path]


def by_key(figures: list[Figure]) -> dict[str, Figure]:
    """The figures by key."""
    return {figure.key: figure for figure in figures}


def test_numbers_are_those_of_the_files(run_folder: Path) -> None:
    """Catches a figure that computes otherwise than the run's books."""
    summary = json.loads((run_folder / "summary.json").read_text())
    figures = by_key(run_figures(read_run(run_folder)))
    assert set(figures) == {"tokens", "goodput", "incidents", "first-commit", "changes", "ledger", "loss"}
    goodput = figures["goodput"]
    assert isinstance(goodput, Lines)
    assert goodput.lines[0].x[-1] == summary["wall_s"]
    assert goodput.lines[0].y[-1] == summary["goodput"]
    ledger = figures["ledger"]
    assert isinstance(ledger, Waterfall)
    total = sum(summary["device_s"].values())
    shares = {fall.label: fall.share for fall in ledger.falls}
    assert shares["productive"] == summary["device_s"]["productive"] / total
    assert shares["goodput"] == summary["goodput"]
    assert sum(fall.share for fall in ledger.falls if fall.kind == "loss") + shares["productive"] == pytest.approx(1)
    incidents = figures["incidents"]
    assert isinstance(incidents, Bars)
    assert dict(incidents.bars[0].parts) == {
        "detect": 0.02,
        "abort": 0.01,
        "barrier": 0.01,
        "form": 0.02,
        "transfer": 0.03,
        "digest": 0.04,
    }
    tokens = figures["tokens"]
    assert isinstance(tokens, Lines)
    assert [mark.sign for mark in tokens.marks] == ["▼", "▲"]
    assert 0.0 in tokens.lines[0].y  # training stood


def test_csv_holds_every_number(run_folder: Path) -> None:
    """Catches a CSV that rounds, or leaves out what was not drawn."""
    data = read_run(run_folder)
    rows = list(csv.DictReader(io.StringIO(to_csv(by_key(run_figures(data))["loss"]))))
    assert [float(row["nats per token"]) for row in rows] == [step.loss for step in data.steps]


def test_without_goodput_none_is_drawn(make_run: MakeRun, tmp_path: Path) -> None:
    """Catches a goodput that the run itself did not give."""
    folder = make_run(tmp_path / "real", emulated=False)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "goodput": None, "goodput_reason": "shared cores"}))
    figures = by_key(run_figures(read_run(folder)))
    assert "goodput" not in figures
    ledger = figures["ledger"]
    assert isinstance(ledger, Waterfall)
    assert "goodput" not in [fall.label for fall in ledger.falls]


def test_many_incidents_are_cut_to_the_longest(run_folder: Path) -> None:
    """Catches a figure of a thousand rows, and one that hides the worst."""
    path = run_folder / "events.jsonl"
    row = next(json.loads(line) for line in path.read_text().splitlines() if '"incident"' in line)
    with path.open("a") as file:
        for number in range(2, 200):
            file.write(json.dumps({**row, "number": number, "stopped_s": number / 10}) + "\n")
    figure = incident_figure(read_run(run_folder))
    assert isinstance(figure, Bars)
    assert figure.bars[0].label.startswith("199:")
    assert len(figure.bars) - figure.num_left_out == MOST_BARS
    assert len(to_csv(figure).splitlines()) == 200
    assert draw(figure).count("<rect") <= MOST_BARS * 8


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_drawings_are_well_formed_and_inside(
    run_folder: Path, make_simulation: Callable[..., dict[str, Any]], width: int
) -> None:
    """Catches markup that no parser takes, and points outside of the picture."""
    from xml.etree import ElementTree

    figures = run_figures(read_run(run_folder), read_run(run_folder)) + simulation_figures(make_simulation())
    assert len(figures) > 10
    for figure in figures:
        svg = draw(figure, width)
        root = ElementTree.fromstring(svg)
        _, _, wide, high = map(float, root.attrib["viewBox"].split())
        assert wide == width
        for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", svg):
            assert -1 <= float(x) <= wide + 1
            assert -1 <= float(y) <= high + 1


def test_hostile_names_are_words(make_run: MakeRun, tmp_path: Path) -> None:
    """Catches a device, cause or strategy name that becomes markup."""
    bad = "</svg><script>alert(1)</script>"
    folder = make_run(tmp_path / "small")
    path = folder / "events.jsonl"
    path.write_text(path.read_text().replace("killed by signal 9 (SIGKILL)", bad))
    for figure in run_figures(read_run(folder)):
        assert "<script" not in draw(figure)


def test_the_map_shows_what_happened(run_folder: Path) -> None:
    """Catches a map that loses a device at the wrong moment, or forgets that it came back."""
    found = device_map(read_run(run_folder))
    assert found is not None
    assert found.blocks == (("replica 0", ("0:0", "0:1")), ("replica 1", ("1:0", "1:1")))
    story = [(frame.label.partition(":")[0], at_frame(found, number)) for number, frame in enumerate(found.frames)]
    states = [[look.state for look in looks] for _, (looks, _) in story]
    assert states[0] == ["starting"] * 4
    assert states[-1] == ["active"] * 4
    worst = worst_frame(found)
    looks, words = at_frame(found, worst)
    assert [look.state for look in looks] == ["active"] * 3 + ["lost"]
    assert words == ["TP 2 of 2 · 4 sequences", "TP 1 of 2 · 4 sequences"]
    assert looks[2].units == "4 heads"
    assert found.frames[worst].label == "generation 1 is in force"
    svg = draw_map(found, worst, WIDE)
    assert svg.count('class="cell m-L"') == 1
    assert len(json.loads(map_json(found))["frames"]) == len(found.frames)


def test_thousands_of_devices_stay_small(large_run: Path) -> None:
    """Catches a map whose size is devices times events: 4,096 devices in 72-device domains, 400 losses and returns."""
    found = device_map(read_run(large_run))
    assert found is not None
    assert len(found.devices) == 4096
    assert [name for name, _ in found.blocks][-1] == "spares"
    assert len(map_json(found)) < 400_000
    svg = draw_map(found, worst_frame(found), WIDE)
    assert svg.count("<rect") == 4096
    assert len(svg) < 600_000


def test_axes_and_numbers_for_people() -> None:
    """Catches axes without ticks, and numbers that nobody can read."""
    assert ticks(0, 1, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(3, 3, 5) == [3]
    assert log_ticks(1e-7, 1e-3) == pytest.approx([1e-7, 1e-6, 1e-5, 1e-4, 1e-3])
    assert [people(value, unit) for value, unit in ((0.7997, "%"), (468_480, "B"), (5523.4, ""), (0.1191491, "s"))] == [
        "79.97 %",
        "468.5 kB",
        "5,523",
        "0.1191 s",
    ]


def test_thinned_lines_keep_their_peaks() -> None:
    """Catches a thinned-out line that loses the one point that matters."""
    y = [1.0] * 100_000
    y[54_321] = 0.0
    kept = decimate(range(100_000), y, 900)
    assert 54_321 in kept
    assert len(kept) <= 1000
    figure = Lines(
        key="k",
        title="t",
        says="s",
        x_label="x",
        y_label="y",
        lines=(Line(label="l", x=tuple(map(float, range(100_000))), y=tuple(y), color="blue"),),
    )
    assert len(draw(figure)) < 20_000
