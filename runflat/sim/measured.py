"""Recovery costs from the incidents of recorded runs, so that a prediction stands on measured phases."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from runflat.errors import TraceError
from runflat.sim.config import RecoveryConfig

FIELD_OF_PHASE: Mapping[str, str] = {
    "detect": "detect_s",
    **dict.fromkeys(("abort", "barrier", "form", "digest"), "reform_s"),
    "transfer": "transfer_s",
    "restart": "restart_s",
    "join": "join_s",
    "import": "warm_up_s",
    "selftest": "warm_up_s",
    "copy": "warm_up_s",
}
"""Which cost a phase of an incident belongs to; after a restart all but the first belong to that."""

NO_COST = frozenset({"start", "replay"})
"""Phases that a simulation works out by itself."""


def read_incidents(paths: Iterable[Path]) -> list[Mapping[str, float]]:
    """Seconds per phase of each incident and each return in the given ``events.jsonl`` files.

    Raises:
        TraceError: for a file that cannot be read or a row that is no JSON object.
    """
    found: list[Mapping[str, float]] = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise TraceError(f"cannot read {path}: {error.strerror}") from None
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line) if line.strip() else {}
            except json.JSONDecodeError as error:
                raise TraceError(f"{path}, row {number}: not JSON ({error.msg})") from None
            record = row.get("record") if isinstance(row, dict) else None
            if record == "incident":
                found.append(_seconds(row, "phases_s", f"{path}, row {number}"))
            elif record == "change" and row.get("joined"):
                # Before it joins a device warms up while training goes on; only the last part stops it.
                warm_up_s = sum(_seconds(row, "stages_s", f"{path}, row {number}").values())
                found.append({"join": float(row.get("stopped_s", 0.0)), "copy": warm_up_s})
    return found


def _seconds(row: Mapping[str, object], key: str, where: str) -> Mapping[str, float]:
    """Seconds by name under ``key``."""
    values = row.get(key)
    if not isinstance(values, dict) or not all(isinstance(value, int | float) for value in values.values()):
        raise TraceError(f"{where}: needs {key!r}, seconds by name")
    return {str(name): float(value) for name, value in values.items()}


def measured_costs(runs: Sequence[Path], copy_every: int = 0) -> RecoveryConfig:
    """What recorded runs cost: medians of their recovery phases, and of the seconds before the first step.

    Joining and saving cost nothing where the runs do not show it; other phases that they lack have their defaults.
    ``copy_every`` is the runs' ``train.memory_every``.

    Raises:
        TraceError: as `read_incidents` and `measured_recovery` do.
    """
    started_s = []
    for run in runs:
        with (run / "steps.jsonl").open(encoding="utf-8") as lines:
            first = json.loads(next(lines))
        started_s.append(first["time_s"] - first["step_s"])
    base = RecoveryConfig(join_s=0, checkpoint_save_s=0, start_s=statistics.median(started_s), copy_every=copy_every)
    return measured_recovery(read_incidents(run / "events.jsonl" for run in runs), base)


def measured_recovery(incidents: Sequence[Mapping[str, float]], base: RecoveryConfig) -> RecoveryConfig:
    """``base`` with the median of each cost over the incidents that have one of its phases.

    Args:
        incidents: Seconds per phase of each incident.
        base: Costs of what was not measured.

    Raises:
        TraceError: for a phase that belongs to no cost.
    """
    sums: dict[str, list[float]] = {}
    for phases in incidents:
        totals: dict[str, float] = {}
        known = (
            dict.fromkeys(FIELD_OF_PHASE, "restart_s") | {"detect": "detect_s"}
            if "restart" in phases
            else FIELD_OF_PHASE
        )
        for name, seconds in phases.items():
            if name in NO_COST:
                continue
            field = known.get(name)
            if field is None:
                raise TraceError(f"an incident has the unknown phase {name!r}; known: {', '.join(FIELD_OF_PHASE)}")
            totals[field] = totals.get(field, 0.0) + seconds
        for field, seconds in totals.items():
            sums.setdefault(field, []).append(seconds)
    return base.model_copy(update={field: statistics.median(values) for field, values in sums.items()})
