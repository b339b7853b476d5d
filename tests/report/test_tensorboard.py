"""TensorBoard's event file of a run: which numbers are in it, at which step; what is said where there is none."""

import importlib.util
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from runflat import cli
from runflat.commands.watching import Watching, watched
from runflat.errors import ConfigError
from runflat.report.run_files import read_run
from runflat.report.scalars import Told, new_scalars
from runflat.report.tensorboard import ScalarWriter

MakeRun = Callable[..., Path]
Curves = dict[str, list[tuple[int, float]]]
HEAD, FOOT = 12, 4
"""Bytes before and after a record: its length with a checksum, and a checksum of the record."""


def curves(folder: Path) -> Curves:
    """(step, value) of each tag of the event file, which TensorBoard itself reads in the same way."""
    (path,) = folder.iterdir()
    data, at = path.read_bytes(), 0
    found: Curves = {}
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + HEAD : at + HEAD + size])
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
        at += HEAD + size + FOOT
    assert at == len(data)
    return found


def test_all_numbers_of_a_run_are_there(run_folder: Path, tmp_path: Path) -> None:
    """Catches a number that is missing, at another step, or under another name than the field's."""
    with watched(Watching(tensorboard=tmp_path / "tb"), run_folder, pytest.fail):
        pass
    found = curves(tmp_path / "tb")
    data = read_run(run_folder)
    assert found["train/loss"] == [(step.step, pytest.approx(step.loss)) for step in data.steps]
    assert found["train/tokens_per_s"][0] == (0, 2048.0)
    assert found["degree/replica_0"] == [(step, 2.0) for step in range(10)]
    assert found["degree/replica_1"] == [(step, 1.0 if 5 <= step < 9 else 2.0) for step in range(10)]
    assert found["goodput/goodput"] == [(9, 50.0)]
    assert found["badput/elastic_slice_down/failed"] == [(9, pytest.approx(7.5))]
    assert found["badput/elastic_slice_down/idle"] == [(9, pytest.approx(3.75))]
    assert found["recovery/stopped_s"] == [(5, pytest.approx(0.13))]
    assert found["recovery/first_commit_s"] == [(5, pytest.approx(0.73))]
    assert found["recovery/moved_bytes"] == [(5, 468_480.0)]
    assert found["change/moved_bytes"] == [(9, 1_738_240.0)]
    assert not [tag for tag in found if "productive" in tag or tag.startswith("power")]


def test_power_has_curves_where_it_is_known(run_folder: Path) -> None:
    """Catches power that never reaches TensorBoard, or a dead reading that becomes a zero."""
    path = run_folder / "steps.jsonl"
    power = '{"power": {"limit_w": 4000.0, "draw_w": null, "devices": {"1:0": [1333.0, 1290.0]}}, '
    path.write_text(path.read_text().replace("{", power, 1))
    found = {scalar.tag: scalar for scalar in new_scalars(read_run(run_folder), Told())[0]}
    assert (found["power/limit_w"].step, found["power/limit_w"].value) == (0, 4000.0)
    assert found["power/device_1_0/draw_w"].value == 1290.0
    assert "power/draw_w" not in found


def test_parts_of_a_step_have_curves(run_folder: Path) -> None:
    """Catches parts of a step that never reach TensorBoard, and those of a replica for which others waited not."""
    path = run_folder / "steps.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for replica, (forward_s, sync_s) in zip(rows[3]["replicas"], ((0.2, 0.05), (0.3, 0.01)), strict=True):
        replica["parts_s"] = {"forward": forward_s, "sync": sync_s}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scalars, _ = new_scalars(read_run(run_folder), Told())
    found = [(one.tag, one.step, one.value) for one in scalars if one.tag.startswith("parts/")]
    assert found == [("parts/forward_s", 3, 0.3), ("parts/sync_s", 3, 0.05)]


def test_each_number_is_told_once(run_folder: Path) -> None:
    """Catches points that are written again at each look, and steps that are lost between two of them."""
    steps = (run_folder / "steps.jsonl").read_text().splitlines(keepends=True)
    told, tags = Told(), []
    for count in (3, 3, 10):
        (run_folder / "steps.jsonl").write_text("".join(steps[:count]))
        scalars, told = new_scalars(read_run(run_folder), told)
        tags += [
            (scalar.tag, scalar.step) for scalar in scalars if scalar.tag == "train/loss" or "recovery" in scalar.tag
        ]
    assert len(tags) == len(set(tags)) == 10 + 3


def test_the_steps_of_a_resumed_run_are_told(run_folder: Path) -> None:
    """Catches a second session that moves the times of the first, so that old steps come again and new ones never."""
    events, path = run_folder / "events.jsonl", run_folder / "steps.jsonl"
    told, tags = Told(), []
    begun, first = events.read_text(), path.read_text()
    for text, steps in (("", ""), (begun, ""), ("", first)):
        events.write_text(events.read_text() + text)
        path.write_text(path.read_text() + steps.replace('"step": ', '"step": 1'))
        scalars, told = new_scalars(read_run(run_folder), told)
        tags += [scalar.step for scalar in scalars if scalar.tag == "train/loss"]
    assert tags == [*range(10), *range(10, 20)]


def test_without_the_library_it_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Catches a traceback, or a run that starts and then has no event file."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.run(["train", "--run", str(tmp_path / "r"), "--tensorboard", str(tmp_path / "tb")]) == 2
    assert "needs the package tensorboardX" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "r").exists()


def test_a_folder_that_cannot_be_written_is_named(run_folder: Path) -> None:
    """Catches a traceback for a folder that is a file."""
    with pytest.raises(ConfigError, match=r"steps\.jsonl cannot be written"):
        ScalarWriter(run_folder, run_folder / "steps.jsonl", pytest.fail)
