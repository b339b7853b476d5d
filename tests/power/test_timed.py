"""Backends around a backend: calls that hang, and a run that only says what it would do."""

import threading

import pytest

from runflat.power.devices import DeviceError, Reading
from runflat.power.fakes import NOMINAL_W, FakeNode
from runflat.power.timed import DryRunDevices, TimedDevices


class Hanging(FakeNode):
    """A node whose GPU-a hangs in its driver until it is let go."""

    def __post_init__(self) -> None:
        """Nothing hangs yet."""
        self.free = threading.Event()
        self.free.set()
        super().__post_init__()

    def read(self, uuid: str) -> Reading:
        """Hang, or not."""
        if uuid == "GPU-a":
            assert self.free.wait(40)
        return super().read(uuid)


def test_hanging_device_holds_up_no_other() -> None:
    """Catches a call without a deadline, and a later call that overtakes the one that hangs."""
    node = Hanging()
    timed = TimedDevices(node, timeout_s=0.05)
    node.free.clear()
    for words in ("no answer within", "an earlier call", "an earlier call"):
        with pytest.raises(DeviceError, match=words) as caught:
            timed.read("GPU-a")
        assert caught.value.kind == "slow"
    patient = TimedDevices(node, timeout_s=40)
    assert patient.read("GPU-b").limit_w == NOMINAL_W
    node.free.set()
    assert patient.read("GPU-a").limit_w == NOMINAL_W


def test_errors_come_through() -> None:
    """Catches an error of the device that is lost on its thread."""
    node = FakeNode()
    timed = TimedDevices(node, timeout_s=40)
    node.devices.devices["GPU-a"].failure = "lost"
    with pytest.raises(DeviceError) as caught:
        timed.set_limit("GPU-a", 1000.0)
    assert caught.value.kind == "lost"
    assert len(timed.list_devices()) == 2
    timed.set_limit("GPU-b", 1000.0)
    assert node.limits() == [NOMINAL_W, 1000.0, NOMINAL_W]


def test_dry_run_writes_nothing() -> None:
    """Catches a dry run that writes, or whose readings do not show what was asked for."""
    node = FakeNode()
    dry = DryRunDevices(node)
    dry.set_limit("GPU-a", 1000.0)
    assert (dry.read("GPU-a").limit_w, dry.read("GPU-a").enforced_w) == (1000.0, 1000.0)
    assert dry.read("GPU-b").limit_w == NOMINAL_W
    assert [facts.uuid for facts in dry.list_devices()] == [facts.uuid for facts in node.list_devices()]
    assert node.written == []
