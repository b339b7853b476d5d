"""A node with emulated devices and an agent on it; a driver of the tests' own under the real nvidia-ml-py."""

from collections.abc import Iterator
from pathlib import Path

import fake_nvml
import pytest

from runflat.power.fakes import FakeNode


@pytest.fixture
def node() -> FakeNode:
    """Three devices at 960 of 1200 W, and an agent that has just started."""
    return FakeNode()


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled library."""
    return fake_nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_nvml.FakeNvml]:
    """Three devices of the fake driver; nvidia-ml-py of this process talks to them."""
    driver = fake_nvml.FakeNvml(tmp_path / "driver")
    monkeypatch.setenv("FAKE_NVML_STATE", str(driver.path))
    with fake_nvml.loaded(nvml_library):
        yield driver
