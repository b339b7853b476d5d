"""What goes with one domain, most often a machine: replicas that it hits, and state that is then nowhere else."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from runflat.plan.plan import Place, Plan
from runflat.plan.units import ModelSpec
from runflat.plan.zero import Ownership

Unit = tuple[str, int]


@dataclass(frozen=True)
class ReplicaHit:
    """A replica that loses devices, and its degree with and without them (0: it leaves)."""

    replica: int
    before: int
    after: int


@dataclass(frozen=True)
class Blast:
    """The loss of one domain as a whole.

    `lost` has the units that no device elsewhere holds, by kind; `lost_moments` counts elements whose optimizer state
    is nowhere else (zero1: their owner and their mirror go together). `num_left` devices are elsewhere. Where there are
    any, they have the copies in memory of all that go (`buddies.py`), if copies are kept.
    """

    domain: str
    devices: tuple[str, ...]
    hits: tuple[ReplicaHit, ...]
    lost: Mapping[str, tuple[int, ...]]
    lost_moments: int
    num_left: int

    @property
    def goes_on(self) -> bool:
        """Whether training goes on from live state, no step lost."""
        return not self.lost and not self.lost_moments


def blast_radii(spec: ModelSpec, plan: Plan, owned: Ownership | None = None) -> tuple[Blast, ...]:
    """What the loss of each domain takes, in the order of the domains' first devices; none where no domain is known.

    Args:
        spec: the model.
        plan: who holds what, and the domains.
        owned: who keeps the optimizer state, with zero1.
    """
    places: dict[str, list[Place]] = defaultdict(list)
    everywhere: Counter[Unit] = Counter()
    inside: dict[str, Counter[Unit]] = defaultdict(Counter)
    for place in plan.places:
        units = [(kind, unit) for kind, held in _held(spec, plan, place).items() for unit in held]
        everywhere.update(units)
        if (domain := plan.domain(plan.device(place))) is not None:
            places[domain].append(place)
            inside[domain].update(units)
    moments = _moments(plan, owned) if owned is not None else Counter()
    found = []
    for domain, gone in places.items():
        lost: dict[str, list[int]] = defaultdict(list)
        for (kind, unit), count in sorted(inside[domain].items()):
            if count == everywhere[kind, unit]:
                lost[kind].append(unit)
        found.append(
            Blast(
                domain=domain,
                devices=tuple(map(plan.device, gone)),
                hits=_hits(plan, gone),
                lost={kind: tuple(units) for kind, units in lost.items()},
                lost_moments=moments[domain],
                num_left=len(plan.places) - len(gone),
            )
        )
    return tuple(found)


def _held(spec: ModelSpec, plan: Plan, place: Place) -> Mapping[str, tuple[int, ...]]:
    return plan.replica(place[0]).held(spec.kinds, place[1])


def _hits(plan: Plan, gone: list[Place]) -> tuple[ReplicaHit, ...]:
    lost = Counter(replica for replica, _ in gone)
    degrees = {number: plan.replica(number).tp for number in lost}
    return tuple(ReplicaHit(number, degrees[number], degrees[number] - count) for number, count in lost.items())


def _moments(plan: Plan, owned: Ownership) -> Counter[str]:
    """Elements whose owner and mirror are in one domain, or that have no mirror, by the domain."""
    found: Counter[str] = Counter()
    for piece in owned.pieces:
        domains = {plan.domain(plan.device(place)) for place in piece.keepers}
        if len(domains) == 1 and (domain := domains.pop()) is not None:
            found[domain] += piece.numel
    return found
