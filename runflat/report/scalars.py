"""A run's numbers as TensorBoard wants them: a tag, a step, a value. `step_values` is the place for new ones.

Tags of goodput and badput are those that ml-goodput-measurement 0.2.3 writes, in percent as there; below each badput
tag stand our categories.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runflat.cluster.ledger import GOODPUT_NAMES, Category
from runflat.report.records import ChangeRow, IncidentRow, PlanView, Step
from runflat.report.run_files import RunData

MANY_REPLICAS = 64
"""With more replicas than that, only those below full degree have a degree in each step."""

Value = tuple[str, float | None]
"""(tag, value); what was not measured is None, and is not written."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """One point of a curve."""

    tag: str
    step: int
    value: float


@dataclass(frozen=True, slots=True)
class Told:
    """How far a run has been told of."""

    num_steps: int = 0
    """Records of steps: one that was done again has another, and is told again. Their times are no mark, as they shift
    when a resumed run begins its new session."""
    num_incidents: int = 0
    num_changes: int = 0


def new_scalars(data: RunData, told: Told) -> tuple[list[Scalar], Told]:
    """What has come since `told`, and how far that goes."""
    new = data.steps[told.num_steps :]
    found = []
    for step in new:
        values = [*step_values(step), *degree_values(data.plans.get(step.generation))]
        found += _scalars(step.step, values)
    if new:
        found += _scalars(new[-1].step, goodput_values(data))
    for incident in data.incidents[told.num_incidents :]:
        found += _scalars(incident.step or 0, incident_values(incident))
    for change in data.changes[told.num_changes :]:
        found += _scalars(change.step, change_values(change))
    return found, Told(len(data.steps), len(data.incidents), len(data.changes))


def _scalars(step: int, values: Iterator[Value] | list[Value]) -> list[Scalar]:
    return [Scalar(tag, step, float(value)) for tag, value in values if value is not None]


def step_values(step: Step) -> Iterator[Value]:
    """The curves with a point for each step."""
    yield "train/loss", step.loss
    yield "train/tokens_per_s", step.tokens_per_s
    yield "train/step_s", step.step_s
    yield "train/tokens_per_s_per_device", step.tokens_per_s_per_device
    yield "train/mfu", step.mfu
    yield "memory/peak_bytes", step.peak_bytes
    for part, seconds in step.parts_s:
        yield f"parts/{part}_s", seconds
    if step.power is not None:
        yield "power/draw_w", step.power.draw_w
        yield "power/limit_w", step.power.limit_w
        yield "power/budget_w", step.power.budget_w
        for device, limit_w, draw_w in step.power.devices:
            yield f"power/device_{device.replace(':', '_')}/limit_w", limit_w
            yield f"power/device_{device.replace(':', '_')}/draw_w", draw_w


def degree_values(plan: PlanView | None) -> Iterator[Value]:
    """The degree of each replica."""
    for replica in plan.replicas if plan else ():
        if plan and (len(plan.replicas) <= MANY_REPLICAS or replica.degree < plan.tp_full):
            yield f"degree/replica_{replica.replica}", float(replica.degree)


def goodput_values(data: RunData) -> Iterator[Value]:
    """Goodput so far, and all other time of the devices by category, in percent."""
    yield "goodput/goodput", None if data.goodput is None else 100 * data.goodput
    total_s = sum(seconds for _, seconds in data.ledger)
    known = {category.value: GOODPUT_NAMES[category] for category in Category}
    for name, seconds in data.ledger:
        if total_s and name != Category.PRODUCTIVE.value:
            kind = known.get(name, "OTHER").lower().replace(" + ", "_and_")
            yield f"badput/{kind}/{name}", 100 * seconds / total_s


def incident_values(row: IncidentRow) -> Iterator[Value]:
    """What an incident cost, at its step."""
    yield "recovery/stopped_s", row.stopped_s
    yield "recovery/first_commit_s", None if row.first_commit_s is None else row.stopped_s + row.first_commit_s
    yield "recovery/moved_bytes", float(row.bytes_moved)


def change_values(row: ChangeRow) -> Iterator[Value]:
    """What joining and leaving cost, at its step."""
    yield "change/stopped_s", row.stopped_s
    yield "change/moved_bytes", float(row.bytes_moved)
