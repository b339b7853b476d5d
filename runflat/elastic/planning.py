"""From health to the next plan and the moves that it takes: the facts of one job, behind which the planner stands."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from runflat.cluster.health import Health
from runflat.elastic.messages import MemoryCopy
from runflat.elastic.orders import Move, Origins
from runflat.errors import PlanError
from runflat.plan.assignment import assign
from runflat.plan.cost import loads
from runflat.plan.plan import Place, Plan, ReplicaPlan
from runflat.plan.planner import build_plan
from runflat.plan.sharded_state import Origin, ShardedState, describe
from runflat.plan.strategies import Chain, Decision, JobFacts, Strategy, decide
from runflat.plan.transfers import nearest
from runflat.plan.units import REPLICATED, ModelSpec, unit_bytes
from runflat.power.reach import PowerLimits, Reach

Units = Mapping[str, frozenset[int]]
"""Units per kind."""


@dataclass(frozen=True)
class Moves:
    """What must move for a plan, and the units (`kind unit`) that nobody has."""

    transfers: tuple[Move, ...]
    lost: tuple[str, ...]
    origins: Origins | None = None
    """Where optimizer state is sharded: in place of the transfers what each device has."""


@dataclass(frozen=True)
class Planner:
    """What a job is, and what its devices are called; makes decisions, plans and lists of moves."""

    spec: ModelSpec
    job: JobFacts
    placement: tuple[tuple[Place, str], ...]
    """Device of each place in health."""
    seq_len: int
    bytes_per_element: int
    """All that moves per parameter element: weight and moments."""
    chain: Chain = (Strategy.NTP, Strategy.DROP)
    spares: tuple[str, ...] = ()
    memory_copies: bool = True
    """Whether workers keep copies in memory."""
    power: PowerLimits | None = None
    """What survivors of a loss may get more power from; None without a boost."""
    speeds: Mapping[int, float] = field(default_factory=dict)
    """Replicas that cannot be boosted beyond this speed at present, whatever `power` says."""
    domains: Mapping[str, str] = field(default_factory=dict)
    """Domain of each device, as far as it is known."""
    may_span: bool = False
    """Whether a replica may span several domains."""
    _works: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What `device_work` has found, by dead slots."""
    sharded: ShardedState | None = None
    """Who has which part of the state, where optimizer state is sharded."""

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices that the job holds."""
        return (*(device for _, device in self.placement), *self.spares)

    def decide(
        self,
        live: Collection[str],
        previous: Decision | None,
        too_low: int = 0,
        slow: Mapping[int, float] = MappingProxyType({}),
        *,
        has_holders: bool = True,
        has_checkpoint: bool = True,
    ) -> Decision:
        """Who works on what when exactly `live` can work.

        Args:
            live: devices that can work.
            previous: the decision in force.
            too_low: no degree up to this one fits in memory.
            slow: replicas that take longer than their degree says, and how many times. It may pass, and what a replica
                holds is gone when it leaves: slowness takes no replica's last sequence.
            has_holders: whether each unit has a live holder.
            has_checkpoint: whether there is a whole copy of everything, in memory or on disk.
        """
        health = Health(self.devices, frozenset(self.devices) - frozenset(live))
        factors = dict(slow)

        def seconds(replica: int, dead: tuple[int, ...]) -> float:
            return self.seconds(replica, dead) * factors.get(replica, 1.0)

        while True:
            decision = decide(
                replace(self.job, has_checkpoint=has_checkpoint),
                health,
                self.chain,
                placement=dict(self.placement),
                seconds=seconds,
                fits_memory=lambda degree: degree > too_low,
                has_holders=lambda replica, dead: has_holders,
                previous=previous,
                domains={} if self.may_span else self.domains,
            )
            out = [replica for replica, factor in factors.items() if factor > 1.0 and replica in dict(decision.left)]
            if not out:
                return decision
            factors |= {replica: max(factors[replica] / 2, 1.0) for replica in out}

    def seconds(self, replica: int, dead: tuple[int, ...]) -> float:
        """Time of one sequence in units of work at nominal power: replicas share the batch by it."""
        work = self.work(replica, dead)
        found = self.boosted(replica, dead)
        if found is None:
            return work
        full = self.work(replica, ())
        most = self.speeds.get(replica)
        return full / found.pace if most is None else max(full / found.pace, work / most)

    def boosted(self, replica: int, dead: tuple[int, ...]) -> Reach | None:
        """What more power makes of a replica with these dead slots; None without power, and for a whole replica."""
        if self.power is None or not dead:
            return None
        full = self.work(replica, ())
        needs = [(load / full, 1) for load in self.device_work(replica, dead)]
        slots = [slot for slot in range(self.job.tp_full) if slot not in dead]
        return self.power.reach(needs, num_dead=len(dead), slots=slots, dead=dead)

    def work(self, replica: int, dead: tuple[int, ...]) -> float:
        """FLOPs of one sequence on the most loaded device."""
        return float(max(self.device_work(replica, dead)))

    def device_work(self, replica: int, dead: tuple[int, ...]) -> tuple[int, ...]:
        """FLOPs of one sequence on each survivor, by slot."""
        if dead not in self._works:  # all replicas are alike in this
            tp = self.job.tp_full
            slots = tuple(None if slot in dead else "" for slot in range(tp))
            kinds = self.spec.assigned_kinds
            dealt = tuple((kind.name, assign(kind.num_units, tp, dead)) for kind in kinds)
            found = loads(self.spec, ReplicaPlan(replica, slots, dealt, 0), self.seq_len)
            self._works[dead] = tuple(found[slot] for slot in sorted(found))
        return self._works[dead]

    def full_plan(self) -> Plan:
        """The plan in health."""
        job = self.job
        return build_plan(self.spec, dict(self.placement), job.tp_full, job.num_sequences, self.seq_len)

    def step_work(self, plan: Plan) -> float:
        """Time of a step under `plan` in units of work at nominal power: FLOPs on the most loaded device."""
        return max(self.seconds(r.replica, r.dead_slots) * r.num_sequences for r in plan.replicas)

    def plan(self, decision: Decision, generation: int, previous: Plan | None) -> Plan:
        """The plan that carries out `decision`, moving little from `previous`."""
        devices = dict(decision.devices)
        batch = sum(share for _, share in decision.shares)
        plan = build_plan(self.spec, devices, self.job.tp_full, batch, self.seq_len, previous, generation)
        shares = dict(decision.shares)
        replicas = tuple(replace(replica, num_sequences=shares[replica.replica]) for replica in plan.replicas)
        if len(replicas) != len(shares):
            raise PlanError(
                f"a batch of {batch} sequences leaves one of the {len(shares)} replicas without any: raise the batch."
            )
        domains = tuple((device, self.domains[device]) for device in plan.devices if device in self.domains)
        return replace(plan, replicas=replicas, domains=domains)

    def _held(self, plan: Plan, device: str) -> dict[str, frozenset[int]]:
        return {kind: frozenset(units) for kind, units in plan.held(self.spec.kinds, device).items()}

    def missing(self, holdings: Mapping[str, Plan], partial: Collection[str] = ()) -> tuple[str, ...]:
        """Units (`kind unit`) that none of these devices holds, each holding what its plan says.

        `partial`: where optimizer state is sharded, devices that have the new weights of their kept pieces only.
        """
        if self.sharded is not None:
            parts = (self.sharded.part(plan, device, device not in partial) for device, plan in holdings.items())
            return self.sharded.missing(parts)
        return self._missing([self._held(plan, device) for device, plan in holdings.items()])

    def newest_copy(self, copies: Mapping[str, Sequence[MemoryCopy]], plans: Mapping[int, Plan]) -> int | None:
        """The newest step of which the copies in memory make up everything; None if there is none."""
        if self.sharded is not None:
            found = {copy.step for entries in copies.values() for copy in entries}
            whole = (step for step in found if not self._missing_at(copies, step, plans, self.sharded))
            return max(whole, default=None)
        steps: dict[int, list[Units]] = {}
        for copy in (copy for entries in copies.values() for copy in entries):
            if copy.generation in plans:
                steps.setdefault(copy.step, []).append(self._held(plans[copy.generation], copy.device))
        return max((step for step, have in steps.items() if not self._missing(have)), default=None)

    @staticmethod
    def _missing_at(
        copies: Mapping[str, Sequence[MemoryCopy]], step: int, plans: Mapping[int, Plan], sharded: ShardedState
    ) -> tuple[str, ...]:
        return sharded.missing(sharded.have(_origins_of_copies(copies, step, plans), plans).values())

    def _missing(self, have: Collection[Units]) -> tuple[str, ...]:
        there = {kind.name: set().union(*(units.get(kind.name, ()) for units in have)) for kind in self.spec.kinds}
        return tuple(
            f"{kind.name} {unit}"
            for kind in self.spec.kinds
            for unit in range(kind.num_units)
            if unit not in there[kind.name]
        )

    def moves(
        self,
        holdings: Mapping[str, Plan],
        plan: Plan,
        wrong: Mapping[str, Collection[str]] = MappingProxyType({}),
        partial: Collection[str] = (),
    ) -> Moves:
        """What each device of `plan` lacks, from devices of `plan` that have it.

        Args:
            holdings: per device the plan whose units it has now; a device that is missing has nothing.
            plan: the plan to be taken up.
            wrong: per device units (`kind unit`) whose bits are not to be used: it has them as good as not.
            partial: where optimizer state is sharded, devices that have the new weights of their kept pieces only.
        """
        if self.sharded is not None:
            origins = {
                name: (Origin(name, old.generation, name not in partial),)
                for name, old in holdings.items()
                if plan.place(name) is not None
            }
            return _sharded(self.sharded, origins, {old.generation: old for old in holdings.values()}, plan, wrong)
        have: dict[str, Units] = {}
        for device, old in holdings.items():
            bad = wrong.get(device, ())
            # What is replicated moves to a device that has something only if its own bits are wrong.
            units = {**self._held(old, device), REPLICATED: frozenset({0})}
            have[device] = {
                kind: frozenset(unit for unit in numbers if f"{kind} {unit}" not in bad)
                for kind, numbers in units.items()
            }
        return self._moves(have, plan)

    def moves_from_copies(
        self, copies: Mapping[str, Sequence[MemoryCopy]], step: int, plans: Mapping[int, Plan], plan: Plan
    ) -> Moves:
        """Like `moves`, out of the copies in memory of step `step` that each device has."""
        if self.sharded is not None:
            return _sharded(self.sharded, _origins_of_copies(copies, step, plans), plans, plan, {})
        have: dict[str, Units] = {}
        for device, entries in copies.items():
            found: dict[str, frozenset[int]] = {}
            for copy in entries:
                if copy.step == step and copy.generation in plans:
                    for kind, units in self._held(plans[copy.generation], copy.device).items():
                        found[kind] = found.get(kind, frozenset()) | units
            have[device] = found
        return self._moves(have, plan)

    def _moves(self, have: Mapping[str, Units], plan: Plan) -> Moves:
        sent = dict.fromkeys(plan.devices, 0)
        wanted = self._wanted(have, plan)
        holders = self._holders(have, plan, wanted)
        moves: list[Move] = []
        for target, kind, unit in wanted:
            found = holders[kind, unit]
            if found:
                source = nearest(found, plan, target, sent)
                num_bytes = unit_bytes(self.spec, kind, unit, self.bytes_per_element)
                sent[source] += num_bytes
                moves.append(
                    Move(kind=kind, start=unit, stop=unit + 1, source=source, target=target, num_bytes=num_bytes)
                )
        lost = {f"{kind} {unit}" for (kind, unit), found in holders.items() if not found}
        return Moves(_joined(moves), tuple(sorted(lost)))

    def _wanted(self, have: Mapping[str, Units], plan: Plan) -> list[tuple[str, str, int]]:
        """(device, kind, unit) of all that a device of `plan` does not have."""
        found: list[tuple[str, str, int]] = []
        for target in plan.devices:
            own = have.get(target, {})
            units = self._held(plan, target) | ({REPLICATED: frozenset({0})} if REPLICATED in own else {})
            for kind, numbers in units.items():
                found += ((target, kind, unit) for unit in sorted(numbers - own.get(kind, frozenset())))
        return found

    @staticmethod
    def _holders(
        have: Mapping[str, Units], plan: Plan, wanted: Iterable[tuple[str, str, int]]
    ) -> dict[tuple[str, int], list[str]]:
        """Devices of `plan` that have each unit that is wanted, in the plan's order."""
        found: dict[tuple[str, int], list[str]] = {(kind, unit): [] for _, kind, unit in wanted}
        units: dict[str, set[int]] = {}
        for kind, unit in found:
            units.setdefault(kind, set()).add(unit)
        for device in plan.devices:
            for kind, numbers in units.items():
                for unit in numbers & have.get(device, {}).get(kind, frozenset()):
                    found[kind, unit].append(device)
        return found


