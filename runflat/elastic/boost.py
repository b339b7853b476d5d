"""The controller's side of the power boost: shows the policy what there is, and carries out what it says.

It talks to an agent (`power.client`), tells emulated workers how fast their limit makes them, and keeps account of what
the boost took. All decisions are `power.control`'s and the planner's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from runflat.elastic.actions import Action, Planned, Send, Start, Took
from runflat.elastic.messages import StepReport
from runflat.elastic.orders import Power, Switch
from runflat.elastic.planning import Planner
from runflat.elastic.power_setting import PowerSetting
from runflat.elastic.power_sight import Sight
from runflat.elastic.power_spent import PowerBooks
from runflat.elastic.state import State
from runflat.plan.plan import Plan
from runflat.power.control import PowerState, Verdict, decide
from runflat.power.link import Order
from runflat.power.views import Observation, Write

LOOK_S = 1.0
"""Between two looks at the devices while no step ends."""
JOIN_WAIT_S = 0.5
"""Longest wait for an agent to bring limits down before a device joins."""
CLOSE_WAIT_S = 5.0
"""Longest wait for it at the end of the run."""


@dataclass(frozen=True)
class Effects:
    """What the controller has to do: orders to workers, lines for people, and what the planner has to know."""

    orders: tuple[tuple[str, Power], ...] = ()
    words: tuple[str, ...] = ()
    speeds: Mapping[int, float] | None = None
    """Replicas that cannot be boosted beyond a speed at present; None if that has not changed."""
    done: bool = False
    """The run is to end: it was for a calibration, which has all that it can get."""


Policy = Callable[[PowerState, Observation, float], Verdict]
"""(state, what is seen, now) -> what to do, as `power.control.decide` and `power.calibrate.Walk.turn` say it."""


class Boost:
    """Power of one run. Times are seconds since its start."""

    def __init__(self, setting: PowerSetting, planner: Planner, policy: Policy | None = None):
        """Nothing is asked of the agent yet. `policy` takes the place of the one that boosts."""
        self._policy = policy or partial(decide, setting.rules)
        self.setting = setting
        self.state = PowerState()
        self.sight = Sight(setting, planner)
        self.books = PowerBooks(setting, planner, self.sight)
        self._devices = planner.devices
        self._planner = planner
        self._leased: set[int] = set()
        """Replicas for which a lease may be held."""
        self._ahead_s = -math.inf
        """The run's clock minus the link's."""
        self._renewed = 0.0
        self._looked = -LOOK_S
        self._reports: dict[int, StepReport] = {}
        self._told: dict[str, tuple[int, float]] = {}
        self._speeds: Mapping[int, float] = {}
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
        self.books.charge(plan, state.num_incidents, own_s, step_s)
        return self._turn(state, now, own_s=own_s)

    def before(self, state: State, actions: Iterable[Action], now: float) -> Effects | None:
        """What must come before `actions` are carried out: nominal limits before a device joins; a word on a plan."""
        found = list(actions)
        words = []
        for action in found:
            if isinstance(action, Planned | Took) and action.plan.generation > self._explained:
                self._explained = action.plan.generation
                words += self._explain(action.plan)
        if any(self._will_draw(action) for action in found):
            effects = self._turn(state, now, joins=True)
            return replace(effects, words=(*words, *effects.words))
        return Effects(words=tuple(words)) if words else None

    def _will_draw(self, action: Action) -> bool:
        """Whether a device is about to join, or to be started although the budgets count it as off."""
        if isinstance(action, Start):
            return action.device in self.sight.off
        return isinstance(action, Send) and isinstance(action.order, Switch)

    def close(self) -> None:
        """The run ends: everything back to nominal."""
        self.setting.link.close(CLOSE_WAIT_S)

    # ---- one turn of the policy

    def _turn(self, state: State, now: float, own_s: Mapping[int, float] | None = None, joins: bool = False) -> Effects:
        """Look, decide, write. `joins`: a device is about to, so limits must be down, and nothing is planned anew."""
        setting = self.setting
        self._looked = now
        setting.link.look()
        self._hear(now)
        verdict = self._policy(self.state, self.sight.observe(state, own_s, now), now)
        self._words += verdict.words
        if setting.dry_run:
            self.state = replace(verdict.state, held=self.state.held or verdict.state.held)
            self._say_what_would_be(verdict.writes)
        else:
            self.state = verdict.state
            self._carry_out(state, verdict.writes)
            self._keep_leases(state, now)
        if joins:
            setting.link.finish(JOIN_WAIT_S)
        self._hear(now)
        speeds = None
        if not joins and dict(verdict.speeds) != dict(self._speeds):
            speeds = self._speeds = verdict.speeds
        words, self._words = tuple(self._words), []
        return Effects(self._orders(state), words, speeds, verdict.done)

    def _hear(self, now: float) -> None:
        """Take in what the agent has answered since."""
        link = self.setting.link
        # Both clocks are read one after the other: the largest difference is the truest.
        self._ahead_s = max(self._ahead_s, now - link.clock())
        for outcome in link.outcomes():
            self._words += outcome.words
            self.sight.take(outcome, outcome.asked_at + self._ahead_s)

    # ---- writing

    def _carry_out(self, state: State, writes: tuple[Write, ...]) -> None:
        """Lowers first, as the policy lists them; what fails ends the rest, and the policy sees it in the readings."""
        groups: dict[tuple[bool, int], dict[str, float]] = {}
        for write in writes:
            replica = self.sight.home(state, write.device)
            assert replica is not None, "only devices with a replica are written"
            groups.setdefault((write.why == "raise", replica), {})[self.setting.uuids[write.device]] = write.limit_w
        orders = []
        for (_, replica), limits_w in sorted(groups.items()):
            self._leased.add(replica)
            uuids = tuple(self.setting.uuids[name] for name in self.sight.members(state, replica))
            orders.append(Order(group=replica, devices=uuids, limits_w=limits_w))
        if orders:
            self.setting.link.write(orders)

    def _keep_leases(self, state: State, now: float) -> None:
        """Renew what is in use; give back the lease of a replica that is at nominal, and proved so."""
        if now - self._renewed < min(self.setting.ttl_s / 3, 5.0):
            return
        self._renewed = now
        nominal_w, tolerance_w = self.setting.limits.nominal_w, self.setting.rules.tolerance_w
        for replica in list(self._leased):
            held = [known for name in self.sight.members(state, replica) if (known := self.state.held.get(name))]
            if all(h.confirmed and abs(h.limit_w - nominal_w) <= tolerance_w for h in held):
                self.setting.link.release(replica)
                self._leased.discard(replica)
            else:
                self.setting.link.renew(replica)

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
            sample, device = self.sight.sample(name), state.devices[name]
            if sample is None or not device.hello:
                continue
            incarnation, limit_w = self._told.get(name, (-1, self.setting.limits.nominal_w))
            if incarnation != device.incarnation:
                limit_w = self.setting.limits.nominal_w
            if sample.enforced_w != limit_w:
                orders.append((name, Power(limit_w=sample.enforced_w, speed=real(sample.enforced_w))))
                self._told[name] = (device.incarnation, sample.enforced_w)
        return tuple(orders)

    # ---- words

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
