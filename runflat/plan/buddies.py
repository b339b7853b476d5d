"""Which device keeps the copy in memory of which other one: elsewhere, so that what takes the one spares the other."""

from __future__ import annotations

from runflat.plan.plan import Place, Plan, ReplicaPlan


def buddy(plan: Plan, place: Place) -> Place | None:
    """Where the copy of `place` goes; None where there is nobody else.

    In this order of wishes: another domain than its own, as far as domains are known; another replica; another slot, so
    that the loss of one slot in all replicas is survived. The replicas go round by one distance, that of the nearest
    replicas which share no domain, so that each device keeps about as many copies as any other.
    """
    distance = _distance(plan)
    numbers = [replica.replica for replica in plan.replicas]
    at = numbers.index(place[0])
    after = [*numbers[at + 1 :], *numbers[:at]]
    replicas = [*after[distance - 1 :], *after[: distance - 1], place[0]]
    found = [candidate for number in replicas if (candidate := _other_slot(plan.replica(number), place)) is not None]
    found += [other for other in plan.places if other != place and other[0] != place[0]]
    found += [other for other in plan.places if other != place and other[0] == place[0]]
    own = plan.domain(plan.device(place))
    apart = [candidate for candidate in found if own is None or plan.domain(plan.device(candidate)) != own]
    return next(iter(apart or found), None)


def _other_slot(replica: ReplicaPlan, place: Place) -> Place | None:
    """The next live slot of `replica` after that of `place`, and not the same."""
    tp_full = len(replica.devices)
    slots = [slot for slot in replica.live_slots if slot != place[1]]
    return (replica.replica, min(slots, key=lambda slot: (slot - place[1] - 1) % tp_full)) if slots else None


def _distance(plan: Plan) -> int:
    """Least number of replicas from each to the one that has its copies, such that no pair shares a domain; else 1."""
    domains = [{plan.domain(name) for name in replica.devices if name is not None} for replica in plan.replicas]
    num = len(domains)
    for distance in range(1, num):
        if all(domains[at].isdisjoint(domains[(at + distance) % num] - {None}) for at in range(num)):
            return distance
    return 1
