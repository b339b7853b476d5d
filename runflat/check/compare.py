"""What each strategy made of the same failures: the numbers of a run, from its files, to stand side by side.

Before, during and after are divided by what happened in the run itself: *before* ends with its first fault, *during*
with the first commit after the last loss, return or change of plan, *after* with its end.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SPANS = ("before", "during", "after")


@dataclass(frozen=True)
class StrategyResult:
    """One run. Seconds and tokens/s are those of its clock; what a run does not have is None."""

    strategies: str
    """The chain, as in --on-failure."""
    run: str
    """Its folder, relative to that of the comparison."""
    words: str | None
    """Why it did not reach its last step, if so."""
    goodput: float | None
    tokens_per_s: dict[str, float | None]
    """Before, during and after the failures."""
    recovery_s: float | None
    """Median over its incidents, from the fault to the next committed step."""
    longest_recovery_s: float | None
    work_repeated: float
    """Device-seconds of work that was done a second time."""
    devices_idle: float
    """Healthy devices without work (spares among them), mean over the run."""
    wall_s: float | None
    num_incidents: int

    def to_json(self) -> dict[str, Any]:
        """All of it by name."""
        return asdict(self)


def result_of(strategies: str, run: Path, words: str | None, seq_len: int) -> StrategyResult:
    """The numbers of the run in `run`; of one that ended early those that its books give.

    Args:
        strategies: the chain that it ran under.
        run: its folder.
        words: why it ended early, if it did.
        seq_len: tokens per sequence.
    """
    steps, events = _rows(run / "steps.jsonl"), _rows(run / "events.jsonl")
    path = run / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    incidents = [row for row in events if row.get("record") == "incident"]
    recoveries = [seconds for row in incidents if (seconds := _recovery_s(row, steps)) is not None]
    device_s, wall_s = summary.get("device_s", {}), summary.get("wall_s")
    return StrategyResult(
        strategies=strategies,
        run=run.name,
        words=words,
        goodput=summary.get("goodput"),
        tokens_per_s=spans(steps, events, seq_len),
        recovery_s=statistics.median(recoveries) if recoveries else None,
        longest_recovery_s=max(recoveries, default=None),
        work_repeated=device_s.get("replay", 0.0),
        devices_idle=device_s.get("idle", 0.0) / wall_s if wall_s else 0.0,
        wall_s=wall_s,
        num_incidents=len(incidents),
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _recovery_s(incident: dict[str, Any], steps: Sequence[dict[str, Any]]) -> float | None:
    """From the fault to the first commit under its plan or a later one."""
    began, generation = incident["started_s"], incident["generation"] or 0
    after = [row["time_s"] for row in steps if row["time_s"] > began and row["generation"] >= generation]
    return min(after) - began if after else None


def spans(steps: Sequence[dict[str, Any]], events: Iterable[dict[str, Any]], seq_len: int) -> dict[str, float | None]:
    """Committed tokens per second before, during and after the failures; None for a span in which no step ends."""
    nothing: dict[str, float | None] = dict.fromkeys(SPANS)
    if not steps:
        return nothing
    rows = [row for row in events if row.get("record") in ("incident", "change")]
    begin = steps[0]["time_s"] - (steps[0]["step_s"] or 0.0)
    end = steps[-1]["time_s"]
    faults = [row["started_s"] for row in rows if row["record"] == "incident"]
    first = min(faults, default=end)
    over = [row["time_s"] for row in rows if row["record"] == "change"]
    for row in rows:
        if row["record"] == "incident" and (seconds := _recovery_s(row, steps)) is not None:
            over.append(row["started_s"] + seconds)
    last = max(first, *over) if over else end
    edges = {"before": (begin, first), "during": (first, last), "after": (last, end)}
    return nothing | {name: _rate(steps, start, stop, seq_len) for name, (start, stop) in edges.items()}


def _rate(steps: Sequence[dict[str, Any]], start: float, stop: float, seq_len: int) -> float | None:
    """Tokens of the steps that end in (start, stop], over the time up to the last of them (all of it while hurt)."""
    inside = [row for row in steps if start < row["time_s"] <= stop]
    if not inside:
        return None
    tokens = sum(replica["num_samples"] for row in inside for replica in row["replicas"]) * seq_len
    return float(tokens / (inside[-1]["time_s"] - start))


def table(results: Sequence[StrategyResult]) -> str:
    """One row a strategy, for people."""
    head = ["strategies", "goodput", *(f"tokens/s {span}" for span in SPANS), "recovery", "longest"]
    rows = [[*head, "repeated", "idle devices"]]
    for result in results:
        rates = [_number(result.tokens_per_s[span], ",.0f") for span in SPANS]
        waits = [_number(value, ".2f", " s") for value in (result.recovery_s, result.longest_recovery_s)]
        rest = [f"{result.work_repeated:.1f} device-s", f"{result.devices_idle:.2f}"]
        rows.append([result.strategies, _number(result.goodput, ".3f"), *rates, *waits, *rest])
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    notes = [f"{result.strategies}: {result.words}" for result in results if result.words]
    return "\n".join([*lines, *notes])


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
