"""From hit groups to replica classes: which seats are hit, which replicas go on, at what degree.

Three arrangements: :class:`Packed` puts hit groups together into the fewest replicas (the job is free to re-rank),
:class:`Placed` leaves each group in its replica (state lives on devices), :class:`Full` knows whole replicas only and
changes at restarts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Protocol

from runflat.plan.strategies import Strategy
from runflat.sim.placement import Change
from runflat.sim.rates import ReplicaClass

Link = Callable[[int], Strategy | None]
"""Link of the chain that handles a group which lost that many devices; None if no link can."""


class Arrangement(Protocol):
    """What job and groups make of each change."""

    def apply(self, change: Change, *, failed: bool) -> Strategy | None:
        """Take a change in; the link that handles it, or None if no working replica notices."""

    def key(self) -> Hashable:
        """The state in short: equal keys mean equal classes."""

    def classes(self) -> list[ReplicaClass]:
        """The replicas that can work now."""


class Seats:
    """Who sits where: seat s is stage ``s % pp`` of replica ``s // pp``; whole spare groups swap with hit ones.

    Args:
        num_seats: Seats of the job.
        num_groups: Groups held; those without a seat are spare.
        swap: Whether spare groups take the seats of hit ones.
    """

    def __init__(self, num_seats: int, num_groups: int, *, swap: bool) -> None:
        self.lost: dict[int, int] = {}
        self._num_seats, self._swap = num_seats, swap
        self._free = dict.fromkeys(range(num_seats, num_groups)) if swap else {}
        self._seat_of: dict[int, int | None] = {}
        self._group_at: dict[int, int] = {}

    def seat(self, group: int) -> int | None:
        """Seat of a group; None if it has none."""
        if group in self._seat_of:
            return self._seat_of[group]
        return group if group < self._num_seats else None

    def apply(self, change: Change, *, failed: bool) -> tuple[int, int, int, bool] | None:
        """Take a change in; (seat, lost before, lost after, whether a spare group took it), None if no seat changed."""
        seat = self.seat(change.group)
        if failed:
            if seat is None:
                self._free.pop(change.group, None)
                return None
            if self._free and change.lost:
                spare = next(iter(self._free))
                del self._free[spare]
                before = self._sit(spare, seat, instead_of=change.group)
                return seat, before, 0, True
        elif seat is None:
            if change.lost or not self._swap:
                return None
            if not self.lost:
                self._free[change.group] = None
                return None
            seat = next(iter(self.lost))
            before = self._sit(change.group, seat, instead_of=self._group_at.get(seat, seat))
            return seat, before, 0, True
        before = self.lost.pop(seat, 0)
        if change.lost:
            self.lost[seat] = change.lost
        return (seat, before, change.lost, False) if before != change.lost else None

    def _sit(self, group: int, seat: int, *, instead_of: int) -> int:
        """Give a whole group the seat of another; what the seat lacked before."""
        self._seat_of[instead_of], self._seat_of[group] = None, seat
        self._group_at[seat] = group
        return self.lost.pop(seat, 0)


def _handled_by(*, by_spare: bool, worked: bool, works: bool, decisive: int, link: Link) -> Strategy | None:
    """Link that a change goes down to; None where the replica was out before and still is."""
    if not (worked or works):
        return None
    return Strategy.SPARE if by_spare else link(decisive)


class Packed:
    """Hit groups are packed into the fewest replicas, most hit first; those that must leave are packed apart.

    Args:
        seats: Seats; where there are more than the job needs, they form extra replicas.
        num_seats: Their number.
        pp: Groups of a replica.
        link: Link that handles a hit group.
    """

    def __init__(self, seats: Seats, num_seats: int, pp: int, link: Link) -> None:
        self._seats, self._num_seats, self._pp, self._link = seats, num_seats, pp, link
        self._histogram: dict[int, int] = {}

    def apply(self, change: Change, *, failed: bool) -> Strategy | None:
        """See :class:`Arrangement`."""
        if change.by_spare and failed:
            return Strategy.SPARE if self._seats.seat(change.group) is not None else None
        result = self._seats.apply(change, failed=failed)
        if result is None:
            return None
        _, before, after, swapped = result
        for lost, by in ((before, -1), (after, 1)):
            if lost:
                self._histogram[lost] = self._histogram.get(lost, 0) + by
                if not self._histogram[lost]:
                    del self._histogram[lost]
        return _handled_by(
            by_spare=change.by_spare or swapped,
            worked=self._works(before),
            works=self._works(after),
            decisive=after if failed else before,
            link=self._link,
        )

    def _works(self, lost: int) -> bool:
        return not lost or self._link(lost) is Strategy.NTP

    def key(self) -> Hashable:
        """See :class:`Arrangement`."""
        return tuple(sorted(self._histogram.items()))

    def classes(self) -> list[ReplicaClass]:
        """See :class:`Arrangement`."""
        pp = self._pp
        stays = [(lost, num) for lost, num in self._histogram.items() if self._link(lost) is Strategy.NTP]
        stays.sort(reverse=True)
        hit = sum(self._histogram.values())
        healthy = self._num_seats - hit
        num_replicas = (healthy + sum(num for _, num in stays)) // pp
        reduced = num_replicas * pp - healthy
        surplus = sum(num for _, num in stays) - max(reduced, 0)
        found: list[ReplicaClass] = []
        members: list[tuple[int, int]] = []
        room = pp
        left = num_replicas
        for lost, num in stays:
            spared = min(surplus, num)
            surplus -= spared
            num -= spared
            if members and num:
                taken = min(num, room)
                members.append((lost, taken))
                num, room = num - taken, room - taken
                if not room:
                    found.append(ReplicaClass(1, members[0][0], tuple(members)))
                    members, room, left = [], pp, left - 1
            whole, rest = divmod(num, pp)
            if whole:
                found.append(ReplicaClass(whole, lost, ((lost, whole * pp),)))
                left -= whole
            if rest:
                members, room = [(lost, rest)], pp - rest
        if members:
            found.append(ReplicaClass(1, members[0][0], (*members, (0, room))))
            left -= 1
        if left > 0:
            found.append(ReplicaClass(left, 0, ((0, left * pp),)))
        return found


class Placed:
    """Each group stays in its replica; a replica with a group that must leave leaves as a whole."""

    def __init__(self, seats: Seats, num_seats: int, pp: int, link: Link) -> None:
        self._seats, self._pp, self._link = seats, pp, link
        self._hits: dict[int, dict[int, int]] = {}
        self._kinds: dict[tuple[int, ...], int] = {(): num_seats // pp}

    def apply(self, change: Change, *, failed: bool) -> Strategy | None:
        """See :class:`Arrangement`."""
        if change.by_spare and failed:
            return Strategy.SPARE if self._seats.seat(change.group) is not None else None
        result = self._seats.apply(change, failed=failed)
        if result is None:
            return None
        seat, before, after, swapped = result
        replica, stage = divmod(seat, self._pp)
        hits = self._hits.setdefault(replica, {})
        self._count(hits, -1)
        worked = self._works(hits.values())
        if after:
            hits[stage] = after
        else:
            hits.pop(stage, None)
        self._count(hits, +1)
        works = self._works(hits.values())
        if not hits:
            del self._hits[replica]
        return _handled_by(
            by_spare=change.by_spare or swapped,
            worked=worked,
            works=works,
            decisive=after if failed else before,
            link=self._link,
        )

    def _works(self, lost: Iterable[int]) -> bool:
        return all(self._link(each) is Strategy.NTP for each in lost)

    def _count(self, hits: dict[int, int], by: int) -> None:
        key = tuple(sorted(hits.values(), reverse=True))
        self._kinds[key] = self._kinds.get(key, 0) + by
        if not self._kinds[key]:
            del self._kinds[key]

    def key(self) -> Hashable:
        """See :class:`Arrangement`."""
        return tuple(sorted(self._kinds.items()))

    def classes(self) -> list[ReplicaClass]:
        """See :class:`Arrangement`."""
        found: list[ReplicaClass] = []
        for key in sorted(self._kinds, reverse=True):
            if not self._works(key):
                continue
            num = self._kinds[key]
            groups = {lost: key.count(lost) * num for lost in key}
            if len(key) < self._pp:
                groups[0] = (self._pp - len(key)) * num
            found.append(ReplicaClass(num, key[0] if key else 0, tuple(groups.items())))
        return found


class Full:
    """Full replicas only, formed at restarts from all groups that are whole then; what returns waits for the next one.

    Args:
        num_groups: Groups held, spare ones included.
        num_replicas: Replicas of the job.
        pp: Groups of a replica.
        spare: Whether a waiting whole group takes a dead one's place without a restart.
        eager: Whether the job restarts on purpose as soon as that would give it a further replica.
    """

    def __init__(self, num_groups: int, num_replicas: int, pp: int, *, spare: bool, eager: bool) -> None:
        self._num_groups, self._num_replicas, self._pp = num_groups, num_replicas, pp
        self._spare, self._eager = spare, eager
        self._dead: dict[int, None] = {}
        self._waiting: dict[int, None] = dict.fromkeys(range(num_replicas * pp, num_groups))
        self._active = num_replicas

    def apply(self, change: Change, *, failed: bool) -> Strategy | None:
        """See :class:`Arrangement`."""
        group = change.group
        if change.by_spare and failed:
            return Strategy.SPARE if group not in self._dead and group not in self._waiting else None
        if not failed:
            if not change.lost and group in self._dead:
                del self._dead[group]
                self._waiting[group] = None
                whole = self._num_groups - len(self._dead)
                more = min(whole // self._pp, self._num_replicas) > self._active
                if more and (self._eager or not self._active):
                    self._form()
                    return Strategy.RESTART
            return None
        if group in self._dead:
            return None
        self._dead[group] = None
        if group in self._waiting:
            del self._waiting[group]
            return None
        if self._spare and self._waiting:
            del self._waiting[next(iter(self._waiting))]
            return Strategy.SPARE
        self._form()
        return Strategy.RESTART

    def _form(self) -> None:
        """Choose the groups that work: as few changes as possible, lowest waiting first, highest working ones leave."""
        whole = self._num_groups - len(self._dead)
        self._active = min(self._num_replicas, whole // self._pp)
        wanted = self._active * self._pp
        working = whole - len(self._waiting)
        for group in list(self._waiting)[: max(wanted - working, 0)]:
            del self._waiting[group]
        group = self._num_groups
        for _ in range(max(working - wanted, 0)):
            group -= 1
            while group in self._dead or group in self._waiting:
                group -= 1
            self._waiting[group] = None

    def key(self) -> Hashable:
        """See :class:`Arrangement`."""
        return self._active

    def classes(self) -> list[ReplicaClass]:
        """See :class:`Arrangement`."""
        return [ReplicaClass(self._active, 0, ((0, self._active * self._pp),))] if self._active else []
