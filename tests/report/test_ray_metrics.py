"""A run's numbers as gauges of Ray, with a stand-in for Ray's own."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from runflat.commands.watching import Watching, watched
from runflat.report.metrics import metrics
from runflat.report.ray_metrics import RayGauges
from runflat.report.run_files import RunData, read_run

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> Values:
    """Returns what each gauge of Ray is set to, by name and tags."""
    found: Values = {}

    class Gauge:
        """As Ray's: the tags of each value are those that were named."""

        def __init__(self, name: str, description: str, tag_keys: Sequence[str]):
            assert description
            self._name, self._keys = name, set(tag_keys)

        def set(self, value: float, tags: Mapping[str, str]) -> None:
            assert set(tags) == self._keys
            found[self._name, tuple(tags.items())] = value

    for name in ("ray", "ray.util", "ray.util.metrics"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["ray.util.metrics"], "Gauge", Gauge, raising=False)
    return found


def test_all_metrics_of_a_run_are_set(run_folder: Path, values: Values) -> None:
    """Catches a number of `/metrics` that Ray's dashboard does not have, or has with other labels."""
    with watched(Watching(ray=True), run_folder, pytest.fail):
        pass
    expected = {
        (name, tuple(labels.items())): value
        for name, _, _, samples in metrics(read_run(run_folder))
        for labels, value in samples
    }
    assert values == expected
    assert values["runflat_step", ()] == 10


def test_what_is_no_longer_said_is_zero(run_folder: Path, values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a device that stays counted in a state that it has left."""
    said = [{"lost": 1.0, "active": 3.0}, {"active": 4.0}]

    def some(_: RunData) -> Iterator[tuple[str, str, str, list[tuple[dict[str, str], float]]]]:
        yield "devices", "gauge", "words", [({"state": state}, value) for state, value in said.pop(0).items()]

    monkeypatch.setattr("runflat.report.ray_metrics.metrics", some)
    gauges = RayGauges(run_folder)
    gauges.close()
    gauges.take(read_run(run_folder))
    assert values == {("devices", (("state", "lost"),)): 0.0, ("devices", (("state", "active"),)): 4.0}
