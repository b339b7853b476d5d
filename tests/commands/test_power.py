"""`runflat power probe` and `runflat power-agent`: what they say and how they end."""

import json
from pathlib import Path

import fake_nvml
import pynvml
import pytest

from runflat.cli import run
from runflat.power.devices import DeviceFacts, Reading
from runflat.power.fakes import FakeNode
from runflat.power.probe import Probed, probe, summary


def probed(*, max_w: float = 1200.0, **reading: object) -> Probed:
    """One device at 960 W, with some fields changed."""
    facts = DeviceFacts(uuid="GPU-a", index=0, name="Fake", min_w=200.0, max_w=max_w, default_w=max_w)
    fields = {"limit_w": 960.0, "enforced_w": 960.0, "reasons": frozenset({"power-cap"})} | reading
    return Probed(facts=facts, reading=Reading(**fields))


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (probed(), "boost up to 1.25x the power (960 to 1200 W)"),
        (probed(max_w=960.0), "no boost: it already runs at its maximum"),
        (probed(enforced_w=500.0), "holds it at 500 W"),
        (probed(reasons=frozenset({"power-brake"})), "no boost while it does"),
        (probed(reasons=frozenset({"reliability"})), "more watts would not make this load faster"),
        (probed(margin_c=3.0), "only 3 C are left"),
    ],
)
def test_words(device: Probed, words: str) -> None:
    """Catches a promise of a boost that cannot come, or none where one can."""
    assert words in device.verdict()


def test_probe_reads_only_and_names_what_it_cannot_read() -> None:
    """Catches a probe that writes, or that one broken device brings down."""
    node = FakeNode()
    node.devices.devices["GPU-b"].failure = "driver"
    found = probe(node)
    assert [device.reading is None for device in found] == [False, True, False]
    assert "cannot be read" in found[1].verdict()
    assert "2 of 3 devices have headroom, at least 1.25x" in summary(found)
    assert "None of 1 devices has headroom" in summary([probed(max_w=960.0)])
    assert node.written == []


def test_no_driver(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback on a machine without a driver, and a wrong word for what to do."""

    def absent(name: str) -> object:
        raise OSError(name)

    monkeypatch.setattr(pynvml, "CDLL", absent)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    assert run(["power", "probe"]) == 2
    assert "NVIDIA driver" in capsys.readouterr().err.replace("\n", " ")
    assert run(["power"]) == 2
    assert "runflat power probe" in capsys.readouterr().err.replace("\n", " ")
    assert run(["power-agent", "--state", str(tmp_path)]) == 2
    assert "NVIDIA driver" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.needs_compiler
def test_json(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a record that a program cannot read, or units that differ from the words."""
    driver = fake_nvml.FakeNvml(tmp_path / "driver", num_devices=2)
    monkeypatch.setenv("FAKE_NVML_STATE", str(driver.path))
    with fake_nvml.loaded(fake_nvml.build(tmp_path)):
        assert run(["power", "probe", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert run(["power", "probe"]) == 0
        said = capsys.readouterr().out
    assert [device["uuid"] for device in found["devices"]] == ["GPU-0", "GPU-1"]
    assert (found["devices"][0]["headroom_w"], found["devices"][0]["limit_w"]) == (240.0, 960.0)
    assert found["devices"][0]["reasons"] == ["power-cap"]
    assert "limit 960 W, in force 960 W, draws 960 W, headroom 240 W" in said
