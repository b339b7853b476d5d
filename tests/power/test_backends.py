"""What every backend must do, emulated or behind the real nvidia-ml-py; then what only NVML does."""

from collections.abc import Callable
from typing import Protocol

import fake_nvml
import pynvml
import pytest

from runflat.errors import PowerError
from runflat.power.curve import PowerCurve
from runflat.power.devices import DeviceError, PowerBackend, Reason
from runflat.power.emulated import EmulatedDevices, emulated_devices
from runflat.power.nvml import NvmlDevices

UUIDS = ("GPU-0", "GPU-1", "GPU-2")


class World(Protocol):
    """A backend, and hands that change its devices from outside."""

    backend: PowerBackend

    def write(self, uuid: str, limit_w: float) -> None: ...
    def cap(self, uuid: str, limit_w: float) -> None: ...
    def heat(self, uuid: str, temperature_c: float) -> None: ...
    def slow_down(self, uuid: str, reason: Reason) -> None: ...
    def lose(self, uuid: str) -> None: ...
    def deny(self, uuid: str) -> None: ...
    def deafen(self, uuid: str) -> None: ...
    def use_energy(self, uuid: str) -> None: ...
    def reload(self) -> None: ...


class EmulatedWorld:
    """Emulated devices."""

    def __init__(self) -> None:
        self.now_s = 0.0
        curve = PowerCurve(points=((0.5, 0.5), (1.0, 1.0)), name="linear")
        self.backend: EmulatedDevices = emulated_devices(
            UUIDS, curve, nominal_w=960, max_w=1200, min_w=200, clock=lambda: self.now_s
        )
        self.use_energy(UUIDS[0])

    def write(self, uuid: str, limit_w: float) -> None:
        self.backend.devices[uuid].limit_w = limit_w

    def cap(self, uuid: str, limit_w: float) -> None:
        self.backend.devices[uuid].cap_w = limit_w

    def heat(self, uuid: str, temperature_c: float) -> None:
        self.backend.devices[uuid].temperature_c = temperature_c

    def slow_down(self, uuid: str, reason: Reason) -> None:
        self.backend.devices[uuid].reasons.add(reason)

    def lose(self, uuid: str) -> None:
        self.backend.devices[uuid].failure = "lost"

    def deny(self, uuid: str) -> None:
        self.backend.devices[uuid].set_failure = "permission"

    def deafen(self, uuid: str) -> None:
        self.backend.devices[uuid].deaf = True

    def use_energy(self, uuid: str) -> None:
        self.now_s += 1.0

    def reload(self) -> None:
        for device in self.backend.devices.values():
            device.reload_driver()


class NvmlWorld:
    """The tests' own libnvidia-ml."""

    def __init__(self, driver: fake_nvml.FakeNvml) -> None:
        self.driver = driver
        self.backend: PowerBackend = NvmlDevices()

    def write(self, uuid: str, limit_w: float) -> None:
        self.driver.device(uuid).limit_mw = round(limit_w * 1000)

    def cap(self, uuid: str, limit_w: float) -> None:
        self.driver.device(uuid).cap_mw = round(limit_w * 1000)

    def heat(self, uuid: str, temperature_c: float) -> None:
        self.driver.device(uuid).temperature_c = round(temperature_c)

    def slow_down(self, uuid: str, reason: Reason) -> None:
        self.driver.device(uuid).reasons |= {"power-brake": 0x80, "hw-thermal": 0x40, "hw-slowdown": 0x8}[reason]

    def lose(self, uuid: str) -> None:
        self.driver.device(uuid).is_lost = 1

    def deny(self, uuid: str) -> None:
        self.driver.state.no_permission = 1

    def deafen(self, uuid: str) -> None:
        self.driver.device(uuid).is_deaf = 1

    def use_energy(self, uuid: str) -> None:
        self.driver.device(uuid).energy_mj += 900_000

    def reload(self) -> None:
        self.driver.reload_driver()


