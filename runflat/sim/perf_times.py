"""Step times of the step-time model as the simulator's lines: uneven heads, narrow shards and links included."""

from __future__ import annotations

from functools import cached_property, lru_cache

from runflat.cluster.hardware import load_hardware
from runflat.errors import ConfigError
from runflat.perf.layout import Layout
from runflat.perf.memory import device_memory
from runflat.perf.shape import load_model
from runflat.perf.step_time import Replica, Stage, StepTimeModel
from runflat.plan.strategies import reduced_degree
from runflat.sim.config import SimConfig
from runflat.sim.times import Line, Times

MEMORY_SHARE = 0.94
"""Share of a device's memory that a job may fill; the rest is the context, workspaces and fragments."""


class PerfTimes:
    """Lines of a step-time model. A replica with a hit stage runs all its stages at that degree.

    Args:
        model: Model, layout and hardware.
        degrees: Reduced degrees that may be used; empty for all.
    """

    def __init__(self, model: StepTimeModel, degrees: tuple[int, ...] = ()) -> None:
        self._model, self._degrees = model, degrees
        self._cached = lru_cache(maxsize=None)(self._line)

    def line(self, lost: int, speed: float = 1.0) -> Line | None:
        """See :class:`Times`."""
        degree = self._fastest(reduced_degree(self._model.layout.tp, lost, self._degrees))
        return self._cached(degree, speed) if degree else None

    def fits(self, lost: int) -> bool:
        """Whether parameters, gradients, optimizer state and activations fit in what the survivors have."""
        degree = reduced_degree(self._model.layout.tp, lost, self._degrees)
        if not degree:
            return False
        return device_memory(self._model, degree).total_bytes <= self._model.hardware.memory_bytes * MEMORY_SHARE

    @cached_property
    def _batch(self) -> int:
        return self._model.layout.sequences_per_replica

    def _fastest(self, live: int) -> int:
        """Degree of at most ``live`` that is fastest: an uneven one may be slower than the next lower."""
        if not live:
            return 0
        allowed = [
            degree
            for degree in range(live, max(live * 3 // 4, 1) - 1, -1)
            if not self._degrees or degree in (*self._degrees, self._model.layout.tp)
        ]
        return min(allowed, key=lambda degree: (self._cached(degree, 1.0).at(self._batch), -degree))

    def _line(self, degree: int, speed: float) -> Line:
        """The line through one and two times the healthy share."""
        layout, batch = self._model.layout, self._batch
        stages = (Stage(degree, speed),) * layout.pp
        one, two = (self._model.replica(Replica(stages, batch * times)).total_s for times in (1, 2))
        each = (two - one) / batch
        whole = self._model.step([Replica(stages, batch)]).total_s
        return Line(max(whole - each * batch, 0.0), each)


def job_times(config: SimConfig) -> Times:
    """Step times of a question: of the step-time model if it names a model, else in proportion to work.

    Raises:
        ConfigError: if a model is named without hardware, or the two do not fit each other.
    """
    job = config.job
    if job.model is None:
        return config.proportional_times()
    if not config.cluster.hardware:
        raise ConfigError(f"job.model is {job.model!r}, but cluster.hardware is empty: name the device, such as h100")
    layout = Layout(
        tp=job.tp,
        pp=job.pp,
        dp=job.dp,
        global_batch=job.dp * job.local_batch,
        seq_len=job.seq_len,
        micro_batch=job.micro_batch,
        virtual=job.virtual_stages,
    )
    model = StepTimeModel(load_hardware(config.cluster.hardware), load_model(job.model), layout)
    return PerfTimes(model, job.degrees)
