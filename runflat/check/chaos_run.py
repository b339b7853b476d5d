"""A run under chaos, watched from outside: strikes are put into it as requests, and it must not stand still.

The driver is a process of its own: what hangs is the run, not its judge. It sees what any user sees (devices.json and
events.jsonl), asks the controller to pass faults on to workers, and logs what struck.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runflat.check.chaos import Sight, Source, Strike, takes_away
from runflat.check.flat import Sample, at_rest
from runflat.check.live import Command, Footprint, Watch, session_footprint, session_processes, until
from runflat.cluster.events import Event, EventKind, event_to_json
from runflat.elastic.requests import Action, answer, post
from runflat.errors import RunError

START_S = 180.0
"""Longest start of all workers."""
HANG_S = 60.0
"""Longest time without a committed step; every wait of the runtime is shorter."""
STRIKE_S = 20.0
"""After this long a fault that has not struck counts as missed: its device is gone, or its phase did not come."""
END_S = 120.0
"""Longest time for all devices to be back after the last fault, and for the run to end."""
GONE_S = 10.0
"""Longest time between the end of the controller and that of the last process."""
SECONDS_PER_FAULT = 15.0
"""The whole run may take this long for each fault; on a quiet machine it is one to two seconds."""
PAUSE_S = (0.1, 0.8)
"""Between the end of one strike and the next."""
WARM_STEPS = 20
REST_S = 45.0
"""Longest time for the groups of plans that were left to go: gloo drops one when its last collective has timed out."""
SAMPLE_S = 1.0
"""Least time between two looks at what the run occupies."""
BY_REQUEST: Mapping[EventKind, Action] = {EventKind.DRAIN: "drain", EventKind.RETURN: "return"}
IN_PLACE = ("active", "draining")
AWAY = ("lost", "out", "parked")


@dataclass
class Outcome:
    """What happened to a run under chaos, as its watcher saw it."""

    num_faults: int = 0
    num_missed: int = 0
    num_left_out: int = 0
    """Faults of a log whose devices were not there."""
    struck: dict[str, int] = field(default_factory=dict)
    """Faults by kind and phase."""
    hangs: int = 0
    problems: list[str] = field(default_factory=list)
    before: Footprint | None = None
    after: Footprint | None = None
    samples: list[Sample] = field(default_factory=list)
    """What the run occupied on the way, whenever all devices were there."""
    rest_s: float = 0.0
    """Seconds after the last steps until no more was occupied than before the first fault, or that was given up."""
    wall_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """All of it by name."""
        return asdict(self)


@dataclass
class _Pending:
    """A strike that is under way: what has still to strike, who it takes away, and what they were before."""

    number: int
    events: list[Event]
    asked: dict[str, Event]
    losing: dict[str, int]
    """Devices that it takes away, and their incarnation before."""
    since: float
    step: int
    settled_steps: int


class ChaosRun:
    """Starts `runflat train` with `flags` and strikes it `num_faults` times; `say` gets a line for each strike."""

    def __init__(self, run: Path, flags: Sequence[str], source: Source, num_faults: int, say: Callable[[str], object]):
        """Nothing is started before `go`."""
        self._run, self._flags, self._source, self._say = run, flags, source, say
        self._num_faults = num_faults
        self._watch = Watch(run)
        self._outcome = Outcome()
        self._log = run / "chaos.jsonl"
        self._read = 0
        self._number = 0
        self._pending: _Pending | None = None
        self._free_at = 0.0
        self._sampled = 0.0
        self._pauses = random.Random(num_faults)
        self._progress = (0, 0.0)
        self._job: dict[str, Any] = {}
        self._began = 0.0
        self._session = 0

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    def go(self, environment: Mapping[str, str] | None = None) -> Outcome:
        """From the first process to the last; what goes wrong stands in the outcome."""
        self._began = time.monotonic()
        self._run.mkdir(parents=True, exist_ok=True)
        arguments = ["train", "--run", str(self._run), *self._flags]
        with Command(arguments, self._run / "train.log", environment) as command:
            self._session = command.process.pid
            try:
                self._drive(command)
            except _OverError as over:
                self._outcome.problems.append(str(over))
                self._outcome.hangs += over.hang
            if command.process.poll() is not None:
                self._nobody_left()
        self._outcome.num_left_out = self._source.num_left_out
        self._outcome.wall_s = self._now
        return self._outcome

    def _nobody_left(self) -> None:
        try:
            until("the end of the workers", lambda: not session_processes(self._session), GONE_S)
        except RunError:
            left = len(session_processes(self._session))
            self._outcome.problems.append(f"{left} processes of the run were left behind")

    def _drive(self, command: Command) -> None:
        self._until(command, START_S, "the first steps", lambda: self._settled(WARM_STEPS))
        self._outcome.before = session_footprint(self._session)
        limit_s = SECONDS_PER_FAULT * self._num_faults + END_S
        self._until(command, limit_s, f"{self._num_faults} faults", self._all_struck)
        self._until(command, END_S, "all devices to be back", self._all_back)
        last = self._job["step"]
        self._until(command, END_S, "the last steps", lambda: self._settled(last + WARM_STEPS))
        self._rest(command)
        command.process.send_signal(signal.SIGINT)
        try:
            command.process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise _OverError(f"the run did not end within {END_S:.0f} s of being asked to", hang=True) from None

    def _rest(self, command: Command) -> None:
        """Wait until the run occupies no more than before the first fault, for as long as gloo may take."""
        began, before = self._now, self._outcome.before
        assert before is not None

        def resting() -> bool:
            self._look(command)
            after = self._outcome.after = session_footprint(self._session)
            return at_rest(before, after)

        with suppress(RunError):
            until("what was occupied before", resting, REST_S)
        self._outcome.rest_s = self._now - began

    def _sample(self) -> None:
        """Note what the run occupies, while all devices are there."""
        if self._now - self._sampled >= SAMPLE_S and self._settled(0):
            self._sampled = self._now
            self._outcome.samples.append(Sample(self._outcome.num_faults, session_footprint(self._session)))

    def _until(self, command: Command, limit_s: float, what: str, done: Callable[[], bool]) -> None:
        """Wait for what the job is to do, and see what has changed each time.

        Raises:
            _OverError: it was in vain, or the run has ended or stands still.
        """

        def looked() -> bool:
            self._look(command)
            return done()

        try:
            until(what, looked, limit_s)
        except RunError as error:
            raise _OverError(f"{error} {self._standing()}", hang=True) from None

    def _look(self, command: Command) -> None:
        """See what has changed; raise when the run has ended or stands still."""
        job = self._watch.job()
        if command.process.poll() is not None:
            tail = " ".join(command.output().split()[-80:])
            raise _OverError(f"the run ended by itself with code {command.process.returncode}: {tail}", hang=False)
        if not job:
            return
        self._job = job
        step, since = self._progress
        if job["step"] != step:
            self._progress = (job["step"], self._now)
        elif self._now - since > (HANG_S if step else START_S):
            raise _OverError(f"no step was committed for {HANG_S:.0f} s; {self._standing()}", hang=True)

    def _standing(self) -> str:
        rows = self._job.get("devices", [])
        words = (f"{row['device']} {row['state']} in {row['phase']}, waits for {row['waits_for']}" for row in rows)
        return f"stage {self._job.get('stage')}, step {self._job.get('step')}: " + "; ".join(words)

    def _settled(self, step: int) -> bool:
        devices = self._job.get("devices", [])
        whole = bool(devices) and all(row["state"] == "active" for row in devices)
        return whole and self._job["stage"] == "run" and self._job["step"] >= step

    def _all_back(self) -> bool:
        """Ask whoever is away to return, until nobody is."""
        if self._settled(0):
            return True
        if self._now >= self._free_at:
            self._free_at = self._now + 2.0
            for row in self._job["devices"]:
                if row["state"] in AWAY:
                    post(self._run, self._name(), "return", row["device"])
        return False

    # ---- strikes

    def _all_struck(self) -> bool:
        """Go on with the strikes; whether there are enough of them, or no more."""
        self._sample()
        self._turn()
        return self._outcome.num_faults >= self._num_faults or (self._source.exhausted and not self._pending)

    def _turn(self) -> None:
        """Follow the strike that is under way, or begin the next when the job has got over the last."""
        if self._pending is not None:
            self._follow(self._pending)
            return
        if self._now < self._free_at or self._job["stage"] != "run" or self._job["finished"]:
            return
        strike = self._source.next(self._sight())
        if strike is not None:
            self._begin(strike)

    def _sight(self) -> Sight:
        rows = self._job["devices"]
        live: dict[int, list[str]] = {}
        for row in rows:
            if row["state"] == "active" and row["replica"] is not None:
                live.setdefault(row["replica"], []).append(row["device"])
        return Sight(
            time_s=self._now,
            step=self._job["step"],
            live={replica: tuple(devices) for replica, devices in live.items()},
            away=tuple(row["device"] for row in rows if row["state"] in AWAY),
            tp_full=1 + max(int(row["device"].partition(":")[2]) for row in rows),
            num_devices=len(rows),
        )

    def _name(self) -> str:
        self._number += 1
        return f"chaos-{self._number:08d}"

    def _begin(self, strike: Strike) -> None:
        incarnation = {row["device"]: row["incarnation"] for row in self._job["devices"]}
        asked, waiting = {}, []
        for event in strike.events:
            name = self._name()
            if event.event in BY_REQUEST:
                post(self._run, name, BY_REQUEST[event.event], event.place)
                asked[name] = event
            else:
                post(self._run, name, "inject", event.place, event_to_json(event))
                waiting.append(event)
        losing = {device: incarnation[device] for device in strike.losing}
        step = self._job["step"]
        self._pending = _Pending(self._number, waiting, asked, losing, self._now, step, strike.settled_steps)
        self._say(f"{self._outcome.num_faults}/{self._num_faults} step {self._job['step']}: {strike.words()}")

    def _follow(self, pending: _Pending) -> None:
        """Note what has struck; the strike is over when the job has lost whom it was to lose and trains on."""
        self._hear(pending)
        if self._now - pending.since > STRIKE_S:
            for event in pending.events:
                self._outcome.num_missed += 1
                pending.losing.pop(event.place, None)
            pending.events.clear()
        if pending.events or pending.asked:
            return
        states = {row["device"]: (row["state"], row["incarnation"]) for row in self._job["devices"]}
        there = [
            device
            for device, number in pending.losing.items()
            if states[device][0] in IN_PLACE and states[device][1] == number
        ]
        enough = self._job["step"] >= pending.step + pending.settled_steps
        if self._job["stage"] == "run" and enough and (not there or self._now - pending.since > 2 * STRIKE_S):
            self._pending = None
            self._free_at = self._now + self._pauses.uniform(*PAUSE_S)

    def _hear(self, pending: _Pending) -> None:
        for name, event in list(pending.asked.items()):
            reply = answer(self._run, name)
            if reply is None:
                continue
            del pending.asked[name]
            if reply[0]:
                self._struck(pending, event)
            else:
                pending.losing.pop(event.place, None)
        with (self._run / "events.jsonl").open(encoding="utf-8") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith("\n"):
                    break
                self._read += len(line.encode())
                row = json.loads(line)
                for event in pending.events:
                    if str(row.get("detail", "")).startswith("injected") and _same(row, event):
                        pending.events.remove(event)
                        self._struck(pending, event)
                        break

    def _struck(self, pending: _Pending, event: Event) -> None:
        """Log one event that has happened; `detail` tells which belong together."""
        pending.step = max(pending.step, self._job["step"])
        if event.event is not EventKind.RETURN:
            self._outcome.num_faults += 1
            name = event.event.value + (f" in {event.phase}" if event.phase else "")
            if event.event is EventKind.STOP:
                name += ", for good" if takes_away(event) else ", for a moment"
            self._outcome.struck[name] = self._outcome.struck.get(name, 0) + 1
        row = {**event_to_json(event), "detail": f"strike {pending.number}"}
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


class _OverError(Exception):
    """The run cannot be driven on; `hang`: because it stands still."""

    def __init__(self, text: str, *, hang: bool):
        super().__init__(text)
        self.hang = hang


def _same(row: Mapping[str, Any], event: Event) -> bool:
    wanted = event_to_json(event)
    return all(row.get(key) == wanted.get(key) for key in ("event", "device", "peer", "step", "phase"))
