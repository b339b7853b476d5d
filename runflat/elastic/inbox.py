"""A worker's inbox: orders from the controller, taken by a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from runflat.elastic.orders import Abort, Exit, Inject, Order, Stop, Switch
from runflat.elastic.side_thread import start_thread

FOREVER = 1 << 60
"""A generation above all: everything is to be left."""


class Channel(Protocol):
    """A worker's end of the connection to the controller."""

    def send(self, message: Mapping[str, Any]) -> None:
        """Deliver one JSON-ready message; nothing happens when the controller is gone."""

    def receive(self) -> Order | None:
        """The next order; None when the controller is gone."""


class Inbox:
    """Orders in the order in which they came. An abort acts at once, from the listening thread.

    `stop`: training is to end after the step in flight; so it is when the controller is gone. `switch`: the last order
    to switch, until it is cleared.
    """

    def __init__(
        self, channel: Channel, leave_below: Callable[[int], None], inject: Callable[[Mapping[str, Any]], None]
    ):
        """`leave_below(generation)` wakes the main thread out of every older generation; `inject` takes a fault."""
        self.stop = threading.Event()
        self.switch: Switch | None = None
        self._channel = channel
        self._leave_below = leave_below
        self._inject = inject
        self._queue: queue.Queue[Order | None] = queue.Queue()

    def start(self) -> None:
        """Begin to listen."""
        start_thread("orders", self._listen)

    def _listen(self) -> None:
        while (order := self._channel.receive()) is not None:
            if isinstance(order, Abort):
                self._leave_below(order.generation)
            elif isinstance(order, Exit):
                self._leave_below(FOREVER)
            elif isinstance(order, Switch):
                self.switch = order
            elif isinstance(order, Stop):
                self.stop.set()
                continue
            elif isinstance(order, Inject):
                self._inject(order.event)
                continue
            self._queue.put(order)
        self.stop.set()
        self._queue.put(None)

    def next(self) -> Order | None:
        """The next order; None when the controller is gone, whose end of the channel bounds the wait."""
        return self._queue.get()

    def poll(self, kinds: tuple[type, ...]) -> Order | None:
        """The next order if it is there and of one of `kinds`; all others are left for `next`."""
        with self._queue.mutex:
            if self._queue.queue and isinstance(self._queue.queue[0], kinds):
                order: Order = self._queue.queue.popleft()
                return order
        return None
