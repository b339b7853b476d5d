"""What an exchange of gradients would take on links of declared speed: real launches, replayed in declared time.

Ranks run as threads over an in-memory network; each writes down what it does: compute (declared seconds), launch a
collective (bytes as the call has them), wait for one. `replay` then plays all ranks against each other. The machine's
load decides nothing: the same program gives the same seconds.

    links      each device has a port into its domain (its replica) and one to the network, sending and receiving at the
               same time. Collectives on one port share it max-min fairly; those of one communicator follow each other
    duration   a ring all-reduce of n members sends 2(n-1)/n of its payload through the port of each; an all-to-all
               takes as long as the larger of what one member sends and what one receives. Latency is not counted
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch

from runflat.check.in_memory import InMemoryNetwork
from runflat.plan.plan import Place

Key = tuple[str, int]
"""Name of the group, number of the collective on it."""


@dataclass(frozen=True)
class Compute:
    """Declared seconds of computation."""

    seconds: float


@dataclass(frozen=True)
class Launch:
    """A collective begins on this rank; `sent` and `received` are this rank's bytes."""

    key: Key
    sent: float
    received: float


@dataclass(frozen=True)
class Wait:
    """The rank waits until a collective has ended."""

    key: Key


Act = Compute | Launch | Wait


@dataclass
class Trace:
    """What all ranks did, each in its own order, and who has which rank in which group. Threads share no keys."""

    acts: dict[Place, list[Act]]
    members: dict[tuple[str, int], Place]

    def compute(self, place: Place, seconds: float) -> None:
        """`place` computes."""
        self.acts[place].append(Compute(seconds))


class RecordingNetwork:
    """An in-memory network that writes every launch and wait of `place` into a trace."""

    def __init__(self, memory: InMemoryNetwork, trace: Trace, place: Place) -> None:
        """All ranks share `memory` and `trace`."""
        self._memory, self._trace, self._place = memory, trace, place

    def backend(self, name: str, rank: int, size: int) -> _Backend:
        """The backend of this rank in the group `name`: what `Network(backend=...)` takes."""
        self._trace.members[name, rank] = self._place
        return _Backend(self._memory.backend(name, rank, size), self._trace.acts[self._place], name, rank, size)


