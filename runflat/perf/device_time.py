"""Seconds of single kernels on one device: matrix products by tiles and waves, and passes over memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from runflat.cluster.hardware import Hardware
from runflat.perf.efficiency import Efficiencies

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.84), (64, 128, 0.84), (64, 64, 0.7))
"""Output tiles that a library chooses from, and the rate of a multiprocessor on each relative to the largest.

A smaller tile reads more operand bytes per product; the ratios follow CUTLASS's profiler tables for 16-bit operands.
"""

_DEPTH = 128
"""Elements of the inner dimension whose time goes to filling and draining a tile's pipeline (prologue and epilogue)."""


@lru_cache(maxsize=65536)
def tile_work(m: int, n: int, k: int, batch: int, sms: int) -> float:
    """FLOPs that `batch` products (m, k) x (k, n) cost a device with `sms` multiprocessors, idle lanes included.

    The output is cut into tiles, a wave is one tile per multiprocessor, and a last wave that is not full costs as much
    as a full one. The best of the usual tile shapes is taken. Never below 2 m n k batch.
    """
    best = float("inf")
    for rows, columns, rate in _TILES:
        tiles = -(-m // rows) * -(-n // columns) * batch
        waves = -(-tiles // sms)
        best = min(best, waves * sms * 2.0 * rows * columns * (k + _DEPTH) / rate)
    return best


@dataclass(frozen=True)
class Device:
    """One device at a relative clock `speed` (1: nominal). Speed scales arithmetic, not memory, links or network."""

    hardware: Hardware
    efficiencies: Efficiencies
    speed: float = 1.0

    def matmul_s(self, m: int, n: int, k: int, precision: str, batch: int = 1) -> float:
        """Seconds of `batch` products (m, k) x (k, n): arithmetic or operand traffic, whichever is longer."""
        rate = self.hardware.matmul_flops_per_s(precision) * self.efficiencies.matmul * self.speed
        element_bytes = 1 if precision == "fp8" else 2
        traffic = batch * (element_bytes * (m * k + k * n) + 2.0 * m * n)
        return max(tile_work(m, n, k, batch, self.hardware.sms) / rate, self.memory_s(traffic))

    def memory_s(self, num_bytes: float) -> float:
        """Seconds to move `num_bytes` to or from the device's memory."""
        return num_bytes / (self.hardware.memory_bytes_per_s * self.efficiencies.memory)

    def flash_s(self, flops: float) -> float:
        """Seconds of `flops` of fused attention."""
        rate = self.hardware.matmul_flops_per_s("bf16") * self.efficiencies.attention * self.speed
        return flops / rate
