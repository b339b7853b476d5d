"""Builds the tests' own libnvidia-ml.so.1 and moves its devices; the layout is that of fake_nvml.c."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pynvml

MAX_DEVICES = 8
NOMINAL_W, MAX_W, MIN_W = 960, 1200, 200


class Device(ctypes.Structure):
    """One device; powers in milliwatts."""

    _fields_ = [
        ("uuid", ctypes.c_char * 64),
        ("name", ctypes.c_char * 64),
        *((name, ctypes.c_uint32) for name in ("min_mw", "max_mw", "default_mw", "limit_mw", "cap_mw", "clamp_mw")),
        *((name, ctypes.c_uint32) for name in ("draw_mw", "temperature_c", "slowdown_c", "clock_mhz", "reasons")),
        *((name, ctypes.c_uint32) for name in ("is_lost", "is_deaf", "no_margin", "delay_ms")),
        *((name, ctypes.c_uint32) for name in ("num_sets", "highest_set_mw")),
        ("energy_mj", ctypes.c_uint64),
    ]


class State(ctypes.Structure):
    """All of the driver."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("num_devices", "is_unloaded", "epoch", "no_permission")),
        *((name, ctypes.c_uint32) for name in ("shift_next", "num_v2_sets")),
        ("order", ctypes.c_uint32 * MAX_DEVICES),
        ("devices", Device * MAX_DEVICES),
    ]


def build(folder: Path) -> Path:
    """The library, compiled into `folder`."""
    library = folder / "libnvidia-ml.so.1"
    compiler = next(found for name in ("gcc", "cc", "clang") if (found := shutil.which(name)))
    source = Path(__file__).with_suffix(".c")
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, "-o", str(library), str(source)], check=True, timeout=50)
    return library


class FakeNvml:
    """A driver with devices `GPU-0`, `GPU-1`, ... at 960 of 1200 W, in a file that other processes can use too."""

    def __init__(self, path: Path, num_devices: int = 3):
        self.path = path
        path.write_bytes(bytes(ctypes.sizeof(State)))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self.state = State.from_buffer(self._memory)
        self.state.num_devices = num_devices
        for index in range(num_devices):
            self.state.order[index] = index
            device = self.state.devices[index]
            device.uuid, device.name = f"GPU-{index}".encode(), b"Fake 1200"
            device.min_mw, device.max_mw, device.default_mw = MIN_W * 1000, MAX_W * 1000, MAX_W * 1000
            device.limit_mw, device.draw_mw = NOMINAL_W * 1000, 1_150_000
            device.temperature_c, device.slowdown_c, device.reasons = 50, 90, 0x4
            device.clock_mhz, device.energy_mj = 1410, 5_000_000

    def device(self, uuid: str) -> Device:
        """The device, to be read and changed in place."""
        return next(found for found in self.state.devices if found.uuid == uuid.encode())

    def limits_w(self) -> list[float]:
        """The limits of all devices."""
        return [self.state.devices[index].limit_mw / 1000 for index in range(self.state.num_devices)]

    def reload_driver(self) -> None:
        """Every limit is the default again, counters start at zero, and whoever has the library open must init."""
        for device in self.state.devices:
            device.limit_mw, device.energy_mj = device.default_mw, 0
        self.state.epoch += 1


@contextmanager
def loaded(library: Path) -> Iterator[None]:
    """The real nvidia-ml-py over this library, in this process; undone afterwards."""
    real = pynvml.CDLL
    pynvml.CDLL = lambda name: real(str(library)) if name == "libnvidia-ml.so.1" else real(name)
    try:
        yield
    finally:
        pynvml.CDLL = real
        pynvml.nvmlLib = None
        pynvml._nvmlLib_refcount = 0
        pynvml._nvmlGetFunctionPointer_cache.clear()
