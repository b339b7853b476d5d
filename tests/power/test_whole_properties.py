"""Policy, link and agent together, while each of them and the devices fail in any order: what must always hold."""

from __future__ import annotations

from typing import Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from runflat.power.control import PowerState, decide
from runflat.power.fakes import CEILING_W, JOB, LINEAR, NOMINAL_W, UUIDS, CrashError, FakeNode, site_limits
from runflat.power.link import Link, Order
from runflat.power.views import Budget, DeviceView, Observation, Rules, Sample
from runflat.power.wire import Failure, Reply, Request

BUDGET_W = 3 * NOMINAL_W + 180
FOREIGN_W = 700.0
LEASE_S = 8.0
RULES = Rules(curve=LINEAR, tdp_w=NOMINAL_W, hold_off_s=3.0, stale_s=4.0)
slots = st.integers(0, len(UUIDS) - 1)


class WatchedNode(FakeNode):
    """A node that looks at each write as it happens."""

    def set_limit(self, uuid: str, limit_w: float) -> None:
        """Write, unless it is a write that must not be."""
        assert uuid in UUIDS
        assert NOMINAL_W <= limit_w <= CEILING_W
        assert self.devices.devices[uuid].limit_w != FOREIGN_W, "another writer was overwritten"
        super().set_limit(uuid, limit_w)
        total_w = sum(max(device.limit_w, NOMINAL_W) for device in self.devices.devices.values())
        assert total_w <= BUDGET_W + 1e-6, f"{total_w} W after {uuid} got {limit_w} W"


class Mortal:
    """The port to an agent that dies of some requests; the next one is there at once."""

    def __init__(self, node: FakeNode) -> None:
        self.node = node

    def ask(self, request: Request) -> Reply:
        """The answer, if the agent lives to give it."""
        try:
            return self.node.agent.handle(JOB, request, self.node.now_s)
        except CrashError:
            restart(self.node)
            return Failure(error="unreachable", text="it died")


def restart(node: FakeNode) -> None:
    """A new agent, at the second try if need be."""
    try:
        node.start()
    except CrashError:
        node.crash_after = None
        node.start()


class Controller:
    """The controller of one job on one replica of three devices: what it knows dies with it."""

    def __init__(self, node: FakeNode) -> None:
        self.node = node
        self.link = Link(Mortal(node), LEASE_S, lambda: node.now_s, own_thread=False)
        self.state = PowerState()
        self.samples: dict[str, Sample] = {}

    def hear(self) -> None:
        """Take in readings, as `elastic.power_sight` does."""
        for outcome in self.link.outcomes():
            for found in outcome.devices:
                if found.limit_w is not None and found.enforced_w is not None and found.age_s is not None:
                    at = outcome.asked_at - found.age_s + (1e-6 if outcome.is_read_back else 0.0)
                    sample = Sample(
                        at=at, requested_w=found.limit_w, enforced_w=found.enforced_w, margin_c=found.margin_c
                    )
                    if found.uuid not in self.samples or self.samples[found.uuid].at < at:
                        self.samples[found.uuid] = sample

    def turn(self, dead: set[str], joining: bool, step: bool) -> None:
        """Look, decide, write."""
        self.link.look()
        self.hear()
        load = len(UUIDS) / max(len(UUIDS) - len(dead), 1)
        views = []
        for uuid in UUIDS:
            standing: Literal["works", "dead"] = "dead" if uuid in dead else "works"
            views.append(
                DeviceView(
                    name=uuid,
                    replica=0,
                    standing=standing,
                    nominal_w=NOMINAL_W,
                    max_w=CEILING_W,
                    load=load,
                    reading=self.samples.get(uuid),
                )
            )
        seen = Observation(
            devices=tuple(views),
            full_load=1.0,
            hit=frozenset({0} if dead else ()),
            joining=frozenset({0} if joining else ()),
            budgets=(Budget("domain", BUDGET_W, UUIDS),),
            own_s={0: load} if step else None,
        )
        verdict = decide(RULES, self.state, seen, self.node.now_s)
        self.state = verdict.state
        lowers = {write.device: write.limit_w for write in verdict.writes if write.why != "raise"}
        raises = {write.device: write.limit_w for write in verdict.writes if write.why == "raise"}
        orders = [Order(group=0, devices=UUIDS, limits_w=limits_w) for limits_w in (lowers, raises) if limits_w]
        self.link.write(orders)
        self.link.renew(0)
        self.hear()


