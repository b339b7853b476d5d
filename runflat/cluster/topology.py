"""Where a device sits: domains, tensor-parallel groups, replicas and stages, as arithmetic on one device number.

Devices are numbered 0.. over all that the job holds: first the domains that the job runs on, then whole spare domains,
then single spare devices. A domain of ``domain_size`` devices holds ``domain_size // tp_full`` groups; what is left
over in a domain can only serve as a spare inside that domain. Group g is stage ``g % pp`` of replica ``g // pp``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from runflat.errors import ConfigError, TraceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Devices that a job holds and how they are cut into groups of ``tp_full``.

    Raises:
        ConfigError: if the numbers contradict each other.
    """

    tp_full: int
    dp: int
    pp: int = 1
    domain_size: int = 8
    num_spare_domains: int = 0
    num_spare_devices: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("tp_full", "dp", "pp", "domain_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("num_spare_domains", "num_spare_devices"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if self.tp_full > self.domain_size:
            raise ConfigError(
                f"tp_full {self.tp_full} exceeds the domain of {self.domain_size} devices: tensor parallelism must "
                f"stay inside a domain. Lower tp_full to at most {self.domain_size}, or name the larger domain."
            )

    @property
    def groups_per_domain(self) -> int:
        """Tensor-parallel groups that fit in a domain."""
        return self.domain_size // self.tp_full

    @property
    def num_job_groups(self) -> int:
        """Groups that the job needs in health: replicas times stages."""
        return self.dp * self.pp

    @property
    def num_job_domains(self) -> int:
        """Domains that hold the job's groups."""
        return -(-self.num_job_groups // self.groups_per_domain)

    @property
    def num_domains(self) -> int:
        """Domains held, spare ones included."""
        return self.num_job_domains + self.num_spare_domains

    @property
    def num_groups(self) -> int:
        """Groups held, those of spare domains included."""
        return self.num_domains * self.groups_per_domain

    @property
    def num_job_devices(self) -> int:
        """Devices that work in a healthy job."""
        return self.num_job_groups * self.tp_full

    @property
    def num_devices(self) -> int:
        """Devices held in all, spares and left-over ones included."""
        return self.num_domains * self.domain_size + self.num_spare_devices

    def domain_of(self, device: int) -> int | None:
        """Domain of a device; None for a single spare device."""
        domain = device // self.domain_size
        return domain if domain < self.num_domains else None

    def group_of(self, device: int) -> int | None:
        """Group of a device; None if it is a single spare or left over in its domain."""
        domain, offset = divmod(device, self.domain_size)
        if domain >= self.num_domains or offset >= self.groups_per_domain * self.tp_full:
            return None
        return domain * self.groups_per_domain + offset // self.tp_full

    def device_id(self, device: int) -> str:
        """Name of a device: ``replica:slot``, where slots count through the stages, or ``s0`` for a single spare.

        Devices of spare domains and left-over ones are named ``d<domain>.<offset>``.
        """
        first_spare = self.num_domains * self.domain_size
        if device >= first_spare:
            return f"s{device - first_spare}"
        group = self.group_of(device)
        domain, offset = divmod(device, self.domain_size)
        if group is None or group >= self.num_job_groups:
            return f"d{domain}.{offset}"
        replica, stage = divmod(group, self.pp)
        return f"{replica}:{stage * self.tp_full + offset % self.tp_full}"

    def device_number(self, device_id: str) -> int:
        """Number of the device with this name; the inverse of :meth:`device_id`.

        Raises:
            TraceError: if there is no such device.
        """
        number = self._parse(device_id)
        if number is None or not 0 <= number < self.num_devices or self.device_id(number) != device_id:
            raise TraceError(
                f"there is no device {device_id!r}: replicas are 0..{self.dp - 1}, slots "
                f"0..{self.pp * self.tp_full - 1} (as in '0:3'), single spares s0..s{self.num_spare_devices - 1}"
            )
        return number

    def _parse(self, device_id: str) -> int | None:
        try:
            if device_id.startswith("s"):
                return self.num_domains * self.domain_size + int(device_id[1:])
            if device_id.startswith("d"):
                domain, offset = (int(part) for part in device_id[1:].split("."))
                return domain * self.domain_size + offset
            replica, slot = (int(part) for part in device_id.split(":"))
        except ValueError:
            return None
        stage, offset = divmod(slot, self.tp_full)
        if stage >= self.pp:
            return None
        domain, group = divmod(replica * self.pp + stage, self.groups_per_domain)
        return domain * self.domain_size + group * self.tp_full + offset


def seats_by_rank(tp_full: int, dp: int, num_spares: int, domain_size: int) -> tuple[str | None, ...]:
    """The device that each rank drives where ranks fill domains of ``domain_size``, so that no replica spans two.

    What is left over in a domain is a spare, as are the ranks after the last replica; None where there are enough.

    Raises:
        ConfigError: a replica is larger than a domain.
    """
    topology = Topology(tp_full=tp_full, dp=dp, domain_size=domain_size)
    spares = deque(f"s{number}" for number in range(num_spares))
    found: list[str | None] = []
    for rank in range(topology.num_devices):
        name = topology.device_id(rank)
        found.append(name if ":" in name else spares.popleft() if spares else None)
    found += spares
    while found[-1] is None:
        found.pop()
    return tuple(found)
