"""Faults on purpose, in the words of `cluster.events`: a builder, who executes what, and when it strikes.

An event at (device, step, phase) is executed by that device's worker at that very moment. What only the controller can
do (drain, return, and everything that is dated by time) is executed by the controller.
"""

from __future__ import annotations

import queue
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runflat.cluster.events import Event, EventKind, event_from_json
from runflat.errors import TraceError

BY_WORKER = frozenset(
    {EventKind.KILL, EventKind.STOP, EventKind.SLOW, EventKind.FLAKE, EventKind.RAISE, EventKind.CORRUPT}
)
BY_CONTROLLER = frozenset({EventKind.DRAIN, EventKind.RETURN, EventKind.KILL, EventKind.FAIL, EventKind.STOP})
START_PHASES = frozenset({"import", "selftest", "copy", "join"})
"""Phases of a return, in which the device does not know the step: an event strikes the first time that one comes."""
RECOVERY_PHASES = frozenset({"detect", "abort", "barrier", "form", "transfer", "digest"})
STRIKING_PHASES = ("forward", "backward", "sync", "commit", "update")


class Inject:
    """Builds a list of events: `Inject().kill("1:2", step=4, phase="backward").return_("1:2", step=8).events`."""

    def __init__(self, events: Iterable[Event] = ()):
        """Begin with `events`."""
        self.events = tuple(events)

    def _and(self, **fields: Any) -> Inject:
        return Inject((*self.events, Event(**fields)))

    def kill(self, device: str, step: int, phase: str = "forward") -> Inject:
        """The worker process gets SIGKILL."""
        return self._and(event=EventKind.KILL, device=device, step=step, phase=phase)

    def stop(self, device: str, step: int, phase: str = "forward", duration_s: float | None = None) -> Inject:
        """The worker process gets SIGSTOP, and SIGCONT after `duration_s` if that is given."""
        return self._and(event=EventKind.STOP, device=device, step=step, phase=phase, duration_s=duration_s)

    def slow(self, device: str, step: int, factor: float, duration_s: float | None = None) -> Inject:
        """Computation takes `factor` times as long from `step` on."""
        return self._and(event=EventKind.SLOW, device=device, step=step, factor=factor, duration_s=duration_s)

    def flake(self, device: str, peer: str, step: int, phase: str = "sync") -> Inject:
        """The connections between two devices are cut; both stay alive."""
        return self._and(event=EventKind.FLAKE, device=device, peer=peer, step=step, phase=phase)

    def raise_(self, device: str, step: int, phase: str = "forward") -> Inject:
        """The worker raises a Python error."""
        return self._and(event=EventKind.RAISE, device=device, step=step, phase=phase)

    def corrupt(self, device: str, step: int, phase: str = "forward", what: str = "weight", seed: int = 0) -> Inject:
        """One bit of a weight, a moment or the learning rate ("weight", "moment", "lr") flips; `seed` says where."""
        return self._and(event=EventKind.CORRUPT, device=device, step=step, phase=phase, target=what, seed=seed)

    def drain(self, device: str, step: int) -> Inject:
        """The device leaves in order, after `step` steps."""
        return self._and(event=EventKind.DRAIN, device=device, step=step)

    def return_(self, device: str, step: int) -> Inject:
        """The device may come back, after `step` steps."""
        return self._and(event=EventKind.RETURN, device=device, step=step)

    def by_rate(
        self, devices: Sequence[str], per_step: float, num_steps: int, seed: int, return_after: int | None = None
    ) -> Inject:
        """Kills at random (device, step, phase): each device that is there fails in a step with chance `per_step`.

        Args:
            devices: devices that may fail.
            per_step: chance of each device and step.
            num_steps: steps of the run; the first is spared, so that there is something to lose.
            seed: the same seed gives the same events.
            return_after: steps after which a killed device returns; None: it does not.
        """
        chance, events = random.Random(seed), self
        away: dict[str, int] = {}
        for step in range(1, num_steps):
            for device in devices:
                back = away.get(device)
                if back is not None:
                    if back == step:
                        del away[device]
                        events = events.return_(device, step)
                elif chance.random() < per_step:
                    events = events.kill(device, step, chance.choice(STRIKING_PHASES))
                    away[device] = step + return_after if return_after else num_steps
        return events


