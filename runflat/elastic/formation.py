"""Forming a generation's groups on a thread of its own, so that the training thread can leave at any moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore

from runflat.errors import RunError
from runflat.parallel.comms import Comms, CommsError, Network
from runflat.parallel.sockets import GroupSockets
from runflat.plan.plan import Place, Plan
from runflat.plan.sync_groups import SyncLayout

Address = tuple[str, int]
PATIENCE = Network(meet_timeout_s=30.0, form_timeout_s=5.0)
"""How long members of a group are waited for, and how long it may take to form.

torch's store client asks for the host name of what it connects to. Where no name server answers, that takes 10 s.
"""
FORM_PER_DEVICE_S = 0.01
"""How much longer a group may take to form with each device of the job, since it connects to all."""
BURY = "bury"
"""Name of the threads on which groups are dropped."""


class Formation:
    """The groups of one plan, being formed. `wait` gives them; `abandon` gives up on them."""

    def __init__(
        self,
        plan: Plan,
        layout: SyncLayout,
        place: Place,
        network: Network,
        sockets: GroupSockets,
        store: Address,
        device: torch.device,
    ):
        """Begin at once."""
        self.plan = plan
        self.seconds = 0.0
        self._network = replace(network, interface_address=sockets.address(plan.generation), made=sockets.made)
        self._sockets = sockets
        self._comms: Comms | None = None
        self._error: RunError | None = None
        self._abandoned = False
        self._finished = False
        threading.Thread(
            target=self._run, args=(layout, place, store, device), name=f"form-{plan.generation}", daemon=True
        ).start()

    def _run(self, layout: SyncLayout, place: Place, store: Address, device: torch.device) -> None:
        started = time.monotonic()
        generation = self.plan.generation
        comms: Comms | None = None
        error: RunError | None = None
        try:
            with self._sockets.recording(generation):
                comms = self._form(layout, place, store, device)
        except RunError as problem:
            error = problem.with_traceback(None)  # whose frames would keep what has formed
        except (RuntimeError, OSError) as problem:  # torch's store and gloo raise plain errors
            error = CommsError(f"the groups of generation {generation} did not form: {problem}")
        self.seconds = time.monotonic() - started
        with self._network.interrupt.changed:
            self._comms, self._error, self._finished = comms, error, True
            abandoned = self._abandoned
            self._network.interrupt.changed.notify_all()
        if abandoned and comms is not None:
            self._sockets.abort(generation)
            comms.close()
        if abandoned or comms is None:
            self._sockets.forget(generation)

    def _form(self, layout: SyncLayout, place: Place, store: Address, device: torch.device) -> Comms:
        """Form all groups and prove them."""
        timeout = timedelta(seconds=self._network.meet_timeout_s)
        # A store client of its own: shutting its socket ends a wait for a member that will never come.
        client = TCPStore(store[0], store[1], is_master=False, timeout=timeout)
        comms = Comms(client, self.plan, layout, place, self._network, device)
        comms.prove()
        return comms

    @property
    def finished(self) -> bool:
        """Whether the groups are there, or failed to form."""
        return self._finished

    def wait(self) -> Comms:
        """The groups.

        Raises:
            AbortedError: the generation was left meanwhile.
            CommsError: they did not form.
        """
        interrupt = self._network.interrupt
        with interrupt.changed:
            while not self._finished:
                interrupt.check(self.plan.generation)
                interrupt.changed.wait(self._network.form_timeout_s)
        if self._error is not None:
            interrupt.check(self.plan.generation)
            raise self._error
        assert self._comms is not None
        return self._comms

    def abandon(self) -> None:
        """Give up: what has formed is dropped, what is forming ends as soon as its sockets are shut."""
        with self._network.interrupt.changed:
            self._abandoned = True
            comms = self._comms
        self._sockets.abort(self.plan.generation)
        if comms is not None:
            bury([comms.close])
            self._sockets.forget(self.plan.generation)


def bury(last_calls: list[Callable[[], Any]], kept: list[Any] | None = None) -> None:
    """Run `last_calls` on a side thread and keep `kept` alive until then.

    gloo's destructor may block on a collective that never ends, and a stuck collective may still write to its buffer.
    """

    def finish() -> None:
        for call in last_calls:
            call()
        if kept is not None:
            kept.clear()

    threading.Thread(target=finish, name=BURY, daemon=True).start()


def await_buried(timeout_s: float) -> None:
    """Wait for all side threads of `bury` in this process, each at most `timeout_s`."""
    for thread in threading.enumerate():
        if thread.name == BURY:
            thread.join(timeout_s)


def drop(left: list[Any], sockets: GroupSockets) -> None:
    """Drop the groups that `Engine.leave` gave, and what they may still write to, on a side thread."""
    if left:
        sockets.forget(left[0].generation)
        bury([left[0].close], left)
