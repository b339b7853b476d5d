"""A calibration of a real run: emulated devices with a known curve, and a link whose time does not scale."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from runflat.cli import run
from runflat.commands.demo_power import SETTINGS
from runflat.power.curve import curve_named

SMALL: dict[str, Any] = {
    **SETTINGS,
    "layout.tp": 2,
    "layout.replicas": 1,
    "train.global-batch": 2,
    "train.steps": 300,
    "device.rate-tflops": 2e-4,
    "device.curve": "ntp",
    "device.domain-link-gbps": 0.02,
    "device.power": 0.9,
    "device.max-power": 1.0,
    "device.min-power": 0.6,
}


def arguments(folder: Path, **changes: Any) -> list[str]:
    """A command line for the small job."""
    flags = {key: value for key, value in (SMALL | {"run": folder / "run"} | changes).items() if key != "boost"}
    return ["power", "calibrate", *(f"--{key}={value}" for key, value in flags.items())]


def test_dry_run_says_what_it_would_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a dry run that trains or sets something, and levels that are not those of the walk."""
    assert run([*arguments(tmp_path), "--dry-run", "--lowest", "0.7", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["limits_w"] == pytest.approx([900.0, 810.0, 720.0, 630.0])
    assert run([*arguments(tmp_path), "--dry-run"]) == 0
    assert "dry run: 2 devices would be set to 900 W, 825 W, 750 W, 675 W" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--levels", "1"], "--levels is 1"),
        (["--level-steps", "2"], "--level-steps is 2"),
        (["--lowest", "1.5"], "--lowest is 1.5"),
        (["--train.steps", "50"], "would end after 50 steps"),
        (["--device.min-power", "0.9"], "no limit can go below the nominal 900 W"),
        (["--boost"], "leave boost and power.save out"),
        (["--no-such-flag"], "no-such-flag"),
    ],
)
def test_what_cannot_be_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    """Catches a calibration that starts and finds out later, and flags that vanish between two parsers."""
    with contextlib.suppress(SystemExit):  # a flag that nobody knows
        assert run([*arguments(tmp_path), *flags]) == 2
    found = capsys.readouterr()
    assert words in " ".join((found.err + found.out).split())


@pytest.mark.process
@pytest.mark.timeout(240)
def test_a_known_curve_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a live calibration whose curve is not that of the devices to 1 %, or that keeps the last level."""
    out = tmp_path / "mine.json"
    flags = ["--levels=3", "--level-steps=4", "--lowest=0.7", f"--out={out}", "--json"]
    assert run([*arguments(tmp_path), *flags]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [level["limit_w"] for level in record["levels"]] == pytest.approx([900.0, 765.0, 630.0])
    assert record["fit"]["by_clock"]
    assert 0.05 < record["fit"]["fixed_s"] / (record["fit"]["fixed_s"] + record["fit"]["compute_s"]) < 0.8
    found, real = curve_named(str(out)), curve_named("ntp")
    for power in (0.63, 0.765):
        assert found.ratio(power, 0.9) == pytest.approx(real.ratio(power, 0.9), rel=0.01)
    assert "2 limits" not in found.source
    assert "emulated devices" in found.source
    restored = [json.loads(line) for line in (tmp_path / "run" / "power.jsonl").read_text().splitlines()]
    last = {row["facts"]["uuid"]: row["facts"]["limit_w"] for row in restored if row["event"] in ("set", "restored")}
    assert last == {"0:0": 900.0, "0:1": 900.0}