def check_events(events: Iterable[Event], devices: Sequence[str]) -> None:
    """Refuse events that nobody could execute.

    Raises:
        TraceError: an unknown device, an event without a moment, or one that only a worker can do, dated by time.
    """
    for event in events:
        for device in (event.device, event.peer):
            if device is not None and device not in devices:
                raise TraceError(f"injected {event.event.value}: there is no device {device}; there are {devices}.")
        if event.device is None:
            raise TraceError(f"injected {event.event.value} of node {event.node}: name a device, such as 1:2.")
        if event.event is EventKind.CORRUPT and event.target == "moment" and event.step == 0:
            raise TraceError(
                f"injected corrupt of {event.device}: there are no moments before step 0 is applied; give a later step."
            )
        if event.step is None and event.time_s is None:
            raise TraceError(
                f"injected {event.event.value} of {event.device} has no moment: give 'step', or 'time_s' since the run "
                f"began."
            )
        if event.step is None and event.event not in BY_CONTROLLER:
            raise TraceError(
                f"injected {event.event.value} of {event.device} is dated by 'time_s', but only its worker can do it: "
                f"give 'step' instead."
            )


def for_workers(events: Iterable[Event]) -> tuple[Event, ...]:
    """Events that workers execute on themselves."""
    return tuple(event for event in events if event.step is not None and event.event in BY_WORKER)


def for_controller(events: Iterable[Event]) -> tuple[Event, ...]:
    """Events that the controller executes; a `fail` of a trace is a kill."""
    rest = (event for event in events if event.step is None or event.event not in BY_WORKER)
    return tuple(event for event in rest if event.event in BY_CONTROLLER)


class Striker:
    """What strikes one worker: it asks at each phase, says `struck` for each event that it gets, and suffers it."""

    def __init__(self, events: Iterable[Event | dict[str, Any]], device: str):
        """`events`: all of the job (or their JSON form); those of other devices are passed over."""
        parsed = (event_from_json(event) if isinstance(event, dict) else event for event in events)
        self._due = [event for event in parsed if event.device == device]
        self._late: list[Event] = []
        self._arrived: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def add(self, event: Mapping[str, Any]) -> None:
        """Take a fault that comes while the job runs, from any thread: it strikes at its phase, in its step or later.

        Raises:
            TraceError: it is no event.
        """
        self._arrived.put(event_from_json(event))

    def at(self, step: int, phase: str) -> tuple[Event, ...]:
        """Events that strike now, each once, as the device begins `phase` of step `step` (0-based).

        Without a phase an event strikes when the step begins. In the phases of a recovery `step` is the one in flight.
        """
        while not self._arrived.empty():
            self._late.append(self._arrived.get())
        now = [event for event in self._due if self._is_due(event, step, phase)]
        self._due = [event for event in self._due if event not in now]
        late = [event for event in self._late if (event.phase or "forward") == phase and (event.step or 0) <= step]
        self._late = [event for event in self._late if event not in late]
        return (*now, *late)

    @staticmethod
    def _is_due(event: Event, step: int, phase: str) -> bool:
        wanted = event.phase or "forward"
        if wanted != phase:
            return False
        return wanted in START_PHASES or event.step == step


class Script:
    """What the controller executes, and when."""

    def __init__(self, events: Iterable[Event]):
        """`events`: all of the job; those of workers are passed over."""
        self._due = list(for_controller(events))

    def due(self, now_s: float, committed: int) -> tuple[Event, ...]:
        """Events whose time has come: `committed` steps are done, `now_s` seconds have passed."""
        return tuple(
            event
            for event in self._due
            if (event.time_s is not None and event.time_s <= now_s)
            or (event.step is not None and event.step <= committed)
        )

    def done(self, event: Event) -> None:
        """The event has been executed."""
        self._due.remove(event)


def told_to_return(events: Iterable[Event]) -> frozenset[str]:
    """Devices that events strike: they come back when an event says so, not by themselves."""
    return frozenset(event.device for event in events if event.device is not None)
