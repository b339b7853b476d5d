"""A site that only exists in a test: devices under the policy, hands that meddle, and what holds at every instant."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from runflat.power.control import PowerState, Verdict, decide
from runflat.power.curve import PowerCurve, curve_named
from runflat.power.views import Budget, DeviceView, Observation, Rules, Sample

NOMINAL_W = 1000.0
TP = 4


@dataclass
class FakeDevice:
    """One device as it physically is; the limit in force may lag or be capped."""

    limit_w: float = NOMINAL_W
    standing: Literal["works", "dead", "off"] = "works"
    margin_c: float = 20.0
    alarm: str = ""
    lost: bool = False
    deaf: int = 0
    """Writes that have no effect although they seem to succeed."""
    silent: bool = False
    """Readings get old."""
    cap_w: float = 9e9
    reading: Sample | None = None


@dataclass
class FakeSite:
    """Replicas of `TP` devices, each a domain with a budget; work is even, speeds follow the limits by the curve."""

    num_replicas: int = 2
    curve: PowerCurve = field(default_factory=lambda: curve_named("ntp"))
    max_w: float = 1300.0
    min_w: float | None = None
    budget_w: float | None = None
    """Of each replica's domain."""
    rack_w: float | None = None
    """Of all devices together."""
    load_gain: float = 1.0
    """What the reduced replica really takes over what the curve says."""
    save: bool = False
    now: float = 0.0
    joining: set[int] = field(default_factory=set)
    state: PowerState = field(default_factory=PowerState)
    words: list[str] = field(default_factory=list)
    written: list[tuple[float, str, float]] = field(default_factory=list)
    meddled: set[str] = field(default_factory=set)
    speeds: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """All at nominal."""
        self.devices = {f"{r}:{s}": FakeDevice() for r in range(self.num_replicas) for s in range(TP)}
        self.rules = Rules(curve=self.curve, tdp_w=NOMINAL_W, save=self.save)

    def live(self, replica: int) -> list[str]:
        """Devices of a replica that work."""
        return [n for n, d in self.devices.items() if n.startswith(f"{replica}:") and d.standing == "works"]

    def own_s(self) -> dict[int, float]:
        """Each replica's own time of a step; 1.0 for a whole one at nominal."""
        found = {}
        for replica in range(self.num_replicas):
            live = self.live(replica)
            if live:
                limit_w = min(min(self.devices[n].limit_w, self.devices[n].cap_w) for n in live)
                hit = self.load_gain if len(live) < TP else 1.0
                found[replica] = TP / len(live) * hit / self.curve.ratio(limit_w / NOMINAL_W, 1.0)
        return found

    def seen(self, own_s: dict[int, float] | None) -> Observation:
        """What the policy is told."""
        views = []
        for name, device in self.devices.items():
            replica = int(name[0])
            if not device.silent:
                device.reading = Sample(
                    at=self.now,
                    requested_w=device.limit_w,
                    enforced_w=min(device.limit_w, device.cap_w),
                    margin_c=device.margin_c,
                    alarm=device.alarm,
                    lost=device.lost,
                )
            load = 1.0 * TP / max(len(self.live(replica)), 1)
            views.append(
                DeviceView(
                    name=name,
                    replica=replica,
                    standing=device.standing,
                    nominal_w=NOMINAL_W,
                    max_w=self.max_w,
                    min_w=self.min_w,
                    load=load,
                    reading=device.reading,
                )
            )
        hit = frozenset(r for r in range(self.num_replicas) if 0 < len(self.live(r)) < TP)
        return Observation(
            devices=tuple(views),
            full_load=1.0,
            hit=hit,
            joining=frozenset(self.joining),
            budgets=self.budgets(),
            own_s=own_s,
        )

    def budgets(self) -> tuple[Budget, ...]:
        """The budgets there are."""
        found = []
        if self.budget_w is not None:
            for replica in range(self.num_replicas):
                names = tuple(n for n in self.devices if n.startswith(f"{replica}:"))
                found.append(Budget(f"domain {replica}", self.budget_w, names))
        if self.rack_w is not None:
            found.append(Budget("the rack", self.rack_w, tuple(self.devices)))
        return tuple(found)

    def drawn_w(self, budget: Budget) -> float:
        """Sum of limits in a budget: dead devices count until they are off."""
        return sum(self.devices[n].limit_w for n in budget.members if self.devices[n].standing != "off")

    def turn(self, *, step: bool = False, seconds: float = 1.0, fail_after: int | None = None) -> Verdict:
        """Time passes; the policy decides, and its writes are carried out one by one, checked between them."""
        self.now += seconds
        verdict = decide(self.rules, self.state, self.seen(self.own_s() if step else None), self.now)
        self.state = verdict.state
        self.words += verdict.words
        self.speeds = dict(verdict.speeds)
        for index, write in enumerate(verdict.writes):
            if fail_after is not None and index >= fail_after:
                break
            self.carry_out(write.device, write.limit_w)
        return verdict

    def carry_out(self, name: str, limit_w: float) -> None:
        """One write."""
        device = self.devices[name]
        low_w = self.min_w if self.save and self.min_w is not None else NOMINAL_W
        assert low_w - 1e-6 <= limit_w <= self.max_w + 1e-6, f"{name}: {limit_w} W is out of range"
        assert name not in self.meddled, f"{name} belongs to somebody else"
        assert not device.lost, f"{name} is lost"
        self.written.append((self.now, name, limit_w))
        if device.deaf:
            device.deaf -= 1
            return
        raised = limit_w > device.limit_w
        device.limit_w = limit_w
        for budget in self.budgets() if raised and limit_w > NOMINAL_W else ():
            drawn_w = self.drawn_w(budget)
            assert drawn_w <= budget.watts + 1e-6, f"{drawn_w} W in {budget.name} after {name} got {limit_w} W"

    def limits(self, replica: int) -> list[float]:
        """Limits of a replica's live devices."""
        return [self.devices[n].limit_w for n in self.live(replica)]