@pytest.fixture(params=["emulated", pytest.param("nvml", marks=pytest.mark.needs_compiler)])
def world(request: pytest.FixtureRequest) -> World:
    """Three devices at 960 of 200 to 1200 W, which is also the default."""
    return EmulatedWorld() if request.param == "emulated" else NvmlWorld(request.getfixturevalue("nvml"))


def kind_of(call: Callable[[], object]) -> str:
    """The kind of the error that a call ends with."""
    with pytest.raises(DeviceError) as caught:
        call()
    return caught.value.kind


def test_facts(world: World) -> None:
    """Catches milliwatts taken for watts, and a maximum taken for the default."""
    found = world.backend.list_devices()
    assert [facts.uuid for facts in found] == list(UUIDS)
    assert [facts.index for facts in found] == [0, 1, 2]
    assert (found[0].min_w, found[0].max_w, found[0].default_w) == (200.0, 1200.0, 1200.0)
    assert found[0].name


def test_reading(world: World) -> None:
    """Catches units and fields mixed up at the edge to the driver."""
    reading = world.backend.read("GPU-0")
    assert (reading.limit_w, reading.enforced_w, reading.draw_w) == (960.0, 960.0, 960.0)
    assert (reading.temperature_c, reading.margin_c) == (50.0, 40.0)
    assert reading.reasons == {"power-cap"}
    world.heat("GPU-0", 87.0)
    world.slow_down("GPU-0", "power-brake")
    reading = world.backend.read("GPU-0")
    assert (reading.temperature_c, reading.margin_c) == (87.0, 3.0)
    assert reading.reasons == {"power-cap", "power-brake"}
    assert world.backend.read("GPU-1").margin_c == 40.0


def test_set_and_read_back(world: World) -> None:
    """Catches a write that reaches another device, or another limit, than was asked for."""
    world.backend.set_limit("GPU-1", 1050.5)
    assert [world.backend.read(uuid).limit_w for uuid in UUIDS] == [960.0, 1050.5, 960.0]
    assert world.backend.read("GPU-1").enforced_w == 1050.5


@pytest.mark.parametrize("limit_w", [199.9, 1200.1])
def test_out_of_range(world: World, limit_w: float) -> None:
    """Catches a limit out of range that is clamped in silence, or an error without its kind."""
    assert kind_of(lambda: world.backend.set_limit("GPU-0", limit_w)) == "range"
    assert world.backend.read("GPU-0").limit_w == 960.0


def test_cap_from_outside_shows_in_what_is_enforced(world: World) -> None:
    """Catches a read-back of what was asked for instead of what is in force."""
    world.cap("GPU-0", 500.0)
    world.backend.set_limit("GPU-0", 1100.0)
    reading = world.backend.read("GPU-0")
    assert (reading.limit_w, reading.enforced_w) == (1100.0, 500.0)


def test_no_right_to_set(world: World) -> None:
    """Catches a refusal that is taken for success; reading needs no right."""
    world.deny("GPU-0")
    assert kind_of(lambda: world.backend.set_limit("GPU-0", 1000.0)) == "permission"
    assert world.backend.read("GPU-0").limit_w == 960.0


def test_set_that_does_nothing(world: World) -> None:
    """Catches a backend that reports what it wrote instead of what it reads."""
    world.deafen("GPU-0")
    world.backend.set_limit("GPU-0", 1000.0)
    assert world.backend.read("GPU-0").limit_w == 960.0


def test_lost_device(world: World) -> None:
    """Catches one lost device that takes the others with it."""
    world.lose("GPU-1")
    assert [facts.uuid for facts in world.backend.list_devices()] == ["GPU-0", "GPU-2"]
    assert kind_of(lambda: world.backend.read("GPU-1")) == "lost"
    assert kind_of(lambda: world.backend.set_limit("GPU-1", 1000.0)) == "lost"
    world.backend.set_limit("GPU-2", 1000.0)
    assert world.backend.read("GPU-2").limit_w == 1000.0


