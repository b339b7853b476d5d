"""What a run writes beside its steps: events.jsonl, one file per plan, devices.json; and lines that people can read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runflat.cluster.events import event_to_json
from runflat.cluster.ledger import GOODPUT_NAMES, Category, Incident, Ledger, append_json_line
from runflat.elastic.actions import Action, Closed, Grew, Note, Planned, Took
from runflat.elastic.power_spent import PowerBooks
from runflat.elastic.requests import write_whole
from runflat.elastic.state import Stage, State


class Journal:
    """Writes the records of one run; times are seconds since its start."""

    def __init__(self, run: Path):
        """Begin to write in `run`."""
        self._run = run
        self._events = run / "events.jsonl"
        self._spent: dict[int, dict[str, float]] = {}
        """What was recorded of the power that incidents took."""
        (run / "plans").mkdir(exist_ok=True)

    def write(self, action: Action, now: float) -> None:
        """Record what an action stands for, if it is worth a record."""
        if isinstance(action, Note):
            append_json_line(self._events, event_to_json(action.event))
        elif isinstance(action, Planned):
            plan_path(self._run, action.plan.generation).write_text(action.plan.to_json() + "\n")
            row = {"record": "plan", "generation": action.plan.generation, "time_s": now, "reason": action.reason}
            resume = action.resume
            row |= {"action": resume.action, "committed": resume.committed, "num_transfers": len(resume.transfers)}
            append_json_line(self._events, row)
        elif isinstance(action, Took):
            generation = action.plan.generation
            plan_path(self._run, generation).write_text(action.plan.to_json() + "\n")
            row = {"record": "took", "generation": generation, "time_s": now, "committed": action.committed}
            append_json_line(self._events, row)
        elif isinstance(action, Closed):
            extra = {"devices": list(action.devices), "step": action.step, "action": action.action}
            append_json_line(
                self._events, {**action.incident.to_json(), **extra, "first_commit_s": action.first_commit_s}
            )
        elif isinstance(action, Grew):
            append_json_line(self._events, {"record": "change", "time_s": now, **change_to_json(action)})

    def ledger(self, ledger: Ledger, now: float, power: PowerBooks | None = None) -> None:
        """Record where the time went so far; what power took in all, and for each incident for which that has grown."""
        row: dict[str, Any] = {"record": "ledger", "time_s": now, "device_s": ledger.to_json()}
        for number, spent in power.by_incident.items() if power else ():
            if number and self._spent.get(number) != (known := dict(vars(spent))):
                self._spent[number] = known
                append_json_line(self._events, {"record": "incident_power", "number": number, "time_s": now, **known})
        append_json_line(self._events, row | {"power": dict(vars(power.spent))} if power else row)

    def devices(self, state: State, pids: Mapping[str, int | None], now: float, job: Mapping[str, Any]) -> None:
        """Write devices.json; `job` is what else is to be said of the job."""
        write_whole(self._run / "devices.json", {**job, **devices_to_json(state, pids, now)})


def plan_path(run: Path, generation: int) -> Path:
    """Where the plan of `generation` is written down."""
    return run / "plans" / f"generation-{generation:06d}.json"


def devices_to_json(state: State, pids: Mapping[str, int | None], now: float) -> dict[str, Any]:
    """What devices.json says: the job, and each device with its place, standing and what it is at."""
    plan = state.plan
    rows = []
    for device in state.devices.values():
        place = plan.place(device.name) if plan is not None else None
        rows.append(
            {
                "device": device.name,
                "state": device.standing.value,
                "replica": place[0] if place else None,
                "slot": place[1] if place else None,
                "pid": pids.get(device.name),
                "incarnation": device.incarnation,
                "committed": device.committed,
                "phase": device.phase,
                "waits_for": device.waits_for,
                "failures": device.num_losses,
                "restart_in_s": None if device.restart_at is None else max(device.restart_at - now, 0.0),
                "cause": device.cause,
            }
        )
    return {
        "controller_pid": os.getpid(),
        "finished": state.stage is Stage.FINISHED,
        "time_s": now,
        "stage": state.stage.value,
        "generation": plan.generation if plan else None,
        "step": state.committed,
        "devices": rows,
    }


def change_to_json(action: Grew) -> dict[str, Any]:
    """A change at a step boundary: who joined or left, seconds of each stage, bytes, and how long training stood."""
    growth = action.growth
    return {
        "generation": growth.generation,
        "joined": list(growth.joining),
        "left": list(growth.leaving),
        "step": action.step,
        "stages_s": dict(growth.marks),
        "bytes_moved": sum(growth.fed_bytes.values()),
        "stopped_s": action.stopped_s,
    }


def closed_line(action: Closed) -> str:
    """An incident in one line: what, who, the seconds of each phase, bytes, what was repeated."""
    incident = action.incident
    phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in incident.phases_s.items() if seconds >= 0.0005)
    first = f", first commit {action.first_commit_s:.2f} s later" if action.first_commit_s is not None else ""
    moved = f", {_bytes(incident.bytes_moved)} moved" if incident.bytes_moved else ""
    words = {
        "discard": f"step {action.step} ran again",
        "heal": f"healed from peers, step {action.step} ran again",
        "forward": "no step was repeated",
        "memory": f"{incident.replayed_steps:.0f} steps ran again, from copies in memory",
        "checkpoint": f"{incident.replayed_steps:.0f} steps ran again, from the checkpoint",
        "start": "the run started again",
    }[action.action]
    if action.first_commit_s is None:
        words = "the run ended before the next commit"
    return (
        f"incident {incident.number}: {' and '.join(action.devices) or 'links'} at step {action.step}: "
        f"{incident.cause}; {incident.strategy}; stood {incident.stopped_s:.2f} s ({phases}){moved}; {words}{first}"
    )


def change_line(action: Grew) -> str:
    """A change at a step boundary in one line."""
    growth = action.growth
    who = "the batch was shared anew"
    if growth.joining or growth.leaving:
        who = f"{' and '.join(growth.joining or growth.leaving)} {'joined' if growth.joining else 'left'}"
    stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in growth.marks)
    moved = _bytes(sum(growth.fed_bytes.values()))
    return (
        f"{who} at step {action.step}: training stood {action.stopped_s:.2f} s; under training {stages}; {moved} moved"
    )


def _bytes(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def ledger_table(ledger: Ledger, goodput: float | None, reason: str | None) -> str:
    """Where the time went, as a table for people."""
    rows = [
        f"  {category.value:<12} {ledger.device_s[category]:>12,.1f} {ledger.share(category):>8.1%}   "
        f"{GOODPUT_NAMES[category]}"
        for category in Category
        if ledger.device_s[category] > 0
    ]
    total = f"  {'total':<12} {ledger.total_device_s:>12,.1f}"
    value = "goodput: none" if goodput is None else f"goodput {goodput:.3f}"
    value += f", {reason}" if reason else ""
    return "\n".join(
        [
            f"time of all devices ({value})",
            f"  {'':<12} {'device-s':>12} {'share':>8}   in ml-goodput-measurement",
            *rows,
            total,
        ]
    )


def incident_to_json(action: Closed) -> dict[str, Any]:
    """The incident for summary.json."""
    incident: Incident = action.incident
    return {
        "number": incident.number,
        "devices": list(action.devices),
        "cause": incident.cause,
        "strategy": incident.strategy,
        "words": list(incident.words),
        "step": action.step,
        "phases_s": dict(incident.phases_s),
        "stopped_s": incident.stopped_s,
        "first_commit_s": action.first_commit_s,
        "bytes_moved": incident.bytes_moved,
        "replayed_steps": incident.replayed_steps,
        "action": action.action,
    }
