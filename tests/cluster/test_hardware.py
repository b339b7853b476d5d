"""Hardware files: each loads, says where its numbers come from, and a wrong one is refused with the key named."""

import json
from pathlib import Path

import pytest

from runflat.cluster.hardware import Hardware, hardware_names, load_hardware, parse_hardware
from runflat.errors import ConfigError


def h100() -> dict[str, object]:
    """Returns the H100's file as data that a test may spoil."""
    data: dict[str, object] = load_hardware("h100").model_dump()
    return data


@pytest.mark.parametrize("name", hardware_names())
def test_shipped_files(name: str) -> None:
    """Catches a sparse rate (twice the dense one), a bidirectional link, bits taken for bytes, a wrong name."""
    hardware = load_hardware(name)
    assert hardware.name == name
    assert 0.6 < hardware.bf16_sustained_tflops.value / hardware.bf16_peak_tflops.value < 0.9
    assert 300 <= hardware.bf16_peak_tflops.value <= 2500
    assert 300 <= hardware.link_gbytes_per_s.value <= 900
    assert 25e9 <= hardware.network_bytes_per_s <= 100e9
    assert hardware.domain in (8, 72)


def test_six_devices_come_with_the_package() -> None:
    """Catches a data file that the package does not find."""
    assert hardware_names() == ("a100", "b200", "gb200", "gb300", "h100", "h200")


def test_own_file(tmp_path: Path) -> None:
    """Catches a user's file that is read by name only."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**h100(), "name": "mine"}))
    assert load_hardware(str(path)).name == "mine"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_sms": {"value": 132}}, "num_sms.source"),
        ({"memory_gb": {"value": 0, "source": "x"}}, "memory_gb.value"),
        ({"memory_gib": {"value": 80, "source": "x"}}, "memory_gib"),
        ({"bf16_sustained_tflops": {"value": 2000, "source": "x"}}, "above bf16_peak_tflops"),
        ({"fp8_peak_tflops": None}, "belong together"),
        ({"domain_size": {"value": 7.5, "source": "x"}}, "whole number"),
    ],
)
def test_wrong_entries_are_named(change: dict[str, object], said: str) -> None:
    """Catches a number without a source, a misspelt key, and rates that contradict each other, read in silence."""
    with pytest.raises(ConfigError, match=said):
        parse_hardware(json.dumps({**h100(), **change}), "mine.json")


def test_unknown_names(tmp_path: Path) -> None:
    """Catches a traceback instead of the list of what there is."""
    with pytest.raises(ConfigError, match="a100, b200"):
        load_hardware("h1000")
    with pytest.raises(ConfigError, match="no hardware file"):
        load_hardware(str(tmp_path / "absent.json"))
    with pytest.raises(ConfigError, match="not JSON"):
        parse_hardware("{", "mine.json")


def test_precision() -> None:
    """Catches an fp8 prediction on a device without fp8 units."""
    a100: Hardware = load_hardware("a100")
    assert a100.matmul_flops_per_s("fp16") == a100.matmul_flops_per_s("bf16")
    with pytest.raises(ConfigError, match="no fp8 rate"):
        a100.matmul_flops_per_s("fp8")
