"""Ranks as threads of one process: each has its own process groups, over gloo or in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from torch.distributed import HashStore

from runflat.check.in_memory import InMemoryNetwork
from runflat.parallel.comms import Comms, Interrupt, Network
from runflat.parallel.sockets import Sockets
from runflat.plan.plan import Place, Plan
from runflat.plan.sync_groups import SyncLayout

T = TypeVar("T")


def run_ranks(
    plan: Plan,
    layout: SyncLayout,
    work: Callable[[Place, Comms], T],
    network_of: Callable[[Place], Network] | None = None,
    in_memory: bool = False,
) -> dict[Place, T]:
    """Run `work(place, comms)` in one thread per live place of `plan`; the results by place.

    The groups are gloo's on the loopback interface, or with `in_memory` without sockets (faster, for many layouts).
    With gloo nothing else in the process may open connections meanwhile: an error shuts all that are new.

    Raises:
        BaseException: the first error of any rank; the others fail on their collectives and are dropped.
    """
    store = HashStore()
    memory = InMemoryNetwork()
    sockets = Sockets()
    interrupt = Interrupt()
    if not in_memory:
        sockets.begin(plan.generation)
    results: dict[Place, T] = {}
    errors: list[BaseException] = []

    def rank(place: Place) -> None:
        comms: Comms | None = None
        try:
            network = replace(network_of(place) if network_of else Network(), interrupt=interrupt)
            if in_memory:
                network = replace(network, backend=memory.backend)
            comms = Comms(store, plan, layout, place, network)
            results[place] = work(place, comms)
        except BaseException as error:  # whatever it is, it must reach the caller's thread
            errors.append(error)
            # gloo tells only some of the peers that a member has gone; so that one error ends all ranks, tell them.
            memory.fail(f"{place[0]}:{place[1]} has failed")
            interrupt.leave_below(plan.generation + 1)
            sockets.abort(plan.generation)
        if comms is not None and errors:
            # A collective that its peer left may never end, and gloo's destructor would wait for it.
            threading.Thread(target=comms.close, daemon=True).start()
        elif comms is not None:
            comms.close()

    threads = [threading.Thread(target=rank, args=(place,), daemon=True) for place in plan.places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
