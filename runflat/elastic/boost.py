"""The controller's side of the power boost: shows the policy what there is, and carries out what it says.

It talks to an agent (`power.client`), tells emulated workers how fast their limit makes them, and keeps account of what
the boost took. All decisions are `power.control`'s and the planner's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from runflat.elastic.actions import Action, Planned, Send, Took
from runflat.elastic.messages import StepReport
from runflat.elastic.orders import Power, Switch
from runflat.elastic.planning import Planner
from runflat.elastic.state import GrowthStage, State
from runflat.plan.cost import loads
from runflat.plan.plan import Plan
from runflat.power import client
from runflat.power.client import PowerPort
from runflat.power.control import PowerState, decide
from runflat.power.devices import ALARMS
from runflat.power.reach import PowerLimits
from runflat.power.views import IDLE_POWER, Budget, DeviceView, Observation, Rules, Sample, Write
from runflat.power.wire import DeviceState, Failure

LOOK_S = 1.0
"""Between two looks at the devices while no step ends."""
AFTER_S = 1e-6
"""What is read back in the answer to a write was read this much later."""


@dataclass(frozen=True, kw_only=True)
class PowerSetting:
    """How power is steered in a run.

    Attributes:
        rules: the policy's.
        limits: what the planner counts on, and what is said of a loss.
        port: the agent.
        uuids: the agent's name of each device.
        min_w: lowest limit, for saving; None if nothing goes below nominal.
        ttl_s: time without a sign of life after which the agent restores nominal.
        emulated_speed: how fast a limit makes an emulated device, over its speed in health; None for real ones.
        raises: whether limits may go above nominal.
        dry_run: say what would be written, and write nothing.
    """

    rules: Rules
    limits: PowerLimits
    port: PowerPort
    uuids: Mapping[str, str]
    min_w: float | None = None
    ttl_s: float = 30.0
    emulated_speed: Callable[[float], float] | None = None
    raises: bool = True
    dry_run: bool = False


@dataclass(frozen=True)
class Effects:
    """What the controller has to do: orders to workers, lines for people, and what the planner has to know."""

    orders: tuple[tuple[str, Power], ...] = ()
    words: tuple[str, ...] = ()
    speeds: Mapping[int, float] | None = None
    """Replicas that cannot be boosted beyond a speed at present; None if that has not changed."""


@dataclass
class Spent:
    """What power took so far: joules and device-seconds."""

    extra_j: float = 0.0
    boosted_device_s: float = 0.0
    saved_j: float = 0.0


class Boost:
    """Power of one run. Times are seconds since its start."""

    def __init__(self, setting: PowerSetting, planner: Planner):
        """Nothing is asked of the agent yet."""
        self.setting = setting
        self.state = PowerState()
        self.spent = Spent()
        self.by_incident: dict[int, Spent] = {}
        self._devices = planner.devices
        self._planner = planner
        self._samples: dict[str, Sample] = {}
        self._leases: dict[int, str] = {}
        self._renewed = 0.0
        self._looked = -LOOK_S
        self._reports: dict[int, StepReport] = {}
        self._told: dict[str, tuple[int, float]] = {}
        self._speeds: Mapping[int, float] = {}
        self._loads: tuple[int, dict[str, float]] = (-1, {})
        self._words: list[str] = []
        self._would: set[str] = set()
        self._explained = -1

    # ---- when the controller calls

    def look(self, state: State, now: float) -> Effects | None:
        """Between steps: notice trouble; None if it is not time yet."""
        if now - self._looked < LOOK_S:
            return None
        return self._turn(state, now)

    def on_report(self, state: State, report: StepReport, now: float) -> Effects | None:
        """A replica has told of a step; with the last one's report there is evidence."""
        plan = state.plan
        if plan is None or report.generation != plan.generation:
            return None
        if any(known.step != report.step for known in self._reports.values()):
            self._reports = {}
        self._reports[report.replica] = report
        if len(self._reports) < len(plan.replicas):
            return None
        own_s = {number: r.own_s or r.compute_s for number, r in self._reports.items()}
        step_s = max(r.billed_s or r.step_s for r in self._reports.values())
        self._reports = {}
        self._account(state, own_s, step_s)
        return self._turn(state, now, own_s=own_s)

    def before(self, state: State, actions: Iterable[Action], now: float) -> Effects | None:
        """What must come before `actions` are carried out: nominal limits before a device joins; a word on a plan."""
        found = list(actions)
        words = []
        for action in found:
            if isinstance(action, Planned | Took) and action.plan.generation > self._explained:
                self._explained = action.plan.generation
                words += self._explain(action.plan)
        if any(isinstance(action, Send) and isinstance(action.order, Switch) for action in found):
            effects = self._turn(state, now, keep_speeds=True)
            return replace(effects, words=(*words, *effects.words))
        return Effects(words=tuple(words)) if words else None

    def close(self) -> None:
        """The run ends: everything back to nominal."""
        for lease in self._leases.values():
            client.release(self.setting.port, lease)
        self._leases = {}

    # ---- one turn of the policy

    def _turn(
        self, state: State, now: float, own_s: Mapping[int, float] | None = None, keep_speeds: bool = False
    ) -> Effects:
        self._looked = now
        self._read(now)
        verdict = decide(self.setting.rules, self.state, self._observe(state, own_s), now)
        self._words += verdict.words
        if self.setting.dry_run:
            self.state = replace(verdict.state, held=self.state.held or verdict.state.held)
            self._say_what_would_be(verdict.writes)
        else:
            self.state = verdict.state
            self._carry_out(state, verdict.writes, now)
            self._keep_leases(state, now)
        speeds = None
        if not keep_speeds and dict(verdict.speeds) != dict(self._speeds):
            speeds = self._speeds = verdict.speeds
        words, self._words = tuple(self._words), []
        return Effects(self._orders(state), words, speeds)

    def _read(self, now: float) -> None:
        reply = client.read(self.setting.port)
        if isinstance(reply, Failure):
            return  # readings get old, which the policy notices
        for found in reply.devices:
            self._take(found, now)

    def _take(self, found: DeviceState, now: float) -> None:
        """Remember a reading, unless a newer one is known."""
        if found.limit_w is None or found.enforced_w is None or found.age_s is None:
            return
        at = now - found.age_s
        known = self._samples.get(found.uuid)
        if known is not None and known.at >= at:
            return
        alarm = " and ".join(sorted(ALARMS & set(found.reasons or ())))
        self._samples[found.uuid] = Sample(
            at=at,
            requested_w=found.limit_w,
            enforced_w=found.enforced_w,
            draw_w=found.draw_w,
            margin_c=found.margin_c,
            alarm=alarm and f"the device says {alarm}",
        )

    def _observe(self, state: State, own_s: Mapping[int, float] | None) -> Observation:
        setting, planner, plan = self.setting, self._planner, state.plan
        live = set(state.live())
        work = self._work(plan) if plan is not None else {}
        views = []
        for name in self._devices:
            place = plan.place(name) if plan is not None else None
            home = self._home(state, name)
            works = place is not None and name in live
            views.append(
                DeviceView(
                    name=name,
                    replica=home,
                    standing="works" if works else "dead",
                    nominal_w=setting.limits.nominal_w,
                    max_w=setting.limits.max_w if setting.raises else setting.limits.nominal_w,
                    min_w=setting.min_w,
                    load=work.get(name, 0.0),
                    reading=self._samples.get(setting.uuids[name]),
                )
            )
        job, growth = planner.job, state.growth
        joining: set[int] = set()
        if growth is not None and growth.stage is GrowthStage.SWITCH:
            joining = {place[0] for name in growth.joining if (place := growth.plan.place(name)) is not None}
        budget_w = setting.limits.domain_budget_w
        domains: dict[int, list[str]] = {}
        for view in views:
            if view.replica is not None:
                domains.setdefault(view.replica, []).append(view.name)
        budgets = [Budget(f"domain {n}", budget_w, tuple(names)) for n, names in domains.items()] if budget_w else []
        return Observation(
            devices=tuple(views),
            full_load=planner.work(0, ()) * job.even_share,
            hit=frozenset(r.replica for r in plan.replicas if r.tp < plan.tp_full) if plan else frozenset(),
            joining=frozenset(joining),
            budgets=tuple(budgets),
            own_s=own_s,
        )

    def _work(self, plan: Plan) -> dict[str, float]:
        """FLOPs of a step on each device of the plan."""
        if self._loads[0] != plan.generation:
            found = {}
            for replica in plan.replicas:
                for slot, load in loads(self._planner.spec, replica, self._planner.seq_len).items():
                    found[plan.device((replica.replica, slot))] = float(load * replica.num_sequences)
            self._loads = (plan.generation, found)
        return self._loads[1]

    # ---- writing

    def _carry_out(self, state: State, writes: tuple[Write, ...], now: float) -> None:
        """Lowers first, as the policy lists them; what fails ends the rest, and the policy sees it in the readings."""
        groups: dict[tuple[bool, int], dict[str, float]] = {}
        for write in writes:
            replica = self._home(state, write.device)
            assert replica is not None, "only devices with a replica are written"
            groups.setdefault((write.why == "raise", replica), {})[self.setting.uuids[write.device]] = write.limit_w
        for (_, replica), limits_w in sorted(groups.items()):
            lease = self._leases.get(replica) or self._acquire(state, replica)
            if lease is None:
                return
            reply = client.set_limits(self.setting.port, lease, limits_w, f"replica {replica}")
            if isinstance(reply, Failure):
                self._words.append(f"replica {replica}: power limits were not set: {reply.text}")
                if reply.error in ("no-lease", "not-leased"):
                    client.release(self.setting.port, self._leases.pop(replica))
                return
            for found in reply.devices:
                self._take(found, now + AFTER_S)

    def _home(self, state: State, device: str) -> int | None:
        """The replica in which a device works, or for which it was started; None for a spare without a place."""
        place = state.plan.place(device) if state.plan else None
        if place is not None:
            return place[0]
        return int(device.partition(":")[0]) if ":" in device else None

    def _acquire(self, state: State, replica: int) -> str | None:
        uuids = [self.setting.uuids[name] for name in self._devices if self._home(state, name) == replica]
        reply = client.acquire(self.setting.port, uuids, self.setting.ttl_s, f"replica {replica}")
        if isinstance(reply, Failure):
            self._words.append(f"replica {replica}: no power lease: {reply.text}")
            return None
        self._leases[replica] = reply.lease
        return reply.lease

    def _keep_leases(self, state: State, now: float) -> None:
        """Renew what is in use; give back the lease of a replica that is at nominal, and proved so."""
        if now - self._renewed < min(self.setting.ttl_s / 3, 5.0):
            return
        self._renewed = now
        for replica, lease in list(self._leases.items()):
            held = [known for name, known in self.state.held.items() if self._home(state, name) == replica]
            nominal_w = self.setting.limits.nominal_w
            idle = all(h.confirmed and abs(h.limit_w - nominal_w) <= self.setting.rules.tolerance_w for h in held)
            answer = (client.release if idle else client.renew)(self.setting.port, lease)
            if idle or (isinstance(answer, Failure) and answer.error == "no-lease"):
                del self._leases[replica]

    def _say_what_would_be(self, writes: tuple[Write, ...]) -> None:
        for write in writes:
            text = f"dry run: {write.device} would be set to {write.limit_w:.0f} W"
            if text not in self._would:
                self._would.add(text)
                self._words.append(text)

    def _orders(self, state: State) -> tuple[tuple[str, Power], ...]:
        """Tell emulated workers of limits that have changed, also those that were started since."""
        real = self.setting.emulated_speed
        if real is None:
            return ()
        orders = []
        for name in self._devices:
            sample, device = self._samples.get(self.setting.uuids[name]), state.devices[name]
            if sample is None or not device.hello:
                continue
            incarnation, limit_w = self._told.get(name, (-1, self.setting.limits.nominal_w))
            if incarnation != device.incarnation:
                limit_w = self.setting.limits.nominal_w
            if sample.enforced_w != limit_w:
                orders.append((name, Power(limit_w=sample.enforced_w, speed=real(sample.enforced_w))))
                self._told[name] = (device.incarnation, sample.enforced_w)
        return tuple(orders)

    # ---- books

    def _explain(self, plan: Plan) -> list[str]:
        """What power makes of each reduced replica of a plan, in words."""
        words = []
        for replica in plan.replicas:
            found = self._planner.boosted(replica.replica, replica.dead_slots)
            if found is not None:
                wanted = self._planner.work(replica.replica, replica.dead_slots) / self._planner.work(0, ())
                text = self.setting.limits.describe(found, wanted, len(replica.dead_slots), plan.tp_full)
                words.append(f"replica {replica.replica}: power {text}")
        return words

    def _account(self, state: State, own_s: Mapping[int, float], step_s: float) -> None:
        """Charge a step: what raised limits took over nominal ones, and what lowered ones left."""
        nominal_w = self.setting.limits.nominal_w
        incident = self.by_incident.setdefault(state.num_incidents, Spent())
        for replica in state.plan.replicas if state.plan else ():
            busy_s = own_s[replica.replica]
            for name in replica.devices:
                sample = self._samples.get(self.setting.uuids[name]) if name else None
                if sample is None:
                    continue
                limit_w = sample.enforced_w
                for spent in (self.spent, incident):
                    if limit_w > nominal_w + self.setting.rules.tolerance_w:
                        spent.extra_j += (limit_w - nominal_w) * busy_s
                        spent.boosted_device_s += step_s
                    elif limit_w < nominal_w - self.setting.rules.tolerance_w:
                        full_s = busy_s * self.setting.limits.speed(limit_w)
                        idle_w = nominal_w * IDLE_POWER
                        before_j = nominal_w * full_s + idle_w * (step_s - full_s)
                        spent.saved_j += before_j - limit_w * busy_s - idle_w * (step_s - busy_s)

    def record(self, plan: Plan) -> dict[str, Any]:
        """What a step's line in steps.jsonl says, in watts: per replica the highest limit and the draw, then of all.

        `devices` has (limit, draw) of each one. Dead devices count with their last reading. Joules and seconds are
        totals so far.
        """
        uuids = self.setting.uuids
        known = {name: self._samples[uuids[name]] for name in self._devices if uuids[name] in self._samples}
        replicas = {}
        for replica in plan.replicas:
            found = [known[name] for name in replica.devices if name in known]
            if found:
                limit_w = max(sample.enforced_w for sample in found)
                replicas[str(replica.replica)] = {"limit_w": limit_w, "draw_w": _draw_w(found)}
        budget_w = self.setting.limits.domain_budget_w
        return {
            "replicas": replicas,
            "devices": {name: (sample.enforced_w, sample.draw_w) for name, sample in known.items()},
            "limit_w": sum(sample.enforced_w for sample in known.values()),
            "draw_w": _draw_w(known.values()),
            "budget_w": budget_w and budget_w * self._planner.job.num_replicas,
            **vars(self.spent),
        }

    def summary(self) -> dict[str, Any]:
        """What summary.json says: the curve, what was spent, and for which incident (0: before the first)."""
        limits = self.setting.limits
        return {
            "curve": limits.curve.label(limits.max_w / limits.tdp_w),
            "nominal_w": limits.nominal_w,
            "max_w": limits.max_w,
            "emulated": self.setting.emulated_speed is not None,
            "dry_run": self.setting.dry_run,
            **vars(self.spent),
            "by_incident": {str(number): vars(spent) for number, spent in self.by_incident.items()},
        }


def _draw_w(samples: Iterable[Sample]) -> float | None:
    """Draw of all that say theirs; None if nobody does."""
    draws_w = [sample.draw_w for sample in samples if sample.draw_w is not None]
    return sum(draws_w) if draws_w else None
