"""Figures of a live page, which rest between two drawings."""

import json
from collections.abc import Callable
from pathlib import Path

from runflat.report.live import Snapshots

MakeRun = Callable[..., Path]


def test_figures_that_had_to_wait_are_owed(make_run: MakeRun, tmp_path: Path) -> None:
    """Catches a page whose figures stay old when nothing changes after a change that came while they rested."""
    run = make_run(tmp_path / "job", finished=False)
    clock = iter([0.0, 0.0, 2.0, 2.0, 9.0, 9.0, 22.0, 22.0, 22.0, 24.0, 24.0])
    snapshots = Snapshots(run, lambda: next(clock))
    snapshots.refresh()
    _, sent = snapshots.message()  # drawn from 0 to 2 s: they rest until 22 s
    assert not snapshots.owes_figures(sent)
    devices = json.loads((run / "devices.json").read_text())
    (run / "devices.json").write_text(json.dumps(devices | {"step": 77}))
    snapshots.refresh()
    text, sent = snapshots.message(sent)
    assert json.loads(text)["html"] == {}
    assert not snapshots.owes_figures(sent)  # at 9 s
    assert snapshots.owes_figures(sent)
    text, sent = snapshots.message(sent)
    assert json.loads(text)["html"] != {}
    assert not snapshots.owes_figures(sent)
