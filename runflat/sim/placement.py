"""Which devices are down and what that does to groups and replicas; every change costs the same on any cluster.

A device has a role: it sits in a group, is left over in its domain, or is a single spare. Where the chain has spares a
free one swaps roles with a dead device. The rest of the simulator sees only which group lacks how many devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from runflat.cluster.topology import Topology

Role = tuple[Literal["group", "domain", "spare"], int]
"""What a device is for, and of which group or domain (0 for single spares)."""

SPARES: Role = ("spare", 0)


@dataclass(frozen=True, slots=True)
class Change:
    """What one failure or return did: the group concerned, devices that it lacks now, and whether a spare took part."""

    group: int
    lost: int
    by_spare: bool = False


class Placement:
    """Health of all devices that a job holds.

    Args:
        topology: Devices held.
        cover: Whether single spares and left-over devices of a domain take dead slots.
    """

    def __init__(self, topology: Topology, *, cover: bool) -> None:
        self.topology = topology
        self.num_failed = 0
        self.lost: dict[int, int] = {}
        """Devices that each hit group lacks."""
        self._cover = cover
        self._down: dict[int, int] = {}
        self._roles: dict[int, Role] = {}
        self._free: dict[Role, dict[int, None]] = {}
        self._uncovered: dict[Role, dict[int, None]] = {}
        if cover and topology.num_spare_devices:
            first = topology.num_domains * topology.domain_size
            self._free[SPARES] = dict.fromkeys(range(first, first + topology.num_spare_devices))

    def is_down(self, device: int) -> bool:
        """Whether a device is out of service."""
        return device in self._down

    def role(self, device: int) -> Role:
        """What a device is for at present."""
        if device in self._roles:
            return self._roles[device]
        group = self.topology.group_of(device)
        if group is not None:
            return ("group", group)
        domain = self.topology.domain_of(device)
        return SPARES if domain is None else ("domain", domain)

    def fail(self, device: int) -> Change | None:
        """Take a device out of service; None if no group notices (a spare, or already down)."""
        self._down[device] = self._down.get(device, 0) + 1
        if self._down[device] > 1:
            return None
        self.num_failed += 1
        role = self.role(device)
        if role[0] != "group":
            if self._cover:
                self._free_of(role).pop(device, None)
            return None
        for pool in self._pools(device) if self._cover else ():
            free = self._free_of(pool)
            if free:
                spare = next(iter(free))
                del free[spare]
                self._roles[spare], self._roles[device] = role, pool
                return Change(role[1], self.lost.get(role[1], 0), by_spare=True)
        if self._cover:
            for pool in self._pools(device):
                self._uncovered.setdefault(pool, {})[device] = None
        self._shift(role[1], +1)
        return Change(role[1], self.lost[role[1]])

    def back(self, device: int) -> Change | None:
        """Return a device to service; None if no group gains by it."""
        self._down[device] -= 1
        if self._down[device]:
            return None
        del self._down[device]
        self.num_failed -= 1
        role = self.role(device)
        if role[0] == "group":
            for pool in self._pools(device) if self._cover else ():
                self._uncovered.get(pool, {}).pop(device, None)
            self._shift(role[1], -1)
            return Change(role[1], self.lost.get(role[1], 0))
        if not self._cover:
            return None
        waiting = self._uncovered.get(role)
        if not waiting:
            self._free_of(role)[device] = None
            return None
        dead = next(iter(waiting))
        for pool in self._pools(dead):
            self._uncovered.get(pool, {}).pop(dead, None)
        group = self.role(dead)[1]
        self._roles[device], self._roles[dead] = ("group", group), role
        self._shift(group, -1)
        return Change(group, self.lost.get(group, 0), by_spare=True)

    def _pools(self, device: int) -> Iterable[Role]:
        """Where a replacement for a device may come from: its own domain first."""
        domain = self.topology.domain_of(device)
        if domain is not None and self.topology.domain_size % self.topology.tp_full:
            yield ("domain", domain)
        if self.topology.num_spare_devices:
            yield SPARES

    def _free_of(self, role: Role) -> dict[int, None]:
        """Free devices of a pool in a fixed order; a domain's left-over devices are listed when first asked for."""
        if role not in self._free:
            first = role[1] * self.topology.domain_size + self.topology.groups_per_domain * self.topology.tp_full
            end = (role[1] + 1) * self.topology.domain_size
            self._free[role] = dict.fromkeys(d for d in range(first, end) if d not in self._down)
        return self._free[role]

    def _shift(self, group: int, by: int) -> None:
        """Change the number of devices that a group lacks."""
        after = self.lost.get(group, 0) + by
        if after:
            self.lost[group] = after
        else:
            del self.lost[group]
