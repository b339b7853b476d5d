"""Reads the folder of a run, finished or running: what is there, what is damaged, and what came since the last look.

A file that is missing, cut off or foreign costs what it would have said and a line in `problems`, not the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from runflat.errors import DataError
from runflat.report.json_files import JsonLines, checked, read_json
from runflat.report.records import (
    BadRowError,
    ChangeRow,
    Happening,
    IncidentRow,
    LedgerRow,
    PlanView,
    Row,
    Step,
    change_row,
    incident_row,
    needed,
    number,
    parts,
    plan_view,
    step_row,
    whole,
)

Timed = TypeVar("Timed", Step, ChangeRow, Happening, LedgerRow)
FILES = ("config.json", "run.json", "steps.jsonl", "events.jsonl", "devices.json", "summary.json", "plans/")
"""What is looked for in a run's folder."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """All that a run's folder says, at one moment."""

    folder: Path
    steps: tuple[Step, ...] = ()
    incidents: tuple[IncidentRow, ...] = ()
    changes: tuple[ChangeRow, ...] = ()
    happenings: tuple[Happening, ...] = ()
    ledgers: tuple[LedgerRow, ...] = ()
    plans: Mapping[int, PlanView] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)
    devices: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    starts_s: tuple[float, ...] = (0.0,)
    """When each session began."""
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @property
    def emulated(self) -> bool:
        """Whether durations were declared instead of measured."""
        return self.config.get("devices") == "emulated" or bool(self.summary.get("emulated"))

    @property
    def steers_power(self) -> bool:
        """Whether the configuration asks for power to be steered, so that steps will tell of it."""
        power = self.config.get("power")
        return bool(self.config.get("boost")) or (isinstance(power, Mapping) and bool(power.get("save")))

    @property
    def total_steps(self) -> int | None:
        """Steps that the run is to do."""
        train = self.config.get("train")
        if not isinstance(train, Mapping) or not isinstance(train.get("steps"), int):
            return None
        steps, stop_after = train["steps"], train.get("stop_after")
        return min(steps, stop_after) if isinstance(stop_after, int) and stop_after else int(steps)

    @property
    def global_batch(self) -> int:
        """Sequences of a whole step, of the configuration or of the first plan; 0 if neither is there."""
        train = self.config.get("train")
        if isinstance(train, Mapping) and isinstance(train.get("global_batch"), int):
            return int(train["global_batch"])
        return sum(part.num_sequences for part in self.plans[min(self.plans)].replicas) if self.plans else 0

    @property
    def layout(self) -> tuple[int, int]:
        """(full degree, replicas) of the configuration, or of the first plan; (0, 0) if neither is there."""
        layout = self.config.get("layout")
        if layout is not None:
            return layout["tp"], layout["replicas"]
        if self.plans:
            first = self.plans[min(self.plans)]
            return first.tp_full, len(first.replicas)
        return 0, 0

    @property
    def ledger(self) -> tuple[tuple[str, float], ...]:
        """Device-seconds by category of the last session: of its books, else of the newest ledger in events.jsonl."""
        if self.books.get("device_s"):
            return parts(self.books, "device_s")
        return self.ledgers[-1].device_s if self.ledgers else ()

    @property
    def device_rows(self) -> list[Mapping[str, Any]]:
        """Rows of devices.json."""
        rows = self.devices.get("devices")
        return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []

    @property
    def books(self) -> Mapping[str, Any]:
        """Where the run's books are: summary.json at the end, devices.json until then."""
        return self.summary or self.devices

    @property
    def goodput(self) -> float | None:
        """Goodput as the run's books give it."""
        return number(self.books, "goodput")

    @property
    def wall_s(self) -> float:
        """Seconds from the start of the first session to the last thing known."""
        ends = [step.time_s for step in self.steps[-1:]] + [row.time_s for row in self.ledgers[-1:]]
        ends += [happening.time_s for happening in self.happenings[-1:]]
        last = number(self.devices, "time_s")
        return max([*ends, *([self.starts_s[-1] + last] if last is not None else [])], default=0.0)