class Weeks(RuleBasedStateMachine):
    """One node and one job; nothing in them lives for ever."""

    @initialize()
    def begin(self) -> None:
        self.node = WatchedNode(site=site_limits(max_lease_s=LEASE_S))
        for device in self.node.devices.devices.values():
            device.energy_j = 1e9
        self.controller = Controller(self.node)
        self.dead: set[str] = set()
        self.touched: set[str] = set()
        self.highest_w = NOMINAL_W

    def pass_time(self, seconds: int, works: bool) -> None:
        """Seconds go by; the controller has a turn in each, unless it hangs."""
        for _ in range(seconds):
            try:
                self.node.wait(1)
            except CrashError:
                restart(self.node)
            if works:
                self.controller.turn(self.dead, joining=False, step=True)
            self.highest_w = max(self.highest_w, *self.node.limits())

    @rule(seconds=st.integers(1, 6))
    def work(self, seconds: int) -> None:
        self.pass_time(seconds, works=True)

    @rule(seconds=st.integers(1, 12))
    def controller_hangs(self, seconds: int) -> None:
        self.pass_time(seconds, works=False)

    @rule()
    def controller_is_killed(self) -> None:
        self.controller = Controller(self.node)

    @rule(slot=slots)
    def device_is_lost(self, slot: int) -> None:
        if len(self.dead) < len(UUIDS) - 1:
            self.dead.add(UUIDS[slot])

    @precondition(lambda self: self.dead)
    @rule()
    def devices_return(self) -> None:
        self.controller.turn(self.dead, joining=True, step=False)
        self.dead.clear()
        self.pass_time(1, works=True)

    @rule(slot=slots, temperature_c=st.sampled_from([50.0, 86.0, 89.5]))
    def heat(self, slot: int, temperature_c: float) -> None:
        self.node.devices.devices[UUIDS[slot]].temperature_c = temperature_c

    @precondition(lambda self: not self.touched)
    @rule(slot=slots)
    def somebody_else_writes(self, slot: int) -> None:
        moved = sorted(self.node.saved.load())
        uuid = moved[0] if moved else UUIDS[slot]  # where it matters most
        self.node.devices.devices[uuid].limit_w = FOREIGN_W
        self.touched.add(uuid)

    @rule(points=st.integers(0, 12))
    def agent_will_die(self, points: int) -> None:
        self.node.crash_after = points

    @rule()
    def agent_is_killed(self) -> None:
        restart(self.node)

    @rule(slot=slots, failure=st.sampled_from(["lost", "slow", None]))
    def device_fails(self, slot: int, failure: Literal["lost", "slow"] | None) -> None:
        self.node.devices.devices[UUIDS[slot]].failure = failure

    def teardown(self) -> None:
        """The last controller has gone and devices answer: within the lease all are at the recorded nominal."""
        self.node.crash_after = None
        for device in self.node.devices.devices.values():
            device.failure = None
        self.node.wait(round(LEASE_S) + 2)
        for uuid, device in self.node.devices.devices.items():
            assert device.limit_w in ((NOMINAL_W, FOREIGN_W) if uuid in self.touched else (NOMINAL_W,)), uuid


Weeks.TestCase.settings = settings(max_examples=100, stateful_step_count=30)


class TestWeeks(Weeks.TestCase):
    """Catches a sum above the budget, a limit above a ceiling, another writer fought, a boost that nobody ends."""


def test_the_machine_boosts() -> None:
    """Catches a test of nothing: in quiet weeks limits must really go up, and come back."""
    weeks = Weeks()
    weeks.begin()
    weeks.work(3)
    weeks.device_is_lost(1)
    weeks.work(6)
    assert weeks.highest_w > NOMINAL_W + 80
    weeks.devices_return()
    assert weeks.node.limits() == [NOMINAL_W] * 3
    weeks.device_is_lost(0)
    weeks.work(12)
    assert max(weeks.node.limits()) > NOMINAL_W
    weeks.teardown()
