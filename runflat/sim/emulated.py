"""Step times of emulated devices: what the runtime bills them, FLOPs of the largest share over a declared rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from runflat.plan.assignment import assign
from runflat.plan.cost import loads
from runflat.plan.plan import ReplicaPlan
from runflat.plan.strategies import reduced_degree
from runflat.plan.units import ModelSpec
from runflat.sim.times import Line


@dataclass(frozen=True, slots=True)
class TableTimes:
    """Lines by lost devices, measured or declared; a lost count that is missing cannot run."""

    lines: Mapping[int, Line]
    memory_lost: int | None = None
    """Most lost devices with which the model still fits in memory; None for any."""

    def line(self, lost: int, speed: float = 1.0) -> Line | None:
        """See :class:`runflat.sim.times.Times`."""
        line = self.lines.get(lost)
        return Line(line.fixed_s / speed, line.per_sequence_s / speed) if line is not None else None

    def fits(self, lost: int) -> bool:
        """See :class:`runflat.sim.times.Times`."""
        return self.memory_lost is None or lost <= self.memory_lost


def emulated_line(
    spec: ModelSpec, *, tp_full: int, seq_len: int, rate_flops: float, step_s: float = 0.0
) -> Callable[[tuple[int, ...]], Line | None]:
    """The line of a replica of emulated devices by its dead slots; see :func:`emulated_times` for the arguments.

    Which slot is dead matters: where a device gets the odd unit of one kind, it may get that of another, too.
    """

    def line(dead: tuple[int, ...]) -> Line | None:
        if len(dead) >= tp_full:
            return None
        slots = tuple(None if slot in dead else "" for slot in range(tp_full))
        dealt = tuple((kind.name, assign(kind.num_units, tp_full, dead)) for kind in spec.assigned_kinds)
        flops = max(loads(spec, ReplicaPlan(0, slots, dealt, 0), seq_len).values())
        return Line(step_s, flops / rate_flops)

    return line


def emulated_times(
    spec: ModelSpec,
    *,
    tp_full: int,
    seq_len: int,
    rate_flops: float,
    step_s: float = 0.0,
    degrees: tuple[int, ...] = (),
) -> TableTimes:
    """Times of a job whose devices are emulated, with the units of its model dealt out as the planner does.

    Args:
        spec: The model.
        tp_full: Full degree.
        seq_len: Tokens of a sequence.
        rate_flops: Declared FLOPs per second of a device.
        step_s: Seconds of a step that do not depend on its work, as measured in other runs.
        degrees: Reduced degrees that may be used; empty for all.
    """
    lines: dict[int, Line] = {}
    by_slots = emulated_line(spec, tp_full=tp_full, seq_len=seq_len, rate_flops=rate_flops, step_s=step_s)
    for lost in range(tp_full):
        degree = reduced_degree(tp_full, lost, degrees)
        if not degree:
            continue
        line = by_slots(tuple(range(degree, tp_full)))
        assert line is not None
        lines[lost] = line
    return TableTimes(lines)