@dataclass
class _Kept:
    """Rows of one file, with their session: time that goes back begins a new one, and so does a second start."""

    bad: list[str] = field(default_factory=list)
    num_bad: int = 0
    sessions: list[float] = field(default_factory=lambda: [0.0])
    """Last time of each session."""
    started: bool = False
    """Whether the session has said that it starts; a ledger may stand before that where workers are slow to come."""

    def session(self, time_s: float, *, begins: bool = False) -> int:
        """The session of a row with this time."""
        if (begins and self.started) or time_s < self.sessions[-1] - 1.0:
            self.sessions.append(0.0)
            self.started = False
        self.started = self.started or begins
        self.sessions[-1] = max(self.sessions[-1], time_s)
        return len(self.sessions) - 1

    def problem(self, text: str) -> None:
        """Remember what is wrong with a row; the first three are told."""
        self.num_bad += 1
        if len(self.bad) < 3:
            self.bad.append(text)


class RunFiles:
    """Follows one run's folder. `poll` gives all that is known, or None when nothing has changed."""

    def __init__(self, folder: Path):
        """Nothing is read yet."""
        self.folder = folder
        self._steps = JsonLines(folder / "steps.jsonl")
        self._events = JsonLines(folder / "events.jsonl")
        self._stamps: dict[str, tuple[int, int]] = {}
        self._objects: dict[str, Mapping[str, Any]] = {}
        self._object_problems: dict[str, list[str]] = {}
        self._plans: dict[int, PlanView] = {}
        self._bad_plans: dict[int, str] = {}
        self._forget_steps()
        self._forget_events()

    def _forget_steps(self) -> None:
        self._step_rows: list[tuple[int, Step]] = []
        self._step_file = _Kept()

    def _forget_events(self) -> None:
        self._event_file = _Kept()
        self._incidents: list[tuple[int, IncidentRow]] = []
        self._changes: list[tuple[int, ChangeRow]] = []
        self._happenings: list[tuple[int, Happening]] = []
        self._ledgers: list[LedgerRow] = []

    def poll(self) -> RunData | None:
        """All that the folder says, if that has changed since the last call."""
        anew, rows = self._steps.poll()
        if anew:
            self._forget_steps()
        for row, why in rows:
            self._take_step(row, why)
        events_anew, events = self._events.poll()
        if events_anew:
            self._forget_events()
        for row, why in events:
            self._take_event(row, why)
        changed = [self._refresh(name) for name in ("config.json", "run.json", "devices.json", "summary.json")]
        new_plans = self._read_plans()
        if not (anew or rows or events_anew or events or new_plans or any(changed)):
            return None
        return self._data()

    def _refresh(self, name: str) -> bool:
        """Read a JSON file again if it is another than before."""
        path = self.folder / name
        try:
            stat = path.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino)
        except OSError:
            stamp = (0, 0)
        if self._stamps.get(name) == stamp:
            return False
        self._stamps[name] = stamp
        data, problem = read_json(path)
        self._objects[name], problems = checked(name, data)
        self._object_problems[name] = [*([problem] if problem else []), *problems]
        return True

    def _take_step(self, row: Row | None, why: str) -> None:
        try:
            if row is None:
                raise BadRowError(why)
            step = step_row(row)
        except BadRowError as error:
            self._step_file.problem(str(error))
            return
        self._step_rows.append((self._step_file.session(step.time_s), step))

    def _take_event(self, row: Row | None, why: str) -> None:
        try:
            if row is None:
                raise BadRowError(why)
            self._enter(row)
        except BadRowError as error:
            self._event_file.problem(str(error))

    def _enter(self, row: Row) -> None:
        file, kind = self._event_file, row.get("record", row.get("event"))
        if kind == "incident":
            incident = incident_row(row)
            self._incidents.append((len(file.sessions) - 1, incident))
        elif kind == "change":
            change = change_row(row)
            self._changes.append((file.session(change.time_s), change))
        elif kind == "ledger":
            time_s = needed(row, "time_s")
            session = file.session(time_s)
            self._ledgers.append(LedgerRow(time_s=time_s, session=session, device_s=parts(row, "device_s")))
        elif kind in ("plan", "took"):
            time_s, generation = needed(row, "time_s"), whole(row, "generation")
            text = str(row.get("reason", "in force"))
            session = file.session(time_s, begins=kind == "plan" and row.get("action") == "start")
            happening = Happening(time_s=time_s, kind=kind, device=None, generation=generation, text=text)
            self._happenings.append((session, happening))
        elif isinstance(row.get("event"), str):
            at = number(row, "time_s")
            if at is not None:
                device = str(row.get("device") or row.get("node") or "")
                happening = Happening(
                    time_s=at, kind=row["event"], device=device, generation=None, text=str(row.get("cause") or "")
                )
                self._happenings.append((file.session(at), happening))
        elif "record" not in row:
            raise BadRowError("neither an event nor a record")

    def _read_plans(self) -> bool:
        """Read plans that events speak of and that were not read before."""
        wanted = {happening.generation for _, happening in self._happenings if happening.generation is not None}
        new = False
        for generation in sorted(wanted - self._plans.keys() - self._bad_plans.keys()):
            path = self.folder / "plans" / f"generation-{generation:06d}.json"
            data, problem = read_json(path)
            try:
                if problem or not data:
                    raise BadRowError(problem or "it is missing")
                self._plans[generation] = plan_view(data)
            except BadRowError as error:
                self._bad_plans[generation] = f"plans/{path.name}: {error}"
            new = True
        return new

    def _data(self) -> RunData:
        ends = self._event_file.sessions
        if len(self._step_file.sessions) > len(ends):
            ends = self._step_file.sessions
        starts = [sum(ends[:index]) for index in range(len(ends))]
        # Steps that were done again are gone from steps.jsonl, a whole session of them perhaps: the last ones agree.
        shift = len(ends) - len(self._step_file.sessions)
        return RunData(
            folder=self.folder,
            steps=tuple(_later(step, starts[session + shift]) for session, step in self._step_rows),
            incidents=tuple(
                replace(row, started_s=row.started_s + starts[session]) if session else row
                for session, row in self._incidents
            ),
            changes=tuple(_later(row, starts[session]) for session, row in self._changes),
            happenings=tuple(_later(row, starts[session]) for session, row in self._happenings),
            ledgers=tuple(_later(row, starts[row.session]) for row in self._ledgers),
            plans=dict(self._plans),
            config=self._objects["config.json"],
            origin=self._objects["run.json"],
            devices=self._objects["devices.json"],
            summary=self._objects["summary.json"],
            starts_s=tuple(starts),
            problems=tuple(self._problems()),
        )

    def _problems(self) -> list[str]:
        found = [text for texts in self._object_problems.values() for text in texts]
        for lines, kept in ((self._steps, self._step_file), (self._events, self._event_file)):
            if kept.num_bad:
                found.append(f"{lines.path.name}: {kept.num_bad} lines cannot be used: {'; '.join(kept.bad)}")
            if lines.unfinished:
                found.append(f"{lines.path.name}: its last line is cut off")
            if not lines.path.exists():
                found.append(f"{lines.path.name} is missing")
        return found + list(self._bad_plans.values())


