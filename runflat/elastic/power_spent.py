"""What a boost took and what saving left: joules and device-seconds, over all and for each incident."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from runflat.elastic.planning import Planner
from runflat.elastic.power_setting import PowerSetting
from runflat.elastic.power_sight import Sight
from runflat.plan.plan import Plan
from runflat.power.views import IDLE_POWER, Sample


@dataclass
class Spent:
    """What power took so far: joules and device-seconds."""

    extra_j: float = 0.0
    boosted_device_s: float = 0.0
    saved_j: float = 0.0


class PowerBooks:
    """The account of one run."""

    def __init__(self, setting: PowerSetting, planner: Planner, sight: Sight):
        """Nothing is spent yet."""
        self.spent = Spent()
        self.by_incident: dict[int, Spent] = {}
        """Under 0: before the first."""
        self._setting = setting
        self._planner = planner
        self._sight = sight

    def charge(self, plan: Plan | None, incident: int, own_s: Mapping[int, float], step_s: float) -> None:
        """Charge a step: what raised limits took over nominal ones, and what lowered ones left."""
        limits, tolerance_w = self._setting.limits, self._setting.rules.tolerance_w
        nominal_w = limits.nominal_w
        for replica in plan.replicas if plan else ():
            busy_s = own_s[replica.replica]
            for sample in self._sight.samples(name for name in replica.devices if name):
                limit_w = sample.enforced_w
                for spent in (self.spent, self.by_incident.setdefault(incident, Spent())):
                    if limit_w > nominal_w + tolerance_w:
                        spent.extra_j += (limit_w - nominal_w) * busy_s
                        spent.boosted_device_s += step_s
                    elif limit_w < nominal_w - tolerance_w:
                        full_s = busy_s * limits.speed(limit_w)
                        idle_w = nominal_w * IDLE_POWER
                        before_j = nominal_w * full_s + idle_w * (step_s - full_s)
                        spent.saved_j += before_j - limit_w * busy_s - idle_w * (step_s - busy_s)

    def record(self, plan: Plan) -> dict[str, Any]:
        """What a step's line in steps.jsonl says, in watts: per replica the highest limit and the draw, then of all.

        `devices` has (limit, draw) of each one. Dead devices count with their last reading. Joules and seconds are
        totals so far.
        """
        known = {name: sample for name in self._planner.devices if (sample := self._sight.sample(name)) is not None}
        replicas = {}
        for replica in plan.replicas:
            found = [known[name] for name in replica.devices if name in known]
            if found:
                limit_w = max(sample.enforced_w for sample in found)
                replicas[str(replica.replica)] = {"limit_w": limit_w, "draw_w": _draw_w(found)}
        budget_w = self._setting.limits.domain_budget_w
        return {
            "replicas": replicas,
            "devices": {name: (sample.enforced_w, sample.draw_w) for name, sample in known.items()},
            "limit_w": sum(sample.enforced_w for sample in known.values()),
            "draw_w": _draw_w(known.values()),
            "budget_w": budget_w and budget_w * self._planner.job.num_replicas,
            **vars(self.spent),
        }

    def summary(self) -> dict[str, Any]:
        """What summary.json says: the curve, and what was spent for which incident (0: before the first)."""
        limits = self._setting.limits
        return {
            "curve": limits.curve.label(limits.max_w / limits.tdp_w),
            "nominal_w": limits.nominal_w,
            "max_w": limits.max_w,
            "emulated": self._setting.emulated_speed is not None,
            "dry_run": self._setting.dry_run,
            **vars(self.spent),
            "by_incident": {str(number): dict(vars(spent)) for number, spent in self.by_incident.items()},
        }


def _draw_w(samples: Iterable[Sample]) -> float | None:
    """Draw of all that say theirs; None if nobody does."""
    draws_w = [sample.draw_w for sample in samples if sample.draw_w is not None]
    return sum(draws_w) if draws_w else None
