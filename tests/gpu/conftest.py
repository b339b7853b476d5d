"""One GPU, and NCCL as a worker process has it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from runflat.parallel.nccl import PROCESS_SETTINGS, site_settings

BUSY_CYCLES = 1_000_000_000
"""Clock cycles of a kernel that does nothing: between half a second and one."""


@pytest.fixture
def gpu() -> torch.device:
    """Returns the first GPU, which is the current one."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device


@pytest.fixture
def keep_busy(gpu: torch.device) -> Callable[[], None]:
    """Returns what gives the current stream work of half a second or more; it returns at once."""
    spin = torch.cuda._sleep  # the device does; the test goes on
    spin(1)  # a kernel is loaded at its first use, for which the device may be waited for
    return lambda: spin(BUSY_CYCLES)


@pytest.fixture
def nccl_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment in which a worker process makes its groups. torch reads it whenever a group is made."""
    for name, value in {**site_settings(None), **PROCESS_SETTINGS}.items():
        monkeypatch.setenv(name, value)