def _origins_of_copies(
    copies: Mapping[str, Sequence[MemoryCopy]], step: int, plans: Mapping[int, Plan]
) -> dict[str, tuple[Origin, ...]]:
    return {
        device: tuple(
            Origin(copy.device, copy.generation) for copy in entries if copy.step == step and copy.generation in plans
        )
        for device, entries in copies.items()
    }


def _sharded(
    state: ShardedState,
    origins: Mapping[str, tuple[Origin, ...]],
    plans: Mapping[int, Plan],
    plan: Plan,
    wrong: Mapping[str, Collection[str]],
) -> Moves:
    """Moves of sharded state: who has what goes to the devices, which work out the transfers from it."""
    lost = state.moves(origins, plans, plan, wrong).lost
    named = {origin.generation for found in origins.values() for origin in found}
    told = Origins(of=dict(origins), plans=tuple(plans[generation].to_wire() for generation in sorted(named)))
    return Moves((), tuple(describe(*piece) for piece in lost), told)


def _joined(moves: Iterable[Move]) -> tuple[Move, ...]:
    """The same moves with neighbouring units of one kind, source and target as one."""
    joined: list[Move] = []
    for move in sorted(moves, key=lambda m: (m.target, m.source, m.kind, m.start)):
        last = joined[-1] if joined else None
        if last and (last.kind, last.source, last.target, last.stop) == (
            *(move.kind, move.source, move.target),
            move.start,
        ):
            num_bytes = last.num_bytes + move.num_bytes
            joined[-1] = last.model_copy(update={"stop": move.stop, "num_bytes": num_bytes})
        else:
            joined.append(move)
    return tuple(joined)
