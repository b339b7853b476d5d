"""What the power policy sees of a job: its devices with their last readings, where they work, and the budgets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from runflat.elastic.device import Standing
from runflat.elastic.planning import Planner
from runflat.elastic.power_setting import PowerSetting
from runflat.elastic.state import GrowthStage, State
from runflat.plan.cost import loads
from runflat.plan.plan import Plan
from runflat.power.devices import ALARMS
from runflat.power.link import Outcome
from runflat.power.views import Budget, DeviceView, Observation, Sample
from runflat.power.wire import DeviceState

OFF_W = 10.0
"""A dead device without a process that draws no more than this is off: an idle one draws several times as much."""
AFTER_S = 1e-6
"""What is read back in the answer to a write was read this much after the agent was asked."""


class Sight:
    """Readings and places of the devices of one run. Times are seconds since its start."""

    def __init__(self, setting: PowerSetting, planner: Planner):
        """Nothing is known yet."""
        self._setting = setting
        self._planner = planner
        self._samples: dict[str, Sample] = {}
        self.off: frozenset[str] = frozenset()
        """Dead devices whose readings said, when last looked at, that they are off: nothing is booked for them."""
        self._loads: tuple[int, dict[str, float]] = (-1, {})

    def take(self, outcome: Outcome, asked_at: float) -> None:
        """Remember the readings of an answer to a question that was asked then, unless newer ones are known."""
        for found in outcome.devices:
            self._take(found, asked_at + (AFTER_S if outcome.is_read_back else 0.0))

    def _take(self, found: DeviceState, asked_at: float) -> None:
        if found.limit_w is None or found.enforced_w is None or found.age_s is None:
            return
        at = asked_at - found.age_s
        known = self._samples.get(found.uuid)
        if known is not None and known.at >= at:
            return
        alarm = " and ".join(sorted(ALARMS & set(found.reasons or ())))
        self._samples[found.uuid] = Sample(
            at=at,
            requested_w=found.limit_w,
            enforced_w=found.enforced_w,
            draw_w=found.draw_w,
            clock_mhz=found.clock_mhz,
            margin_c=found.margin_c,
            alarm=alarm and f"the device says {alarm}",
        )

    def sample(self, device: str) -> Sample | None:
        """The last reading of a device."""
        return self._samples.get(self._setting.uuids[device])

    def samples(self, devices: Iterable[str]) -> list[Sample]:
        """The last readings of those devices of which there are any."""
        return [sample for sample in map(self.sample, devices) if sample is not None]

    def home(self, state: State, device: str) -> int | None:
        """The replica in which a device works, or for which it was started; None for a spare without a place."""
        place = state.plan.place(device) if state.plan else None
        if place is not None:
            return place[0]
        return int(device.partition(":")[0]) if ":" in device else None

    def members(self, state: State, replica: int) -> tuple[str, ...]:
        """Devices whose home is `replica`."""
        return tuple(name for name in self._planner.devices if self.home(state, name) == replica)

    def observe(self, state: State, own_s: Mapping[int, float] | None, now: float) -> Observation:
        """What `power.control` is shown; `own_s` of a step that has just ended."""
        plan, job = state.plan, self._planner.job
        self.off = frozenset(name for name in self._planner.devices if self._is_off(state, name, now))
        views = self._views(state)
        joining: set[int] = set()
        if state.growth is not None and state.growth.stage is GrowthStage.SWITCH:
            places = (state.growth.plan.place(name) for name in state.growth.joining)
            joining = {place[0] for place in places if place is not None}
        return Observation(
            devices=views,
            full_load=self._planner.work(0, ()) * job.even_share,
            hit=frozenset(r.replica for r in plan.replicas if r.tp < plan.tp_full) if plan else frozenset(),
            joining=frozenset(joining),
            budgets=self._budgets(views),
            own_s=own_s,
        )

    def _views(self, state: State) -> tuple[DeviceView, ...]:
        limits, plan = self._setting.limits, state.plan
        live = set(state.live())
        work = self._work(plan) if plan is not None else {}
        return tuple(
            DeviceView(
                name=name,
                replica=self.home(state, name),
                standing=self._standing(name, plan is not None and plan.place(name) is not None and name in live),
                nominal_w=limits.nominal_w,
                max_w=limits.max_w if self._setting.raises else limits.nominal_w,
                min_w=self._setting.min_w,
                load=work.get(name, 0.0),
                reading=self.sample(name),
            )
            for name in self._planner.devices
        )

    def _standing(self, name: str, works: bool) -> Literal["works", "dead", "off"]:
        return "works" if works else "off" if name in self.off else "dead"

    def _is_off(self, state: State, name: str, now: float) -> bool:
        """Whether a fresh reading says that a device draws nothing, and no process of ours could change that."""
        sample = self.sample(name)
        return (
            state.devices[name].standing in (Standing.LOST, Standing.OUT)
            and sample is not None
            and now - sample.at <= self._setting.rules.stale_s
            and sample.draw_w is not None
            and sample.draw_w <= OFF_W
        )

    def _budgets(self, views: Sequence[DeviceView]) -> tuple[Budget, ...]:
        limits, budgets = self._setting.limits, []
        if limits.module_budget_w is not None:
            names, size = [view.name for view in views], limits.module_devices
            for first in range(0, len(names), size):
                members = tuple(names[first : first + size])
                budgets.append(Budget(f"the module of {members[0]}", limits.module_budget_w, members))
        watts = limits.domain_budget_w
        domains: dict[int, list[str]] = {}
        for view in views:
            if view.replica is not None:
                domains.setdefault(view.replica, []).append(view.name)
        if watts is not None:
            budgets += [Budget(f"domain {n}", watts, tuple(members)) for n, members in domains.items()]
        return tuple(budgets)

    def _work(self, plan: Plan) -> dict[str, float]:
        """FLOPs of a step on each device of the plan."""
        if self._loads[0] != plan.generation:
            found = {}
            for replica in plan.replicas:
                for slot, load in loads(self._planner.spec, replica, self._planner.seq_len).items():
                    found[plan.device((replica.replica, slot))] = float(load * replica.num_sequences)
            self._loads = (plan.generation, found)
        return self._loads[1]
