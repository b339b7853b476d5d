"""The same question with one number changed: failure rate, domain size, degree, spares, headroom, repair time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from runflat.errors import ConfigError
from runflat.sim.config import SimConfig, checked
from runflat.sim.experiment import CandidateResult, run_all
from runflat.sim.tables import columns, percent

Axis = Literal["rate", "repair", "spare-domains", "spare-devices", "domain-size", "tp", "headroom", "checkpoint"]


@dataclass(frozen=True, slots=True)
class SweepRow:
    """Results at one value of the changed number."""

    value: float
    results: tuple[CandidateResult, ...]


def varied(config: SimConfig, axis: Axis, value: float) -> SimConfig:
    """The question with one number changed.

    Args:
        config: The question.
        axis: What to change: ``rate`` and ``repair`` multiply, ``headroom`` is maximum over nominal power,
            ``checkpoint`` the interval in seconds; the others are the number itself. With ``tp`` and ``domain-size``
            the number of devices stays as it is, as nearly as whole replicas allow.
        value: The number.

    Raises:
        ConfigError: if the number does not fit the question.
    """
    changes: Mapping[str, Callable[[SimConfig, float], SimConfig]] = {
        "rate": _rate,
        "repair": _repair,
        "spare-domains": lambda c, v: _cluster(c, spare_domains=_whole(v)),
        "spare-devices": lambda c, v: _cluster(c, spare_devices=_whole(v)),
        "domain-size": lambda c, v: _degree(_cluster(c, domain_size=_whole(v)), min(c.job.tp, _whole(v))),
        "tp": lambda c, v: _degree(c, _whole(v)),
        "headroom": _headroom,
        "checkpoint": lambda c, v: c.model_copy(
            update={"recovery": c.recovery.model_copy(update={"checkpoint_interval_s": v})}
        ),
    }
    if not math.isfinite(value):
        raise ConfigError(f"{axis} cannot be {value}; give finite numbers")
    return checked(changes[axis](config, value), source=f"{axis} {value:g}")


def _whole(value: float) -> int:
    if value != int(value) or value < 0:
        raise ConfigError(f"{value} is not a whole number of at least 0, which this axis needs")
    return int(value)


def _cluster(config: SimConfig, **update: int) -> SimConfig:
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=update)})


def _rate(config: SimConfig, factor: float) -> SimConfig:
    if config.failures is None:
        raise ConfigError("a recorded trace has one rate; to sweep it give failures by chance instead of 'trace'")
    changed = config.failures.model_copy(update={"rate_scale": config.failures.rate_scale * factor})
    return config.model_copy(update={"failures": changed})


def _repair(config: SimConfig, factor: float) -> SimConfig:
    if config.failures is None:
        raise ConfigError("a recorded trace has its repair times; to sweep them give failures by chance instead")
    components = []
    for component in config.failures.components:
        repair = component.repair
        update = {"hours": repair.hours * factor, "values_h": tuple(value * factor for value in repair.values_h)}
        components.append(component.model_copy(update={"repair": repair.model_copy(update=update)}))
    changed = config.failures.model_copy(update={"components": tuple(components)})
    return config.model_copy(update={"failures": changed})


def _degree(config: SimConfig, tp: int) -> SimConfig:
    if not 1 <= tp <= config.cluster.domain_size:
        raise ConfigError(f"tp {tp} must be 1 to the domain's {config.cluster.domain_size} devices")
    job = config.job
    devices = job.tp * job.pp * job.dp
    dp = max(devices // (tp * job.pp), 1)
    local = max(round(job.local_batch * job.dp / dp), 1)
    changed = job.model_copy(update={"tp": tp, "dp": dp, "local_batch": local, "degrees": ()})
    return config.model_copy(update={"job": changed})


def _headroom(config: SimConfig, factor: float) -> SimConfig:
    if config.power is None or factor < 1:
        raise ConfigError(f"headroom {factor} needs a power configuration, and a factor of at least 1")
    changed = config.power.model_copy(update={"max_w": config.power.nominal_w * factor})
    return config.model_copy(update={"power": changed})


def sweep(config: SimConfig, axis: Axis, values: Sequence[float]) -> list[SweepRow]:
    """The results at each value."""
    return [SweepRow(value, tuple(run_all(varied(config, axis, value)))) for value in values]


def sweep_table(axis: Axis, rows: Sequence[SweepRow]) -> str:
    """Goodput of each candidate in per cent, one row per value, with the standard error of the mean."""
    head = [axis, *(result.candidate for result in rows[0].results)]
    body = [
        [f"{row.value:g}", *(f"{percent(r.goodput.mean)} +-{percent(r.goodput.error)}" for r in row.results)]
        for row in rows
    ]
    return columns([head, *body])


def sweep_json(config: SimConfig, axis: Axis, rows: Sequence[SweepRow]) -> dict[str, object]:
    """The sweep as a result file, with the lines of its figure."""
    lines = [
        {
            "label": rows[0].results[index].candidate,
            "x": [row.value for row in rows],
            "y": [row.results[index].goodput.mean for row in rows],
            "low": [row.results[index].goodput.p5 for row in rows],
            "high": [row.results[index].goodput.p95 for row in rows],
            "style": "o-",
        }
        for index in range(len(rows[0].results))
    ]
    positive = [row.value for row in rows if row.value > 0]
    log = len(positive) == len(rows) > 2 and math.log10(max(positive) / min(positive)) > 1
    return {
        "name": config.name,
        "axis": axis,
        "config": config.model_dump(mode="json"),
        "figure": {
            "title": f"{config.name}: goodput against {axis}, mean and 5..95 %",
            "x_label": axis,
            "y_label": "goodput",
            "x_log": log,
            "lines": lines,
        },
    }
