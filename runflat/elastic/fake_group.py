"""Groups in which workers that only talk meet, and what their collectives give."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from runflat.plan.plan import Plan

SCALARS = (1.0, 2.0, 2.0, 4.0, 0.0, 0.0, 0.0)
"""Devices, loss sum, targets, squared norm, not finite, stop, switch: a loss of 1 and a gradient norm of 1."""
ONES = dict.fromkeys(("loss", "grad_norm", "lr", "num_target_tokens"), 1)
RESULTS: dict[str, Any] = {**ONES, "skipped": False, "sync_s": 0.0}
"""What every step report says."""


@dataclass
class Group:
    """The process groups of one generation: who is in them, and how many have come to each meeting point."""

    plan: Plan
    met: dict[tuple[str, int], set[str]] = field(default_factory=dict)

    @cached_property
    def members(self) -> set[str]:
        """Devices of the plan."""
        return set(self.plan.devices)
