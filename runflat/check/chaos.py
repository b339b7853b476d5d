"""Which faults a chaos run gets: chosen at random, so that the job always can go on, or read from an earlier log.

A strike is one fault, or two that belong together; a return is a strike that is no fault. Choices depend on the seed
and on what is seen of the job, so that a slow machine does not strike devices that are still away. What struck is
logged in the format of all events, so that the log can be replayed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

from runflat.cluster.events import CORRUPT_TARGETS, Event, EventKind

STEP_PHASES = ("forward", "backward", "sync", "commit", "update")
RECOVERY_PHASES = ("detect", "abort", "barrier", "form", "transfer", "digest")
GROWTH_PHASES = ("transfer", "digest")
"""Phases in which members take a joining or leaving device's plan up."""
NEWCOMER_PHASES = ("import", "selftest", "copy", "join")
AHEAD_STEPS = 2
"""A fault is meant for this many steps after the moment at which it is chosen: that long it may be under way."""
DIGEST_EVERY = 10
"""Steps between comparisons of all bits: a flipped bit is found within so many, and nothing else strikes until then."""
MOST_AWAY = 3
"""With this many devices away the next strike is a return."""
LEAST_LIVE = 3
SHORT_STOP_S = (0.3, 2.0)
"""A stop that nobody may take for a failure: well under the deadline of the heartbeat, 5 s."""
PATIENCE_S = 15.0
SETTLED_STEPS = 2
SLOW_S = 1.0
SLOW_FACTOR = 3.0
WEIGHTS: Mapping[str, float] = {
    "kill": 30, "two kills": 16, "kill in recovery": 14, "kill at a leave": 4, "drain": 8, "flake": 10,
    "short stop": 8, "slow": 6, "long stop": 2, "corrupt": 20, "kill of a newcomer": 12, "kill at a return": 6,
}  # fmt: skip
"""How often each kind of strike is chosen, where it is possible. A flipped bit is possible only while all devices are
there, which they are at one strike in nine."""
LETHAL = frozenset({EventKind.KILL, EventKind.DRAIN})


@dataclass(frozen=True)
class Sight:
    """What is seen of a job in training: who trains, by replica, and who is away and may be asked to return."""

    time_s: float
    step: int
    live: Mapping[int, tuple[str, ...]]
    away: tuple[str, ...]
    tp_full: int
    num_devices: int

    @property
    def devices(self) -> tuple[str, ...]:
        """All that train."""
        return tuple(device for members in self.live.values() for device in members)

    @property
    def whole(self) -> bool:
        """Whether all devices of the job train."""
        return len(self.devices) == self.num_devices


@dataclass(frozen=True)
class Strike:
    """Events that belong together, in the order in which they are to be made ready."""

    events: tuple[Event, ...]

    @property
    def num_faults(self) -> int:
        """Events that are no returns."""
        return sum(event.event is not EventKind.RETURN for event in self.events)

    @property
    def hidden(self) -> bool:
        """Whether a digest has to find it: a device that joins meanwhile could be fed with the wrong bits."""
        return any(event.event is EventKind.CORRUPT for event in self.events)

    @property
    def settled_steps(self) -> int:
        """Steps after which it is over: three failures without a commit between them are a bug, not chaos."""
        return 2 * DIGEST_EVERY if self.hidden else SETTLED_STEPS

    @property
    def losing(self) -> frozenset[str]:
        """Devices that it takes away from the job."""
        return frozenset(event.place for event in self.events if takes_away(event))

    def words(self) -> str:
        """One line for people."""
        return " and ".join(_words(event) for event in self.events)


def takes_away(event: Event) -> bool:
    """Whether the job loses the device for certain: a stop without end outlasts the heartbeat's deadline."""
    return event.event in LETHAL or (event.event is EventKind.STOP and event.duration_s is None)


def _words(event: Event) -> str:
    duration = f" for {event.duration_s:.1f} s" if event.duration_s is not None else ""
    peer = f" to {event.peer}" if event.peer else ""
    return f"{event.event.value} {event.device}{peer}{duration}" + (f" in {event.phase}" if event.phase else "")


class Source(Protocol):
    """Where strikes come from."""

    def next(self, sight: Sight) -> Strike | None:
        """What is to strike now; None: nothing yet."""

    @property
    def exhausted(self) -> bool:
        """Whether nothing will come any more."""

    @property
    def num_left_out(self) -> int:
        """Faults that were to come and did not, because their devices were not there."""


