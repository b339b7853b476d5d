"""A small job whose every change is decided device by device, as the runtime decides it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from runflat.cluster.health import Health
from runflat.plan.strategies import Chain, Decision, JobFacts, Place, Strategy, decide, handled_by
from runflat.sim.placement import Change
from runflat.sim.rates import Rates, ReplicaClass
from runflat.sim.times import Line

LineBySlots = Callable[[tuple[int, ...]], Line | None]
"""Dead slots of a replica -> its line; None if it cannot run. Units are uneven, so it matters which slots are dead."""


class Decided:
    """Arrangement and rates of a job, both read off the decision in force.

    Args:
        facts: Facts of the job.
        chain: Strategy chain.
        devices: All devices held, spares included.
        line: Seconds of a replica by its dead slots.
        fits: Whether the model fits in memory at a degree.
    """

    def __init__(
        self, facts: JobFacts, chain: Chain, devices: tuple[str, ...], line: LineBySlots, fits: Callable[[int], bool]
    ) -> None:
        self._facts, self._chain, self._line, self._fits = facts, chain, line, fits
        self._health = Health(devices)
        self.decision = self._decide(None)

    def see(self, devices: Sequence[str], *, failed: bool) -> Strategy | None:
        """Decide anew after devices failed or returned; the link that this takes, or None if nobody at work notices."""
        gone = self._health.failed
        changed = gone.union(devices) if failed else gone.difference(devices)
        self._health = Health(self._health.devices, changed)
        before, self.decision = self.decision, self._decide(self.decision)
        return handled_by(before, self.decision)

    def _decide(self, previous: Decision | None) -> Decision:
        slots = self._facts.tp_full * self._facts.pp
        placement: dict[Place, str] = {
            (replica, slot): f"{replica}:{slot}" for replica in range(self._facts.num_replicas) for slot in range(slots)
        }

        def seconds(replica: int, dead: tuple[int, ...]) -> float:
            line = self._line(dead)
            assert line is not None
            return line.per_sequence_s

        return decide(
            self._facts,
            self._health,
            self._chain,
            placement=placement,
            seconds=seconds,
            fits_memory=self._fits,
            previous=previous,
        )

    def apply(self, change: Change, *, failed: bool) -> Strategy | None:
        """Nothing: :meth:`see` is told of devices instead."""
        return None

    def key(self) -> Hashable:
        """The decision in force."""
        return (self.decision.devices, self.decision.shares, self.decision.paused)

    def classes(self) -> list[ReplicaClass]:
        """Nothing: :meth:`rates` reads the decision."""
        return []

    def rates(self, classes: Sequence[ReplicaClass]) -> Rates:
        """Rates of the decision in force; ``classes`` is not used."""
        decision, facts = self.decision, self._facts
        seconds: dict[int, float] = {}
        live: dict[int, int] = {}
        for replica, share in decision.shares:
            working = {slot for (number, slot), _ in decision.devices if number == replica}
            line = self._line(tuple(slot for slot in range(facts.tp_full * facts.pp) if slot not in working))
            assert line is not None
            seconds[replica], live[replica] = line.at(share), len(working)
        num_working = sum(live.values())
        if decision.paused or not seconds:
            return Rates(float("inf"), 0, num_working, 0.0, 0.0, 0, 0, 0)
        step_s = max(seconds.values())
        busy = sum(seconds[replica] / step_s * live[replica] for replica in seconds)
        num_sequences = sum(share for _, share in decision.shares)
        num_reduced = sum(count < facts.tp_full * facts.pp for count in live.values())
        return Rates(step_s, num_sequences, num_working, busy, 0.0, 0, num_reduced, num_sequences)
