"""What a run's files say, as figures. Nothing is computed here that the run's own books say otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from runflat.cluster.ledger import GOODPUT_NAMES, Category
from runflat.report.chart import Bar, Bars, Fall, Figure, Line, Lines, Mark, Waterfall, people
from runflat.report.records import ChangeRow, IncidentRow, Step, number
from runflat.report.run_files import RunData

PHASE_COLORS = (
    ("detect", "red"),
    ("abort", "orange"),
    ("barrier", "brown"),
    ("form", "purple"),
    ("transfer", "blue"),
    ("digest", "teal"),
    ("load", "pink"),
    ("restart", "green"),
)
"""Phases of a recovery in their order; what a newer version calls otherwise is drawn grey."""

CATEGORY_COLORS = {
    Category.PRODUCTIVE: "green",
    Category.IMBALANCE: "brown",
    Category.START: "grey",
    Category.DETECT: "red",
    Category.REFORM: "purple",
    Category.TRANSFER: "blue",
    Category.REPLAY: "orange",
    Category.CHECKPOINT: "teal",
    Category.RESTART: "pink",
    Category.PAUSE: "brown",
    Category.IDLE: "grey",
    Category.FAILED: "red",
}
CATEGORY_WORDS = {
    Category.PRODUCTIVE: "productive",
    Category.IMBALANCE: "waiting for a slower replica",
    Category.START: "start",
    Category.DETECT: "detect",
    Category.REFORM: "form again",
    Category.TRANSFER: "move state",
    Category.REPLAY: "work done twice",
    Category.CHECKPOINT: "checkpoint",
    Category.RESTART: "restart",
    Category.PAUSE: "pause",
    Category.IDLE: "idle",
    Category.FAILED: "out of service",
}
MOST_BARS = 24
"""Incidents that are drawn; all are in the table and the CSV."""


def run_figures(data: RunData, whole: RunData | None = None) -> list[Figure]:
    """The figures of one run; `whole` is a run without a failure whose loss is drawn along."""
    found: list[Figure | None] = [
        tokens_figure(data),
        goodput_figure(data),
        incident_figure(data),
        commit_figure(data),
        change_figure(data),
        ledger_figure(data.ledger, data.goodput, "ledger"),
        power_figure(data),
        loss_figure(data, whole),
        difference_figure(data, whole),
    ]
    return [figure for figure in found if figure is not None]


def marks(data: RunData) -> tuple[Mark, ...]:
    """Losses, and changes at a step boundary, over time."""
    found = [
        Mark(
            x=row.started_s,
            label=f"incident {row.number}: {' and '.join(row.devices) or 'links'}, {row.cause}",
            sign="▼",
            color="red",
        )
        for row in data.incidents
    ]
    for change in data.changes:
        label = f"{_who(change)} at step {change.step}"
        found.append(Mark(x=change.time_s, label=label, sign="▲", color="green"))
    return tuple(sorted(found, key=lambda mark: mark.x))


def stair(steps: Sequence[Step], values: Sequence[float | None]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Times and rates as a stair: each holds from the step's begin to its commit, and is 0 while no step ran."""
    times: list[float] = []
    rates: list[float] = []
    for step, value in zip(steps, values, strict=True):
        if value is None or not step.step_s:
            continue
        begin = step.time_s - step.step_s
        if times and begin > times[-1] + 0.02 * step.step_s:
            times.append(times[-1])
            rates.append(0.0)
            times.append(begin)
            rates.append(0.0)
        begin = max(begin, times[-1]) if times else begin
        times += [begin, step.time_s]
        rates += [value, value]
    return tuple(times), tuple(rates)


def tokens_figure(data: RunData) -> Figure | None:
    """Tokens per second over time; falls to 0 where nobody trained."""
    if not data.steps:
        return None
    times, rates = stair(data.steps, [step.tokens_per_s for step in data.steps])
    if not times:
        return None
    return Lines(
        key="tokens",
        title="Tokens per second",
        says="Speed of each committed step; the line falls to zero where training stood. ▼ a loss, ▲ a change of plan.",
        x_label="seconds since the start",
        y_label="tokens per second",
        lines=(Line(label="tokens/s", x=times, y=rates, color="blue"),),
        marks=marks(data),
    )


