"""What must hold after every decision, whatever has happened: the world of the fakes refuses anything else."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from runflat.elastic.actions import Action, Happening, Planned, Tick, Took
from runflat.elastic.orders import Move
from runflat.elastic.state import Stage, State
from runflat.elastic.watch import deadlines
from runflat.plan.batch import BatchRule
from runflat.plan.plan import Plan
from runflat.plan.units import Kind

Units = frozenset[tuple[str, int]]
"""(kind, unit)."""


class Rules:
    """Watches one run from decision to decision; `check` raises AssertionError where a rule is broken."""

    def __init__(self) -> None:
        """Nothing has been decided yet."""
        self._plans: dict[int, Plan] = {}

    def check(self, before: State, happening: Happening, after: State, actions: Iterable[Action], now: float) -> None:
        """All rules, for the decision that led from `before` to `after`."""
        self._waits(after, happening, now)
        plans = [action for action in actions if isinstance(action, Planned)]
        back = any(planned.resume.back for planned in plans)
        assert after.generation >= before.generation, "a generation came back"
        assert after.committed >= before.committed or back, f"committed steps fell from {before.committed}"
        for planned in plans:
            assert planned.plan.generation not in self._plans, (
                f"generation {planned.plan.generation} was given out twice"
            )
            self._shares(after, planned.plan)
            if not planned.resume.back:
                held = {name: status.holds for name, status in after.statuses.items() if status.holds >= 0}
                covers(after, held, planned.resume.transfers, planned.plan)
        for action in actions:
            if isinstance(action, Took) and before.growth is not None and before.plan is not None:
                self._shares(after, action.plan)
                held = dict.fromkeys(before.members(), before.plan.generation)
                covers(before, held, before.growth.moves, action.plan)
            if isinstance(action, Planned | Took):
                known = self._plans.setdefault(action.plan.generation, action.plan)
                assert known == action.plan, f"generation {known.generation} is two plans"

    @staticmethod
    def _waits(state: State, happening: Happening, now: float) -> None:
        """Something is waited for, with a name, and what was due has been answered."""
        if state.stage is Stage.FINISHED:
            return
        due = deadlines(state)
        assert due, f"nothing is waited for in {state.stage}"
        assert all(deadline.name for deadline in due)
        if isinstance(happening, Tick):
            assert due[0].at > now, f"{due[0].name} was due and has not been answered"

    @staticmethod
    def _shares(state: State, plan: Plan) -> None:
        """Each sequence of the batch belongs to one replica."""
        if state.planner.job.rule is BatchRule.CONSTANT:
            assert plan.num_sequences == state.planner.job.num_sequences, "sequences are missing, or there twice"
        assert all(replica.num_sequences > 0 for replica in plan.replicas)


def covers(state: State, holds: Mapping[str, int], moves: Collection[Move], plan: Plan) -> None:
    """Every device of `plan` has all its units already, or gets them from one that has them and goes on."""
    kinds = state.planner.spec.kinds
    have = {name: units(state.plans[number], kinds, name) for name, number in holds.items()}
    members = set(plan.devices)
    for move in moves:
        assert move.source in members, f"{move.source} is to send {move.kind}, and is not there"
        sent = frozenset((move.kind, unit) for unit in range(move.start, move.stop))
        real = frozenset(unit for unit in sent if unit[0] in {kind.name for kind in kinds})
        assert real <= have.get(move.source, frozenset()), f"{move.source} is to send what it does not hold"
    for name in members:
        comes = {(m.kind, unit) for m in moves if m.target == name for unit in range(m.start, m.stop)}
        short = units(plan, kinds, name) - have.get(name, frozenset()) - comes
        assert not short, f"{name} would train without {sorted(short)[:3]}"


def units(plan: Plan, kinds: tuple[Kind, ...], device: str) -> Units:
    """What `device` holds under `plan`."""
    return frozenset((kind, unit) for kind, numbers in plan.held(kinds, device).items() for unit in numbers)
