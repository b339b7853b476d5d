"""All devices by name, and who stands where: worked out once for as long as nobody's standing changes.

A job of thousands of devices hears tens of thousands of messages a second, hardly any of which changes a standing; what
the protocol asks after each of them (who lives, who stands by) must not be a look at every device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType

from runflat.elastic.device import LIVE, Device, Standing

CHUNK = 64
"""A change copies one part of that many devices, and the list of the parts: for 4,096 devices 128 in place of 4,096."""


class Standings:
    """Names of devices by standing, in the order of the devices; one object for rosters that do not differ in it."""

    def __init__(self, devices: Iterable[Device]):
        """Of these devices as they are now."""
        self._of = tuple((device.name, device.standing, device.killed_at is not None) for device in devices)

    @cached_property
    def live(self) -> tuple[str, ...]:
        """Devices that train and have not been killed."""
        return tuple(name for name, standing, killed in self._of if standing in LIVE and not killed)

    @cached_property
    def dying(self) -> tuple[str, ...]:
        """Devices that train, were killed, and whose end is not confirmed yet."""
        return tuple(name for name, standing, killed in self._of if standing in LIVE and killed)

    @cached_property
    def standby(self) -> tuple[str, ...]:
        """Devices that are tested and wait, and have not been killed."""
        return tuple(name for name, standing, killed in self._of if standing is Standing.STANDBY and not killed)

    @cached_property
    def _by(self) -> dict[Standing, tuple[str, ...]]:
        return {wanted: tuple(name for name, standing, _ in self._of if standing is wanted) for wanted in Standing}

    def names(self, *standings: Standing) -> tuple[str, ...]:
        """Devices with one of these standings."""
        if len(standings) == 1:
            return self._by[standings[0]]
        return tuple(name for name, standing, _ in self._of if standing in standings)


class Roster(Mapping[str, Device]):
    """Devices by name; never changed: `changed` gives another one, with which it shares all but a few."""

    def __init__(self, devices: Mapping[str, Device] = MappingProxyType({})):
        """Of these devices, in this order."""
        names = list(devices)
        chunks = [names[first : first + CHUNK] for first in range(0, len(names), CHUNK)]
        self._where = {name: (at, place) for at, chunk in enumerate(chunks) for place, name in enumerate(chunk)}
        self._chunks = tuple(tuple(devices[name] for name in chunk) for chunk in chunks)
        self._standings: list[Standings] = []

    def __getitem__(self, name: str) -> Device:
        """The device of that name."""
        at, place = self._where[name]
        return self._chunks[at][place]

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._where)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._where)

    def changed(self, device: Device) -> Roster:
        """The roster with `device` in place of the one of its name, which there is."""
        at, place = self._where[device.name]
        chunk = self._chunks[at]
        found = Roster()
        found._where = self._where
        found._chunks = (*self._chunks[:at], (*chunk[:place], device, *chunk[place + 1 :]), *self._chunks[at + 1 :])
        if _marks(chunk[place]) == _marks(device):
            found._standings = self._standings
        return found

    @property
    def standings(self) -> Standings:
        """Who stands where; the same object as long as no standing changes."""
        if not self._standings:
            self._standings.append(Standings(self.values()))
        return self._standings[0]


def _marks(device: Device) -> tuple[object, ...]:
    """All of a device that says how it counts: for the job's decisions, and for the ledger."""
    return device.standing, device.killed_at is None, device.healthy, device.awaited
