"""Which devices stand for each other while gradients are summed in `reshard`: one of each replica, one to one.

The most reduced replica of a plan has a column for each of its live slots, and units lie in the columns as they lie in
that replica: it moves nothing but the copies of a KV head. In every other replica a column's partner is the device at
the same slot, which holds the same base range, so that little more moves than the units of the devices that are no
partner; where that slot is dead, one that is left over. Replicas that are hurt in another slot or to another degree
move what differs.
"""

from __future__ import annotations

from runflat.plan.plan import Place, Plan, ReplicaPlan


class Meeting:
    """The columns of one plan."""

    def __init__(self, plan: Plan) -> None:
        """The replica of the lowest degree (of several, the first) says what the columns are."""
        self._first = min(plan.replicas, key=lambda replica: (replica.tp, replica.replica))
        partners = [self._partners(replica) for replica in plan.replicas]
        self.columns: dict[int, tuple[Place, ...]] = {
            slot: tuple(of_replica[slot] for of_replica in partners) for slot in self._first.live_slots
        }

    def _partners(self, replica: ReplicaPlan) -> dict[int, Place]:
        columns = self._first.live_slots
        free = iter([slot for slot in replica.live_slots if slot not in columns])
        live = set(replica.live_slots)
        return {slot: (replica.replica, slot if slot in live else next(free)) for slot in columns}

    def of(self, holders: tuple[Place, ...]) -> tuple[Place, ...]:
        """The partners, one of each replica, that sum the units which exactly `holders` hold.

        Several devices of a replica may hold a KV head: the column of the lowest one counts.
        """
        number = self._first.replica
        return self.columns[min(slot for replica, slot in holders if replica == number)]
