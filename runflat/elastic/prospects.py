"""What is made ready beside training for a coming plan: its groups, the feeds of newcomers, or being fed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from runflat.elastic.formation import Formation
from runflat.elastic.joining import Feeds, Newcomer
from runflat.elastic.orders import Feed, Power, Prepare, Receive, Unfeed, Unprepare
from runflat.parallel.comms import AbortedError, CommsError
from runflat.parallel.sockets import GroupSockets
from runflat.plan.plan import Plan, plan_from_wire
from runflat.train.engine import Engine

ORDERS = (Prepare, Unprepare, Receive, Feed, Unfeed, Power)
"""Orders that act on side threads while the main thread trains on, or between two steps."""


class Prospects:
    """The prepared groups (`formation`), the newcomer that this device is (if so), and the feeds that it gives."""

    def __init__(
        self,
        engine: Engine,
        device_id: str,
        form: Callable[[Plan], Formation],
        say: Callable[..., None],
        sockets: GroupSockets,
    ):
        """`form` starts the forming of a plan's groups; `sockets` says where to listen and what an abort spares."""
        self.formation: Formation | None = None
        self.newcomer: Newcomer | None = None
        self.feeds = Feeds(engine, device_id, say, sockets.exempt.add)
        self._engine = engine
        self._device_id = device_id
        self._form = form
        self._say = say
        self._sockets = sockets

    def obey(self, order: Prepare | Unprepare | Receive | Feed | Unfeed | Power) -> None:
        """Carry out one of `ORDERS`; on the main thread, between steps."""
        if isinstance(order, Prepare):
            self._prepare(order)
        elif isinstance(order, Unprepare):
            self.forget_groups()
            self.forget_newcomer()
        elif isinstance(order, Receive):
            self.forget_newcomer()
            self.newcomer = Newcomer(self._engine, self._device_id, order, self._say, self._sockets)
        elif isinstance(order, Feed):
            self.feeds.start(order)
        elif isinstance(order, Power):
            self._engine.run_at(order.speed)
        else:
            self.feeds.stop(order.target)

    def _prepare(self, order: Prepare) -> None:
        plan = plan_from_wire(order.plan)
        self.forget_groups()
        if plan.place(self._device_id) is None:
            self._say("prepared", generation=order.generation)  # it leaves: there is nothing to form
            return
        self.formation = self._form(plan)
        threading.Thread(target=self._watch, args=(self.formation,), name="prepare", daemon=True).start()

    def _watch(self, formation: Formation) -> None:
        """Report when the groups are there, or cannot be formed."""
        try:
            formation.wait()
            self._say("prepared", generation=formation.plan.generation)
        except AbortedError:
            return
        except CommsError as error:
            self._say("formfail", generation=formation.plan.generation, text=str(error))

    def take_groups(self) -> Formation | None:
        """The prepared groups, which are the caller's from now on."""
        formation, self.formation = self.formation, None
        return formation

    def forget_groups(self) -> None:
        """Give the prepared groups up."""
        if self.formation is not None:
            self.formation.abandon()
        self.formation = None

    def forget_newcomer(self) -> None:
        """Be fed no more."""
        if self.newcomer is not None:
            self.newcomer.close()
        self.newcomer = None

    def forget_all(self) -> None:
        """The generation is left: nothing that was made ready counts any more."""
        self.feeds.stop_all()
        self.forget_groups()
        self.forget_newcomer()
