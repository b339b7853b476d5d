"""A controller's conversation with its agent, in a thread of its own: whoever gives orders never waits for an answer.

Orders are carried out one after the other, each within the port's deadline; what came of them is fetched later with
`outcomes`. Only orders renew leases: when those who give them hang, so does the last sign of life, and limits go back.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from runflat.power import client
from runflat.power.client import PowerPort
from runflat.power.wire import DeviceState, Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Limits in watts for devices of one group, for example a replica; `devices` are all that its lease is for."""

    group: int
    devices: tuple[str, ...]
    limits_w: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an agent said: when it was asked (seconds of the link's clock), what it knew then, words for people.

    `is_read_back`: the readings are those of a write, so younger than it.
    """

    asked_at: float
    devices: tuple[DeviceState, ...] = ()
    words: tuple[str, ...] = ()
    is_read_back: bool = False


class Link:
    """Leases and limits of one run.

    Args:
        port: The agent.
        ttl_s: Time without a sign of life after which it restores nominal.
        clock: Seconds.
        own_thread: Whether orders are carried out beside whoever gives them; else at once, for an agent that is part
            of this process and never makes anybody wait.
    """

    def __init__(
        self, port: PowerPort, ttl_s: float, clock: Callable[[], float] = time.monotonic, *, own_thread: bool = True
    ):
        self.clock = clock
        self._port = port
        self._ttl_s = ttl_s
        self._leases: dict[int, str] = {}
        self._done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._thread = ThreadPoolExecutor(1, "power agent") if own_thread else None
        self._under_way: list[Future[None]] = []
        self._look: Future[None] | None = None

    # ---- orders

    def look(self) -> None:
        """Read all devices, unless that is under way already."""
        if self._look is None or self._look.done():
            self._look = self._order(self._read)

    def write(self, orders: Sequence[Order]) -> None:
        """Set limits in this order, with leases where there are none yet; what fails ends the rest."""
        self._order(lambda: self._write(orders))

    def renew(self, group: int) -> None:
        """A sign of life for a group's lease, if it has one."""
        self._order(lambda: self._renew(group))

    def release(self, group: int) -> None:
        """A group back to nominal."""
        self._order(lambda: self._release(group))

    # ---- what came of them

    def outcomes(self) -> list[Outcome]:
        """All that was answered since the last call."""
        done = [order for order in self._under_way if order.done()]
        self._under_way = [order for order in self._under_way if order not in done]
        for order in done:
            order.result()  # an order that ended with a bug of ours is not to be silent
        found = []
        while not self._done.empty():
            found.append(self._done.get())
        return found

    def finish(self, timeout_s: float) -> bool:
        """Wait until all orders are carried out; returns whether they are."""
        return not wait(self._under_way, timeout_s).not_done

    def close(self, timeout_s: float) -> None:
        """Everything back to nominal; what takes longer goes on while the process lives, and ends with the lease."""
        self._order(self._release_all)
        self.finish(timeout_s)
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    # ---- in the thread

    def _order(self, work: Callable[[], None]) -> Future[None] | None:
        if self._thread is None:
            work()
            return None
        order = self._thread.submit(work)
        self._under_way.append(order)
        return order

    def _read(self) -> None:
        asked_at = self.clock()
        reply = client.read(self._port)
        if not isinstance(reply, Failure):  # else readings get old, which the policy notices
            self._done.put(Outcome(asked_at=asked_at, devices=reply.devices))

    def _write(self, orders: Sequence[Order]) -> None:
        for order in orders:
            asked_at = self.clock()
            if order.group not in self._leases:
                granted = client.acquire(self._port, order.devices, self._ttl_s, f"replica {order.group}")
                if isinstance(granted, Failure):
                    return self._say(asked_at, f"replica {order.group}: no power lease: {granted.text}")
                self._leases[order.group] = granted.lease
            lease = self._leases[order.group]
            reply = client.set_limits(self._port, lease, order.limits_w, f"replica {order.group}")
            if isinstance(reply, Failure):
                if reply.error in ("no-lease", "not-leased"):
                    client.release(self._port, self._leases.pop(order.group))
                return self._say(asked_at, f"replica {order.group}: power limits were not set: {reply.text}")
            self._done.put(Outcome(asked_at=asked_at, devices=reply.devices, is_read_back=True))
        return None

    def _say(self, asked_at: float, text: str) -> None:
        self._done.put(Outcome(asked_at=asked_at, words=(text,)))

    def _renew(self, group: int) -> None:
        lease = self._leases.get(group)
        if lease is None:
            return
        answer = client.renew(self._port, lease)
        if isinstance(answer, Failure) and answer.error == "no-lease":
            del self._leases[group]

    def _release(self, group: int) -> None:
        lease = self._leases.pop(group, None)
        if lease is not None:
            client.release(self._port, lease)

    def _release_all(self) -> None:
        for group in list(self._leases):
            self._release(group)