@pytest.mark.parametrize("uuid", ["GPU-9", "nonsense"])
def test_unknown_device(world: World, uuid: str) -> None:
    """Catches a name that is not there and is taken for the first device."""
    assert kind_of(lambda: world.backend.read(uuid)) == "unknown"
    assert kind_of(lambda: world.backend.set_limit(uuid, 1000.0)) == "unknown"


def test_other_writer_and_reload(world: World) -> None:
    """Catches values that are remembered, not read; a reload must show as energy that fell."""
    world.write("GPU-0", 700.0)
    world.use_energy("GPU-0")
    before = world.backend.read("GPU-0")
    assert before.limit_w == 700.0
    world.reload()
    after = world.backend.read("GPU-0")
    assert after.limit_w == 1200.0
    assert after.energy_j is not None
    assert before.energy_j is not None
    assert after.energy_j < before.energy_j


@pytest.mark.needs_compiler
def test_nvml_renumbered(nvml: fake_nvml.FakeNvml) -> None:
    """Catches a limit that lands on the neighbour, since a handle was looked up before indices moved."""
    backend = NvmlDevices()
    nvml.state.shift_next = 1
    assert kind_of(lambda: backend.set_limit("GPU-1", 1000.0)) == "lost"
    nvml.state.shift_next = 1
    assert kind_of(lambda: backend.read("GPU-1")) == "lost"
    assert nvml.limits_w() == [960.0] * 3
    assert [facts.uuid for facts in backend.list_devices()] == ["GPU-2", "GPU-0", "GPU-1"]
    backend.set_limit("GPU-1", 1000.0)
    assert nvml.limits_w() == [960.0, 1000.0, 960.0]


@pytest.mark.needs_compiler
def test_nvml_driver_goes_and_comes(nvml: fake_nvml.FakeNvml) -> None:
    """Catches a backend that never gets over a reload of the driver."""
    backend = NvmlDevices()
    nvml.state.is_unloaded = 1
    assert kind_of(lambda: backend.read("GPU-0")) == "driver"
    assert kind_of(backend.list_devices) == "driver"
    nvml.state.is_unloaded = 0
    nvml.reload_driver()
    assert backend.read("GPU-0").limit_w == 1200.0


@pytest.mark.needs_compiler
def test_nvml_uses_the_setter_that_reports_errors(nvml: fake_nvml.FakeNvml) -> None:
    """Catches the second version of the setter, which answers 'success' to a refusal."""
    handle = pynvml.nvmlInit() or pynvml.nvmlDeviceGetHandleByUUID("GPU-0")
    pynvml.nvmlDeviceSetPowerManagementLimit_v2(handle, pynvml.NVML_POWER_SCOPE_GPU, 1_000_000)
    assert (nvml.state.num_v2_sets, nvml.limits_w()[0]) == (1, 960.0)
    NvmlDevices().set_limit("GPU-0", 1000.0)
    assert (nvml.state.num_v2_sets, nvml.limits_w()[0]) == (1, 1000.0)


@pytest.mark.needs_compiler
def test_nvml_margin_of_older_devices(nvml: fake_nvml.FakeNvml) -> None:
    """Catches a device without a margin of its own that counts as having none at all."""
    nvml.device("GPU-0").no_margin = 1
    assert NvmlDevices().read("GPU-0").margin_c == 40.0


@pytest.mark.needs_compiler
def test_nvml_without_driver(nvml: fake_nvml.FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback where there is no driver: the commonest machine of all."""
    monkeypatch.setenv("FAKE_NVML_STATE", "nowhere")
    with pytest.raises(PowerError, match="NVIDIA driver"):
        NvmlDevices()


def test_emulated_speed() -> None:
    """Catches a device whose speed follows what was asked for and not what is in force."""
    world = EmulatedWorld()
    world.backend.set_limit("GPU-0", 1152.0)
    assert world.backend.speed("GPU-0", 960.0) == pytest.approx(1.2)
    world.cap("GPU-0", 960.0)
    assert world.backend.speed("GPU-0", 960.0) == pytest.approx(1.0)
