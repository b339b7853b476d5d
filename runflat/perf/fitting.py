"""The fit of `Efficiencies` to published steps, its cross-validation, and the model that it is compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from runflat.perf.efficiency import FITTED, Efficiencies
from runflat.perf.published import Row, predict

PRIORS: Mapping[str, tuple[float, float]] = {
    "matmul": (0.90, 0.10),
    "memory": (0.75, 0.10),
    "link": (0.75, 0.10),
    "network": (0.60, 0.20),
    "tp_hidden": (0.50, 0.20),
}
"""Expected value and standard deviation before any row is seen: library products close to the sustained rate, a copy
at three quarters of the memory bandwidth, NCCL's bus bandwidth on NVLink, ring reductions between nodes, half of a
collective hidden. A parameter that the rows at hand say nothing of stays here instead of running to an extreme."""

ROW_SPREAD = 0.05
"""Standard deviation of the logarithm of a row's error; larger errors count by their size, not its square (soft L1)."""


def fit(rows: Sequence[Row]) -> Efficiencies:
    """The most likely efficiencies given `rows` and `PRIORS`."""
    mean = np.array([PRIORS[name][0] for name in FITTED])
    spread = np.array([PRIORS[name][1] for name in FITTED])

    def residuals(values: np.ndarray) -> list[float]:
        efficiencies = Efficiencies(*map(float, values))
        errors = [math.log(predict(row, efficiencies)[0] / row.seconds) / ROW_SPREAD for row in rows]
        return [*errors, *((values - mean) / spread)]

    found = least_squares(
        residuals, mean, bounds=(0.05, 1.0), diff_step=1e-3, loss="soft_l1", max_nfev=60, xtol=1e-6, ftol=1e-6
    )
    return Efficiencies(*(round(float(value), 4) for value in found.x))


def constant_utilisation(rows: Sequence[Row]) -> float:
    """The one fraction of the peak that fits `rows` best (geometric mean), recomputed FLOPs counted."""
    return math.exp(sum(math.log(_constant_s(row, 1.0) / row.seconds) for row in rows) / len(rows))


def _constant_s(row: Row, utilisation: float) -> float:
    layout = row.layout
    flops = row.shape.model_flops(layout.global_batch * layout.seq_len, layout.seq_len)
    if layout.recompute == "full":
        flops *= 4 / 3
    return flops / (row.hardware.peak_flops_per_s(layout.precision) * layout.num_devices * utilisation)


@dataclass(frozen=True)
class Check:
    """One row: predicted seconds with all rows in the fit, and with the row's publication left out.

    The same for constant utilisation; and the micro-batch and chunks that the rules gave the row.
    """

    row: Row
    seconds: float
    seconds_left_out: float
    constant_s: float
    constant_left_out_s: float
    micro_batch: int
    virtual: int

    def error(self, seconds: float) -> float:
        """Relative error of a prediction, signed."""
        return seconds / self.row.seconds - 1


def cross_validate(rows: Sequence[Row], efficiencies: Efficiencies) -> list[Check]:
    """Checks of all rows: `efficiencies` in sample, and a fit without each publication for its own rows."""
    constant = constant_utilisation(rows)
    checks = []
    for publication in dict.fromkeys(row.publication for row in rows):
        others = [row for row in rows if row.publication != publication]
        left_out, constant_left_out = fit(others), constant_utilisation(others)
        for row in (row for row in rows if row.publication == publication):
            seconds, layout = predict(row, efficiencies)
            checks.append(
                Check(
                    row=row,
                    seconds=seconds,
                    seconds_left_out=predict(row, left_out)[0],
                    constant_s=_constant_s(row, constant),
                    constant_left_out_s=_constant_s(row, constant_left_out),
                    micro_batch=layout.micro_batch,
                    virtual=layout.virtual,
                )
            )
    return checks


@dataclass(frozen=True)
class Errors:
    """Mean and largest absolute relative error of one kind of prediction."""

    mean: float
    largest: float


def errors(checks: Sequence[Check], attribute: str) -> Errors:
    """Errors of the prediction called `attribute` of `Check` over `checks`."""
    values = [abs(check.error(getattr(check, attribute))) for check in checks]
    return Errors(sum(values) / len(values), max(values))