def goodput_figure(data: RunData) -> Figure | None:
    """Goodput so far, over time, by the run's own formula; None where the run gives no goodput."""
    goodput, healthy_s = data.goodput, number(data.books, "healthy_step_s")
    if goodput is None or healthy_s is None or not data.steps or not data.global_batch:
        return None
    start = data.starts_s[-1]
    batch = data.global_batch
    done = 0.0
    x: list[float] = []
    y: list[float | None] = []
    for step in data.steps:
        if step.time_s > start:
            done += step.num_samples / batch
            x.append(step.time_s)
            y.append(done * healthy_s / (step.time_s - start))
    end_s = number(data.summary, "wall_s")
    if end_s is not None:
        # The last point is the books' own number, over the whole time of the session.
        x.append(start + end_s)
        y.append(goodput)
    return _goodput_lines(data, tuple(x), tuple(y))


def _goodput_lines(data: RunData, x: tuple[float, ...], y: tuple[float | None, ...]) -> Figure:
    return Lines(
        key="goodput",
        title="Goodput so far",
        says="Tokens committed, over those that all devices would have committed without failure in the same time; "
        "the start counts.",
        x_label="seconds since the start",
        y_label="goodput",
        lines=(Line(label="goodput so far", x=x, y=y, color="green", has_dots=len(x) < 3),),
        marks=marks(data),
        unit="%",
        to_one=True,
    )


def _longest(rows: Sequence[IncidentRow]) -> list[IncidentRow]:
    """The incidents in order; where there are too many to draw, the longest first."""
    if len(rows) <= MOST_BARS:
        return list(rows)
    return sorted(rows, key=lambda row: -row.stopped_s)


def _incident_label(row: IncidentRow) -> str:
    step = f" at step {row.step}" if row.step is not None else ""
    return f"{row.number}: {' and '.join(row.devices) or 'links'}{step}"


def incident_figure(data: RunData) -> Figure | None:
    """How long each incident stopped training, phase by phase."""
    if not data.incidents:
        return None
    rows = _longest(data.incidents)
    known = {name for name, _ in PHASE_COLORS}
    other = {name for row in rows for name, _ in row.phases_s} - known
    return Bars(
        key="incidents",
        title="What each incident cost",
        says="Seconds for which nobody trained, phase by phase, and the bytes that moved.",
        x_label="seconds",
        unit="s",
        bars=tuple(
            Bar(
                label=_incident_label(row),
                parts=row.phases_s,
                note=f"{people(row.stopped_s, 's')}, {people(row.bytes_moved, 'B')} moved",
            )
            for row in rows
        ),
        colors=(*PHASE_COLORS, *((name, "grey") for name in sorted(other))),
        num_left_out=max(len(rows) - MOST_BARS, 0),
    )


def commit_figure(data: RunData) -> Figure | None:
    """From the fault to the first step that was committed after it."""
    rows = [row for row in _longest(data.incidents) if row.first_commit_s is not None]
    if not rows:
        return None
    return Bars(
        key="first-commit",
        title="From the fault to the next commit",
        says="How long training stood, and then the step that was committed first.",
        x_label="seconds since the fault",
        unit="s",
        bars=tuple(
            Bar(
                label=_incident_label(row),
                parts=(("stood", row.stopped_s), ("step until its commit", row.first_commit_s or 0.0)),
                note=people(row.stopped_s + (row.first_commit_s or 0.0), "s"),
            )
            for row in rows
        ),
        colors=(("stood", "red"), ("step until its commit", "green")),
        num_left_out=max(len(rows) - MOST_BARS, 0),
    )


def change_figure(data: RunData) -> Figure | None:
    """Joins and leaves: what went on under training, and how long training stood."""
    if not data.changes:
        return None
    rows = sorted(data.changes, key=lambda row: -row.stopped_s) if len(data.changes) > MOST_BARS else data.changes
    return Bars(
        key="changes",
        title="Joins and leaves",
        says="Seconds for which training stood; the preparation before it went on under training.",
        x_label="seconds",
        unit="s",
        bars=tuple(
            Bar(
                label=f"{_who(row)} at step {row.step}",
                parts=(("stood", row.stopped_s),),
                note=f"{people(row.stopped_s, 's')}; {_stages(row.stages_s)}; {people(row.bytes_moved, 'B')} moved",
            )
            for row in rows
        ),
        colors=(("stood", "green"),),
        num_left_out=max(len(rows) - MOST_BARS, 0),
    )


def _who(row: ChangeRow) -> str:
    """Who did what at a change."""
    if row.joined:
        return f"{' and '.join(row.joined)} joined"
    return f"{' and '.join(row.left)} left" if row.left else "the batch was shared anew"


def _stages(stages_s: Sequence[tuple[str, float]]) -> str:
    shown = [f"{name} {seconds:.2f} s" for name, seconds in stages_s if seconds >= 0.005]
    return ", ".join(shown)


