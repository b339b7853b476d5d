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
"""Which cost a phase of an incident belongs to."""


def read_incidents(paths: Iterable[Path]) -> list[Mapping[str, float]]:
    """Seconds per phase of each incident in the given ``events.jsonl`` files.

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
            if isinstance(row, dict) and row.get("record") == "incident":
                phases = row.get("phases_s")
                if not isinstance(phases, dict):
                    raise TraceError(f"{path}, row {number}: an incident needs 'phases_s', seconds by phase")
                found.append({str(name): float(seconds) for name, seconds in phases.items()})
    return found


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
        for name, seconds in phases.items():
            field = FIELD_OF_PHASE.get(name)
            if field is None:
                raise TraceError(f"an incident has the unknown phase {name!r}; known: {', '.join(FIELD_OF_PHASE)}")
            totals[field] = totals.get(field, 0.0) + seconds
        for field, seconds in totals.items():
            sums.setdefault(field, []).append(seconds)
    return base.model_copy(update={field: statistics.median(values) for field, values in sums.items()})
