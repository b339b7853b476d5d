"""The device map: what each cell says, and when it changes."""

import json
from collections.abc import Callable
from pathlib import Path

from runflat.report.device_map import DeviceMap, at_frame, device_map, worst_frame
from runflat.report.map_svg import draw_map
from runflat.report.metrics import prometheus
from runflat.report.run_files import read_run

MakeRun = Callable[..., Path]


def powered(run: Path, raised: int, lowered: int) -> Path:
    """The run, with 1:0 at a higher limit from step `raised` until step `lowered`, and power drawn in all of them."""
    rows = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    for row in rows:
        limit_w = 1333.0 if raised <= row["step"] < lowered else 1000.0
        devices = {name: [1000.0, 900.0 + row["step"]] for name in ("0:0", "0:1", "1:1")}
        row["power"] = {"limit_w": 4000.0, "draw_w": 3800.0, "devices": devices | {"1:0": [limit_w, None]}}
    (run / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def words(found: DeviceMap, number: int) -> dict[str, str]:
    """Power of each device in a frame."""
    return {device: look.power for device, look in zip(found.devices, at_frame(found, number)[0], strict=True)}


def test_limits_and_draw_follow_the_steps(make_run: MakeRun, tmp_path: Path) -> None:
    """Catches power of another device or moment, limits that change unseen, and a frame for every step's draw."""
    found = device_map(read_run(powered(make_run(tmp_path / "r"), 6, 9)))
    assert found is not None
    assert found.has_power
    changes = [number for number, frame in enumerate(found.frames) if "power limits of 1:0" in frame.label]
    assert [found.frames[number].time_s for number in changes] == [6.6, 9.8]
    assert words(found, changes[0])["1:0"] == "▲1333 W limit"
    assert words(found, changes[1])["1:0"] == "1000 W limit"
    lost = next(number for number, frame in enumerate(found.frames) if "is lost" in frame.label)
    assert words(found, lost)["1:1"] == "1000 W limit · draws 904 W"
    assert words(found, len(found.frames) - 1)["0:1"] == "1000 W limit · draws 909 W"
    assert ">▲1333 W<" in draw_map(found, changes[0], 900)
    earlier = device_map(read_run(powered(make_run(tmp_path / "earlier"), 6, 8)))
    assert earlier is not None
    assert "▲1333 W limit" in words(earlier, worst_frame(earlier)).values()
    text = prometheus(read_run(tmp_path / "r"))
    assert 'runflat_device_power_watts{device="0:0"} 909.0\n' in text
    assert 'runflat_device_power_limit_watts{device="1:0"} 1000.0\n' in text
    assert 'runflat_device_power_watts{device="1:0"}' not in text


def test_without_power_nothing_is_said_of_it(run_folder: Path) -> None:
    """Catches an empty third line in every cell of runs in which nobody steers power."""
    found = device_map(read_run(run_folder))
    assert found is not None
    assert not found.has_power
    assert "data-p" not in draw_map(found, 0, 900)