def ledger_figure(device_s: Sequence[tuple[str, float]], goodput: float | None, key: str) -> Figure | None:
    """Where the time of all devices went: from 100 % down to what was productive, and the goodput beside it."""
    total = sum(seconds for _, seconds in device_s)
    if not total:
        return None
    falls = [Fall(label="all device time", share=1.0, color="grey", kind="whole")]
    known = {category.value: category for category in Category}
    for name, seconds in device_s:
        category = known.get(name)
        if category is Category.PRODUCTIVE or seconds / total < 5e-5:
            continue
        words, color = (CATEGORY_WORDS[category], CATEGORY_COLORS[category]) if category else (name, "grey")
        note = GOODPUT_NAMES[category] if category else ""
        falls.append(Fall(label=words, share=seconds / total, color=color, kind="loss", note=note))
    productive = dict(device_s).get(Category.PRODUCTIVE.value, 0.0) / total
    falls.append(Fall(label="productive", share=productive, color="green", kind="rest"))
    if goodput is not None:
        falls.append(Fall(label="goodput", share=goodput, color="blue", kind="rest"))
    says = "Each device-second has one category; the parts add up to the whole."
    if goodput is not None:
        says += (
            " Productive time is not goodput: devices of a smaller replica, or sharing a larger one's work, do less."
        )
    return Waterfall(key=key, title="Where the time went", says=says, falls=tuple(falls))


def power_figure(data: RunData) -> Figure | None:
    """Draw and limits of all devices against the budget."""
    rows = [(step.time_s, step.power) for step in data.steps if step.power is not None]
    if not rows:
        return None
    x = tuple(time_s for time_s, _ in rows)
    kinds = (("draw", "blue", False), ("limits", "orange", False), ("budget", "red", True))
    values = {
        "draw": tuple(power.draw_w for _, power in rows),
        "limits": tuple(power.limit_w for _, power in rows),
        "budget": tuple(power.budget_w for _, power in rows),
    }
    lines = tuple(
        Line(label=name, x=x, y=values[name], color=color, is_step=True, is_dashed=dashed)
        for name, color, dashed in kinds
        if any(value is not None for value in values[name])
    )
    return Lines(
        key="power",
        title="Power",
        says="Draw of all devices and the sum of their limits, against the budget.",
        x_label="seconds since the start",
        y_label="watts",
        lines=lines,
        marks=marks(data),
        unit="W",
    )


def loss_figure(data: RunData, whole: RunData | None) -> Figure | None:
    """Loss by step, with the failure-free run's beneath it where given."""
    lines = []
    if whole is not None and whole.steps:
        lines.append(_loss_line(whole, "without a failure", "orange", dashed=False))
    if data.steps:
        lines.append(_loss_line(data, "this run" if lines else "loss", "blue", dashed=bool(lines)))
    if not lines or not any(value is not None for line in lines for value in line.y):
        return None
    found = [
        Mark(x=row.step, label=_incident_label(row), sign="▼", color="red")
        for row in data.incidents
        if row.step is not None
    ]
    found += [Mark(x=row.step, label=f"change at step {row.step}", sign="▲", color="green") for row in data.changes]
    return Lines(
        key="loss",
        title="Loss",
        says="Mean loss of each step's batch." + (" The dashed line lies on the other." if len(lines) > 1 else ""),
        x_label="step",
        y_label="nats per token",
        lines=tuple(lines),
        marks=tuple(sorted(found, key=lambda mark: mark.x)),
        from_zero=False,
    )


def _loss_line(data: RunData, label: str, color: str, *, dashed: bool) -> Line:
    x = tuple(float(step.step) for step in data.steps)
    return Line(label=label, x=x, y=tuple(step.loss for step in data.steps), color=color, is_dashed=dashed)


def difference_figure(data: RunData, whole: RunData | None) -> Figure | None:
    """Relative difference of the two losses, step by step; equal ones cannot be drawn on this axis."""
    if whole is None:
        return None
    other = {step.step: step.loss for step in whole.steps}
    x, y = [], []
    for step in data.steps:
        wanted = other.get(step.step)
        if step.loss is not None and wanted:
            x.append(float(step.step))
            y.append(abs(step.loss - wanted) / abs(wanted))
    if not any(y):
        return None
    return Lines(
        key="loss-difference",
        title="Relative difference of the losses",
        says="Between this run and the one without a failure; steps with equal losses have no point.",
        x_label="step",
        y_label="relative difference",
        lines=(Line(label="difference", x=tuple(x), y=tuple(y), color="purple", has_dots=len(x) < 200),),
        y_log=True,
        from_zero=False,
    )