class Random:
    """Strikes at random, without end."""

    exhausted = False
    num_left_out = 0

    def __init__(self, seed: int):
        """The same seed and the same sights give the same strikes."""
        self._chance = random.Random(seed)

    def next(self, sight: Sight) -> Strike | None:
        """A strike that the job can bear, by weight; a return more often the more devices are away."""
        chance = self._chance
        if len(sight.away) >= MOST_AWAY or chance.random() < 0.3 * len(sight.away):
            return self._return(sight)
        kinds = [kind for kind in WEIGHTS if "return" not in kind and "newcomer" not in kind]
        if not sight.whole:
            kinds.remove("corrupt")
        for _ in range(len(kinds)):
            strike = self._strike(sight, chance.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0])
            if strike is not None and bearable(sight, strike):
                return strike
        return self._return(sight) if sight.away else None

    def _return(self, sight: Sight) -> Strike | None:
        """A return, undisturbed or with a kill of the newcomer or of a member while it comes."""
        chance, device = self._chance, self._chance.choice(sight.away)
        back = Event(event=EventKind.RETURN, device=device, step=sight.step)
        kinds = ["kill of a newcomer", "kill at a return", "nothing"]
        kind = chance.choices(kinds, [WEIGHTS["kill of a newcomer"], WEIGHTS["kill at a return"], 40])[0]
        if kind == "kill of a newcomer":
            return Strike((self._kill(sight, device, NEWCOMER_PHASES), back))
        if kind == "kill at a return":
            strike = Strike((self._kill(sight, chance.choice(sight.devices), GROWTH_PHASES), back))
            return strike if bearable(sight, strike) else Strike((back,))
        return Strike((back,))

    def _kill(self, sight: Sight, device: str, phases: Sequence[str]) -> Event:
        phase = self._chance.choice(phases)
        step = sight.step + (AHEAD_STEPS if phase in STEP_PHASES else 0)
        return Event(event=EventKind.KILL, device=device, step=step, phase=phase)

    def _strike(self, sight: Sight, kind: str) -> Strike | None:
        chance, step = self._chance, sight.step + AHEAD_STEPS
        if len(sight.devices) < 2:
            return None
        first, second = chance.sample(sight.devices, 2)
        phases = STEP_PHASES + (("checkpoint",) if chance.random() < 0.5 else ())
        if kind == "kill":
            return Strike((self._kill(sight, first, phases),))
        if kind == "two kills":
            kill = self._kill(sight, first, STEP_PHASES)
            phase = kill.phase if chance.random() < 0.5 else chance.choice(STEP_PHASES)
            return Strike((kill, replace(kill, device=second, phase=phase)))
        if kind == "kill in recovery":
            return Strike((self._kill(sight, second, RECOVERY_PHASES), self._kill(sight, first, STEP_PHASES)))
        drain = Event(event=EventKind.DRAIN, device=first, step=sight.step)
        if kind == "drain":
            return Strike((drain,))
        if kind == "kill at a leave":
            return Strike((self._kill(sight, second, GROWTH_PHASES), drain))
        phase = chance.choice(STEP_PHASES)
        if kind == "flake":
            return Strike((Event(event=EventKind.FLAKE, device=first, peer=second, step=step, phase=phase),))
        if kind == "corrupt":
            target, seed = chance.choice(CORRUPT_TARGETS), chance.randrange(1 << 16)
            flip = Event(event=EventKind.CORRUPT, device=first, step=step, phase="forward", target=target, seed=seed)
            return Strike((flip,))
        if kind == "slow":
            slow = Event(event=EventKind.SLOW, device=first, step=step, factor=SLOW_FACTOR, duration_s=SLOW_S)
            return Strike((slow,))
        duration_s = None if kind == "long stop" else round(chance.uniform(*SHORT_STOP_S), 2)
        return Strike((Event(event=EventKind.STOP, device=first, step=step, phase=phase, duration_s=duration_s),))


def bearable(sight: Sight, strike: Strike) -> bool:
    """Whether every unit keeps a live holder, and enough devices stay, even if all the strike's losses come at once.

    Each replica holds every unit. So one replica must stay whole, or the losses must leave two whole ones, all of whose
    slots are alive, at different slots.
    """
    losing = strike.losing & set(sight.devices)
    if not losing:
        return True
    if len(sight.devices) - len(losing) < LEAST_LIVE:
        return False
    hit = {replica for replica, members in sight.live.items() if losing & set(members)}
    if len(hit) < len(sight.live):
        return True
    healthy = all(len(sight.live[replica]) == sight.tp_full for replica in hit)
    slots = [device.partition(":")[2] for device in losing]
    return len(hit) > 1 and healthy and len(set(slots)) == len(slots)


class Replay:
    """The strikes of a log, at the steps at which they struck there, as soon as their devices are there.

    To flip a bit all devices must be. A strike whose devices do not come to be there within `PATIENCE_S` is left out:
    the machine runs at another pace.
    """

    def __init__(self, events: Sequence[Event]):
        """`events` of a log: those of one strike follow each other and have the same `detail`."""
        groups = groupby(events, key=lambda event: event.detail)
        self._strikes = [Strike(tuple(replace(event, detail=None) for event in group)) for _, group in groups]
        self._due_since: float | None = None
        self.num_left_out = 0

    @property
    def exhausted(self) -> bool:
        """Whether the log is at its end."""
        return not self._strikes

    def next(self, sight: Sight) -> Strike | None:
        """The next strike, if its step is near and its devices are there or away as it needs them."""
        if not self._strikes:
            return None
        strike = self._strikes[0]
        back = {event.place for event in strike.events if event.event is EventKind.RETURN}
        struck = {event.place for event in strike.events} - back
        if min(event.step or 0 for event in strike.events) - AHEAD_STEPS > sight.step:
            return None
        if self._due_since is None:
            self._due_since = sight.time_s
        ready = back <= set(sight.away) and struck <= set(sight.devices) and (sight.whole or not strike.hidden)
        if not ready and sight.time_s - self._due_since <= PATIENCE_S:
            return None
        self._due_since = None
        self._strikes.pop(0)
        if not ready:
            self.num_left_out += strike.num_faults
        return strike if ready else None
