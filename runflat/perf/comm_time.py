"""Seconds of collectives and sends, inside a domain and across the network."""

from __future__ import annotations

from dataclasses import dataclass

from runflat.cluster.hardware import Hardware
from runflat.perf.efficiency import Efficiencies


@dataclass(frozen=True)
class Fabric:
    """The links of a cluster whose devices are numbered tensor-parallel first, then context, data, pipeline."""

    hardware: Hardware
    efficiencies: Efficiencies

    @property
    def link_bytes_per_s(self) -> float:
        """Bandwidth that a collective reaches inside a domain, per device and direction."""
        return self.hardware.link_bytes_per_s * self.efficiencies.link

    @property
    def network_bytes_per_s(self) -> float:
        """Bandwidth that a collective or send reaches through one device's port."""
        return self.hardware.network_bytes_per_s * self.efficiencies.network

    def reduce_scatter_s(self, num_bytes: float, members: int, stride: int = 1) -> float:
        """Seconds to reduce-scatter (or all-gather) `num_bytes`, the full size, over `members` devices.

        `stride` is the distance of two members in device numbers: members closer than a domain use its links, and share
        their ports for the part that leaves it. A ring: each device sends (members-1)/members of the bytes.
        """
        if members < 2:
            return 0.0
        inside = max(1, min(members, self.hardware.domain // stride))
        domains = -(-members // inside)
        seconds = self.hardware.launch_us.value * 1e-6
        if inside > 1:
            seconds += num_bytes * (inside - 1) / inside / self.link_bytes_per_s
            seconds += (inside - 1) * self.hardware.link_latency_us.value * 1e-6
        if domains > 1:
            seconds += num_bytes / inside * (domains - 1) / domains / self.network_bytes_per_s
            seconds += min(domains - 1, 2 * domains.bit_length()) * self.hardware.network_latency_us.value * 1e-6
        return seconds

    def all_reduce_s(self, num_bytes: float, members: int, stride: int = 1) -> float:
        """Seconds to all-reduce `num_bytes` over `members` devices: a reduce-scatter and an all-gather."""
        return 2 * self.reduce_scatter_s(num_bytes, members, stride)

    def exchange_s(self, num_bytes: float, members: int) -> float:
        """Seconds of an all-to-all inside a domain in which the busiest device sends or receives `num_bytes`."""
        if members < 2 or num_bytes == 0:
            return 0.0
        rate = self.link_bytes_per_s if members <= self.hardware.domain else self.network_bytes_per_s
        return self.hardware.launch_us.value * 1e-6 + num_bytes / rate

    def send_s(self, num_bytes: float, stride: int, num_devices: int) -> float:
        """Seconds to send `num_bytes` to the device `stride` numbers away, in a job of `num_devices`."""
        if num_devices <= self.hardware.domain and stride < self.hardware.domain:
            return self.hardware.link_latency_us.value * 1e-6 + num_bytes / self.link_bytes_per_s
        rate = self.hardware.network_bytes_per_s * self.efficiencies.send
        return self.hardware.network_latency_us.value * 1e-6 + num_bytes / rate
