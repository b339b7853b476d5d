"""How power is steered in a run: what the boost, its sight and its books all know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from runflat.power.link import Link
from runflat.power.reach import PowerLimits
from runflat.power.views import Rules


@dataclass(frozen=True, kw_only=True)
class PowerSetting:
    """How power is steered in a run.

    Attributes:
        rules: the policy's.
        limits: what the planner counts on, and what is said of a loss.
        link: to the agent.
        uuids: the agent's name of each device.
        min_w: lowest limit, for saving; None if nothing goes below nominal.
        ttl_s: time without a sign of life after which the agent restores nominal.
        emulated_speed: how fast a limit makes an emulated device, over its speed in health; None for real ones.
        raises: whether limits may go above nominal.
        dry_run: say what would be written, and write nothing.
    """

    rules: Rules
    limits: PowerLimits
    link: Link
    uuids: Mapping[str, str]
    min_w: float | None = None
    ttl_s: float = 30.0
    emulated_speed: Callable[[float], float] | None = None
    raises: bool = True
    dry_run: bool = False