class _Backend:
    def __init__(self, real: Any, acts: list[Act], name: str, rank: int, size: int) -> None:
        self._real, self._acts, self._name, self._rank, self._size = real, acts, name, rank, size
        self._turn = 0

    def _launched(self, sent: float, received: float, work: Any) -> _Work:
        self._turn += 1
        key = (self._name, self._turn)
        self._acts.append(Launch(key, sent, received))
        return _Work(work, key, self._acts)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> _Work:
        """As in-memory."""
        payload = tensors[0].numel() * tensors[0].element_size()
        through = payload * 2 * (self._size - 1) / self._size
        return self._launched(through, through, self._real.allreduce(tensors, options))

    def alltoall_base(
        self, output: torch.Tensor, source: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> _Work:
        """As in-memory."""
        row_bytes = prod(source.shape[1:]) * source.element_size()
        out, into = ((sum(parts) - parts[self._rank]) * row_bytes for parts in (sent, received))
        return self._launched(out, into, self._real.alltoall_base(output, source, received, sent))


class _Work:
    def __init__(self, real: Any, key: Key, acts: list[Act]) -> None:
        self._real, self._key, self._acts = real, key, acts
        self._waited = False

    def wait(self, timeout: timedelta) -> bool:
        """As in-memory."""
        if not self._waited:
            self._acts.append(Wait(self._key))
            self._waited = True
        return bool(self._real.wait(timeout))

    def is_completed(self) -> bool:
        """As in-memory."""
        return bool(self._real.is_completed())


@dataclass(frozen=True)
class Links:
    """Bytes per second of each device's ports, each way."""

    domain_bytes: float
    network_bytes: float


@dataclass(frozen=True)
class Span:
    """A collective, from the moment at which all members had launched it and it was its group's turn, to its end."""

    key: Key
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """When what happened: collectives of each place, the end of its last computation, and of all it did."""

    spans: Mapping[Place, tuple[Span, ...]]
    computed_s: Mapping[Place, float]
    end_s: Mapping[Place, float]

    @property
    def total_s(self) -> float:
        """Seconds until the last place has ended."""
        return max(self.end_s.values())


@dataclass
class _Flow:
    """A collective that all members have launched: what is left of it, as bytes on its slowest port."""

    key: Key
    places: tuple[Place, ...]
    inside: bool
    left_bytes: float
    start_s: float | None = None


class _Replay:
    def __init__(self, trace: Trace, links: Links) -> None:
        self.links = links
        self.acts = {place: list(acts) for place, acts in trace.acts.items()}
        self.members: dict[str, list[Place]] = defaultdict(list)
        for (name, _), place in sorted(trace.members.items()):
            self.members[name].append(place)
        self.launched: dict[Key, dict[Place, Launch]] = defaultdict(dict)
        self.queues: dict[str, list[_Flow]] = defaultdict(list)
        self.ended: set[Key] = set()
        self.at = dict.fromkeys(self.acts, 0)
        self.free_s = dict.fromkeys(self.acts, 0.0)
        self.computed_s = dict.fromkeys(self.acts, 0.0)
        self.spans: dict[Place, list[Span]] = {place: [] for place in self.acts}
        self.now_s = 0.0

    def run(self) -> Timeline:
        while True:
            while any([self._advance(place) for place in self.acts]):
                pass
            if not any(self.queues.values()) and all(self.at[place] == len(acts) for place, acts in self.acts.items()):
                break
            self._next_event()
        ends = {place: max([self.free_s[place], *(span.end_s for span in self.spans[place])]) for place in self.acts}
        return Timeline({place: tuple(spans) for place, spans in self.spans.items()}, self.computed_s, ends)

    def _advance(self, place: Place) -> bool:
        """Do the place's next act if it can be done now."""
        if self.at[place] == len(self.acts[place]) or self.free_s[place] > self.now_s:
            return False
        act = self.acts[place][self.at[place]]
        if isinstance(act, Wait) and act.key not in self.ended:
            return False
        if isinstance(act, Compute):
            self.free_s[place] = self.computed_s[place] = self.now_s + act.seconds
        elif isinstance(act, Launch):
            self._launch(place, act)
        self.free_s[place] = max(self.free_s[place], self.now_s)
        self.at[place] += 1
        return True

    def _launch(self, place: Place, act: Launch) -> None:
        arrived = self.launched[act.key]
        arrived[place] = act
        name = act.key[0]
        if len(arrived) == len(self.members[name]):
            inside = len({member[0] for member in self.members[name]}) == 1
            most = max(max(launch.sent, launch.received) for launch in arrived.values())
            self.queues[name].append(_Flow(act.key, tuple(self.members[name]), inside, most))

    def _next_event(self) -> None:
        """Go on to the next end of a computation or of a collective."""
        heads = [queue[0] for queue in self.queues.values() if queue]
        for flow in heads:
            flow.start_s = self.now_s if flow.start_s is None else flow.start_s
        rates = fair_rates([(flow.places, flow.inside) for flow in heads], self.links)
        ends = [
            self.now_s + flow.left_bytes / rate if flow.left_bytes else self.now_s
            for flow, rate in zip(heads, rates, strict=True)
        ]
        later = [free for free in self.free_s.values() if free > self.now_s]
        assert ends or later, "every rank waits for another one"
        then_s = min([*ends, *later])
        for flow, rate, end_s in zip(heads, rates, ends, strict=True):
            if end_s == then_s:
                self._end(flow, then_s)
            else:
                flow.left_bytes = max(0.0, flow.left_bytes - rate * (then_s - self.now_s))
        self.now_s = then_s

    def _end(self, flow: _Flow, end_s: float) -> None:
        self.queues[flow.key[0]].remove(flow)
        self.ended.add(flow.key)
        assert flow.start_s is not None
        for place in flow.places:
            self.spans[place].append(Span(flow.key, flow.start_s, end_s))


def fair_rates(flows: Sequence[tuple[tuple[Place, ...], bool]], links: Links) -> list[float]:
    """Bytes per second of each flow (its places, whether inside a domain) when ports are shared max-min fairly."""
    rates = [0.0] * len(flows)
    left = {
        (place, inside): links.domain_bytes if inside else links.network_bytes
        for places, inside in flows
        for place in places
    }
    open_flows = set(range(len(flows)))
    while open_flows:
        users: dict[tuple[Place, bool], list[int]] = defaultdict(list)
        for index in sorted(open_flows):
            places, inside = flows[index]
            for place in places:
                users[place, inside].append(index)
        tightest = min(users, key=lambda port: (left[port] / len(users[port]), port))
        share = left[tightest] / len(users[tightest])
        for index in users[tightest]:
            places, inside = flows[index]
            rates[index] = share
            open_flows.discard(index)
            for place in places:
                left[place, inside] -= share
    return rates


def replay(trace: Trace, links: Links) -> Timeline:
    """The timeline of `trace` on `links`."""
    return _Replay(trace, links).run()


def without_compute(trace: Trace) -> Trace:
    """The same launches and waits, as if all gradients were there at once."""
    return _filtered(trace, lambda act: not isinstance(act, Compute))


def only(trace: Trace, chosen: Callable[[Key], bool]) -> Trace:
    """The launches of the `chosen` collectives, all at once."""
    return _filtered(trace, lambda act: isinstance(act, Launch) and chosen(act.key))


def _filtered(trace: Trace, kept: Callable[[Act], bool]) -> Trace:
    return Trace({place: list(filter(kept, acts)) for place, acts in trace.acts.items()}, trace.members)