def _later(row: Timed, offset_s: float) -> Timed:
    return replace(row, time_s=row.time_s + offset_s) if offset_s else row


def trains_the_same(run: RunData, other: RunData) -> bool:
    """Whether two runs had the same model, data and batch, so that their losses can be compared step by step."""

    def key(data: RunData) -> object:
        train = data.config.get("train")
        batch = train.get("global_batch") if isinstance(train, Mapping) else None
        return data.config.get("model"), data.config.get("data"), batch

    return key(run) == key(other)


def read_run(folder: Path) -> RunData:
    """All that a run's folder says.

    Raises:
        DataError: nothing in it can be used; the message says what was looked for and found.
    """
    data = RunFiles(folder).poll() if folder.is_dir() else None
    if data is None or not (data.steps or data.happenings or data.ledgers or data.summary or data.devices):
        there = [name for name in FILES if (folder / name).exists()]
        found = f"of these it has {', '.join(there)}" if there else "none of these is there"
        wrong = f"; {'; '.join(data.problems)}" if data and there else ""
        runs = sorted(path.parent for path in folder.glob("*/steps.jsonl")) if not there else []
        if runs:
            raise DataError(
                f"{folder} is not a run's folder but has {'runs' if len(runs) > 1 else 'a run'} in it: name "
                f"{', '.join(map(str, runs))}."
            )
        raise DataError(
            f"{folder} holds nothing that can be reported: a run's folder has {', '.join(FILES)}; {found}{wrong}. "
            f"Give the folder that `runflat train --run` wrote, or a result file of `runflat simulate`."
        )
    return data
