"""All devices by name, and who stands where: worked out once for as long as nobody's standing changes.

A job of thousands of devices hears tens of thousands of messages a second, hardly any of which changes a standing; what
the protocol asks after each of them (who lives, who stands by) must not be a look at every device.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from runflat.elastic.device import LIVE, Device, Standing


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


class Roster(dict[str, Device]):
    """Devices by name; read only: `changed` gives another one."""

    _standings: list[Standings]

    def __init__(self, devices: Iterable[tuple[str, Device]] | dict[str, Device] = ()):
        """Of (name, device) pairs, or a mapping."""
        super().__init__(devices)
        self._standings = []

    def changed(self, device: Device) -> Roster:
        """The roster with `device` in place of the one of its name."""
        before = self.get(device.name)
        found = Roster(self)
        dict.__setitem__(found, device.name, device)
        if before is not None and _marks(before) == _marks(device):
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
