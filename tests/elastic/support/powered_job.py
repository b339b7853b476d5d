"""A job with power in which workers only talk: what they declare follows their limits, under a fake clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from runflat.elastic.assemble import assemble
from runflat.elastic.boost import Boost, Policy
from runflat.elastic.fake_launcher import FakeLauncher, Fault
from runflat.elastic.orders import Order, Power
from runflat.elastic.planning import Planner
from runflat.elastic.power_setting import PowerSetting
from runflat.elastic.state import Limits
from runflat.plan.plan import ReplicaPlan
from runflat.plan.strategies import JobFacts, Strategy
from runflat.plan.units import Kind, ModelSpec, ParamSpec, Segment
from runflat.power.client import LocalAgent
from runflat.power.curve import PowerCurve
from runflat.power.emulated import EmulatedDevices, emulated_devices
from runflat.power.link import Link
from runflat.power.reach import PowerLimits
from runflat.power.site import DeviceLimits, SiteLimits
from runflat.power.views import Rules
from runflat.power.wire import Failure, Reply, Request

NOMINAL_W = 1000.0
LINEAR = PowerCurve(((0.5, 0.5), (1.0, 1.0), (1.5, 1.5)), "linear")
STEP_S = 0.4


def divisible_spec(units: int) -> ModelSpec:
    """A model whose heads and FFN blocks are `units`, so that a lost device's share spreads evenly."""
    return ModelSpec(
        name="toy",
        kinds=(Kind("head", 2 * units, 2), Kind("ffn", 2 * units, 2)),
        params=(
            ParamSpec("q", (2 * units, 8), "sharded", True, 0, 1, 0, (Segment("head", 0),)),
            ParamSpec("up", (2 * units, 8), "sharded", True, 1, 1, 0, (Segment("ffn", 0),)),
            ParamSpec("norm", (8,), "equal", False, 2),
        ),
        hidden_size=8,
        num_layers=1,
        head_dim=2,
    )


class Powered(FakeLauncher):
    """Workers whose step takes their replica's work over the speed that their limits allow."""

    def __init__(self, num_steps: int, faults: tuple[Fault, ...], planner: Planner, fixed_s: float = 0.0):
        super().__init__(num_steps, faults, compute_s=STEP_S)
        self.fixed_s = fixed_s
        self.planner = planner
        self.speed: dict[str, float] = {}
        self.told: list[tuple[float, str, float]] = []
        self.returning: str | None = None

    def send(self, device: str, order: Order) -> None:
        if isinstance(order, Power):
            self.speed[device] = order.speed
            self.told.append((self.now, device, order.limit_w))
        super().send(device, order)

    def start(self, device: str, incarnation: int) -> None:
        self.speed.pop(device, None)
        super().start(device, incarnation)

    def compute_time_s(self, replica: ReplicaPlan, device: str | None = None) -> float:
        """The replica's slowest device: all of it meets at each layer."""
        work = self.planner.device_work(replica.replica, replica.dead_slots)
        full = self.planner.work(replica.replica, ())
        own = [w / full / self.speed.get(str(d), 1.0) for w, d in zip(work, filter(None, replica.devices), strict=True)]
        return STEP_S / self.planner.job.even_share * replica.num_sequences * max(own) + self.fixed_s


class Quiet:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def step(self, record: Mapping[str, Any]) -> None: ...

    def say(self, text: str) -> None:
        self.lines.append(text)

    def waiting(self, text: str | None) -> None: ...


class Mute:
    """An agent in this process whose readings can get lost."""

    def __init__(self, agent: LocalAgent) -> None:
        self.agent = agent
        self.is_mute = False

    def ask(self, request: Request) -> Reply:
        if self.is_mute and request.type == "read":
            return Failure(error="timeout", text="no answer")
        return self.agent.ask(request)


class Job:
    """A job with power, under a fake clock: declare it, run it, look at what it wrote."""

    def __init__(
        self,
        folder: Path,
        *,
        tp: int,
        replicas: int,
        units: int,
        curve: PowerCurve,
        max_w: float,
        batch: int = 8,
        steps: int = 40,
        faults: tuple[Fault, ...] = (),
        act: Callable[[Job], None] | None = None,
        fixed_s: float = 0.0,
        policy: Policy | None = None,
        budgets: Mapping[str, Any] = MappingProxyType({}),
        **fields: Any,
    ):
        """Nothing runs yet.

        `fixed_s` of each step do not depend on power; `policy` takes the place of the boost; `budgets` are fields of
        `PowerLimits`.
        """
        self.folder, self.view = folder, Quiet()
        placement = tuple(((r, slot), f"{r}:{slot}") for r in range(replicas) for slot in range(tp))
        limits = PowerLimits(curve=curve, tdp_w=NOMINAL_W, nominal_w=NOMINAL_W, max_w=max_w, **budgets)
        facts = JobFacts(num_replicas=replicas, tp_full=tp, num_sequences=batch)
        planner = Planner(
            spec=divisible_spec(units),
            job=facts,
            placement=placement,
            seq_len=16,
            bytes_per_element=12,
            chain=(Strategy.NTP, Strategy.DROP),
            power=limits if fields.get("raises", True) and not fields.get("dry_run") else None,
        )
        self.launcher = Powered(steps, faults, planner, fixed_s)

        def clock() -> float:
            return self.launcher.now

        setting = self._setting(limits, planner, clock, fields)
        self.boost = Boost(setting, planner, policy)
        self.controller = assemble(
            folder,
            planner,
            self.view,
            limits=Limits(back_off_s=1.0, timeout_s=20.0, auto_return=False),
            sample_hash=lambda previous, step, samples: "",
            learning_rate=lambda step: 0.5,
            secret="secret",
            clock=clock,
            boost=self.boost,
        )
        if act is not None:
            self.launcher.later(STEP_S * 4, lambda: act(self))

    def _setting(
        self, limits: PowerLimits, planner: Planner, clock: Callable[[], float], fields: dict[str, Any]
    ) -> PowerSetting:
        curve, max_w, low_w = limits.curve, limits.max_w, fields.get("min_w") or NOMINAL_W
        self.backend: EmulatedDevices = emulated_devices(
            planner.devices, curve, nominal_w=NOMINAL_W, max_w=max_w, min_w=low_w, clock=clock
        )
        site = SiteLimits(
            allow_uids=(0,),
            devices={n: DeviceLimits(nominal_w=NOMINAL_W, ceiling_w=max_w, floor_w=low_w) for n in planner.devices},
        )
        self.agent = Mute(LocalAgent(site, self.backend, lambda event, facts: None, clock))
        return PowerSetting(
            rules=Rules(curve=curve, tdp_w=NOMINAL_W, save=bool(fields.get("min_w")), hold_off_s=10.0),
            limits=limits,
            link=Link(self.agent, 30.0, clock, own_thread=False),
            uuids={name: name for name in planner.devices},
            emulated_speed=lambda limit_w: curve.ratio(limit_w / NOMINAL_W, 1.0),
            **fields,
        )

    def run(self) -> dict[str, Any]:
        self.controller.supervise(self.launcher)
        return self.controller.summary()

    def steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "steps.jsonl").read_text().splitlines()]

    def rate(self, index: int) -> float:
        """Sequences per declared second in a step."""
        row = self.steps()[index]
        return sum(r["num_samples"] for r in row["replicas"]) / max(r["compute_s"] for r in row["replicas"])

    def shares(self, index: int) -> list[int]:
        return [r["num_samples"] for r in self.steps()[index]["replicas"]]

    def limits_w(self) -> dict[str, float]:
        return {name: device.limit_w for name, device in self.backend.devices.items()}
