"""A node for tests: emulated devices, a journal, one agent after the other, a clock that the test turns, its audit.

Any call that reaches a device or the journal can be made the agent's last: `crash_after` counts them down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from runflat.power.agent import Agent, Caller
from runflat.power.curve import PowerCurve
from runflat.power.devices import DeviceFacts, Reading
from runflat.power.emulated import EmulatedDevices, emulated_devices
from runflat.power.journal import MemoryJournal, Owed
from runflat.power.site import SiteLimits
from runflat.power.wire import Acquire, DeviceState, Granted, Read, Release, Reply, SetLimits, Telemetry

NOMINAL_W, CEILING_W, MAX_W, FLOOR_W = 960.0, 1150.0, 1200.0, 800.0
UUIDS = ("GPU-a", "GPU-b", "GPU-c")
JOB = Caller(uid=1001, pid=77)
STRANGER = Caller(uid=1002, pid=78)
LINEAR = PowerCurve(points=((0.5, 0.5), (1.0, 1.0)), name="linear")


class CrashError(BaseException):
    """The agent's process has died here. No handler in the agent may catch it, as none could catch SIGKILL."""


def site_limits(**changes: Any) -> SiteLimits:
    """The limits file of most tests, with some fields changed."""
    device = {"nominal_w": NOMINAL_W, "ceiling_w": CEILING_W, "floor_w": FLOOR_W}
    fields: dict[str, Any] = {"allow_uids": (JOB.uid,), "max_lease_s": 30.0, "devices": dict.fromkeys(UUIDS, device)}
    return SiteLimits.model_validate(fields | changes)


@dataclass
class FakeNode:
    """A node whose three devices run at 960 of 1200 W, and an agent that has just started on it.

    It is the agent's backend and journal too, so that `crash_after` can end the agent before or after any of their
    calls: 0 dies at the next point, None never.
    """

    site: SiteLimits = field(default_factory=site_limits)
    now_s: float = 100.0
    log: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    crash_after: int | None = None
    written: list[tuple[str, float]] = field(default_factory=list)
    """Every limit that reached a device."""

    def __post_init__(self) -> None:
        """Make the devices and start the first agent."""
        self.saved = MemoryJournal()
        self.devices: EmulatedDevices = emulated_devices(
            UUIDS, LINEAR, nominal_w=NOMINAL_W, max_w=MAX_W, clock=lambda: self.now_s
        )
        self._ids = count()
        self.start()

    def start(self) -> None:
        """Start an agent; whatever ran before is gone without a word."""
        self.agent = Agent(self.site, self, self, self.write_down, lambda: f"lease-{next(self._ids)}", self.now_s)

    def write_down(self, event: str, facts: Mapping[str, Any]) -> None:
        """The audit."""
        self.log.append((event, dict(facts)))

    def list_devices(self) -> tuple[DeviceFacts, ...]:
        """As the devices say."""
        return self.devices.list_devices()

    def read(self, uuid: str) -> Reading:
        """As the device says."""
        self._point()
        return self.devices.read(uuid)

    def set_limit(self, uuid: str, limit_w: float) -> None:
        """Write, unless the agent dies first; it may die right after."""
        self._point()
        self.written.append((uuid, limit_w))
        self.devices.set_limit(uuid, limit_w)
        self._point()

    def load(self) -> dict[str, Owed]:
        """As it was saved."""
        return self.saved.load()

    def save(self, owed: Mapping[str, Owed]) -> None:
        """Save, unless the agent dies first; it may die right after."""
        self._point()
        self.saved.save(owed)
        self._point()

    def events(self) -> list[str]:
        """Names of what was recorded."""
        return [event for event, _ in self.log]

    def wait(self, seconds: int) -> None:
        """Time goes by in steps of a second, as the agent's loop would see it."""
        for _ in range(seconds):
            self.now_s += 1.0
            self.agent.tick(self.now_s)

    def acquire(self, *uuids: str, ttl_s: float = 10.0, caller: Caller = JOB) -> Reply:
        """Ask for a lease, on all devices if none is named."""
        return self.agent.handle(caller, Acquire(devices=uuids or UUIDS, ttl_s=ttl_s, job="test"), self.now_s)

    def lease(self, *uuids: str, ttl_s: float = 10.0) -> str:
        """Ask for a lease and get it."""
        reply = self.acquire(*uuids, ttl_s=ttl_s)
        assert isinstance(reply, Granted), reply
        return reply.lease

    def set(self, lease: str, **limits_w: float) -> Reply:
        """Set limits; `a=1000` is GPU-a."""
        wanted = {f"GPU-{name}": limit_w for name, limit_w in limits_w.items()}
        return self.agent.handle(JOB, SetLimits(lease=lease, limits_w=wanted), self.now_s)

    def release(self, lease: str) -> Reply:
        """Give a lease back."""
        return self.agent.handle(JOB, Release(lease=lease), self.now_s)

    def limits(self) -> list[float]:
        """What the devices have, in order."""
        return [device.limit_w for device in self.devices.devices.values()]

    def state(self, uuid: str) -> DeviceState:
        """What the agent says of a device."""
        reply = self.agent.handle(JOB, Read(), self.now_s)
        assert isinstance(reply, Telemetry), reply
        return next(state for state in reply.devices if state.uuid == uuid)

    def _point(self) -> None:
        if self.crash_after is not None:
            if self.crash_after == 0:
                raise CrashError
            self.crash_after -= 1
