"""All process groups of one generation on one device, in one object that is passed as an argument.

There is no default process group and nothing is registered globally: several generations, and all ranks of a test, can
live in one process. Groups are raw backends over a store prefix that carries the generation, so that a key or a
connection of an older generation is never met.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from runflat.errors import RunError
from runflat.plan.plan import Place, Plan
from runflat.plan.sync_groups import Members, SyncLayout

Op = Literal["sum", "max"]
Recorder = Callable[[str, int, int], None]
"""Called with (operation, payload bytes, members) for every collective that is launched."""

_REDUCE_OPS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class CommsError(RunError):
    """A collective failed or did not end in time. On its own it says nothing about who is at fault."""


@dataclass(frozen=True)
class Network:
    """How groups connect: `interface_address` to listen on, `timeout_s` after which a collective counts as lost."""

    interface_address: str = "127.0.0.1"
    timeout_s: float = 60.0
    recorder: Recorder | None = None


class Group:
    """One communicator: its members in rank order, and the collectives that runflat uses.

    A group of one member has no backend and its collectives do nothing.
    """

    def __init__(self, name: str, members: Members, place: Place, store: Store, network: Network, cuda: bool):
        """Connect to the other members; blocks until all of them are there or the network's time-out is over."""
        self.name = name
        self.members = members
        self.rank = members.index(place)
        self.size = len(members)
        self._network = network
        self._backend = _backend(name, self.rank, self.size, store, network, cuda) if self.size > 1 else None

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> None:
        """Reduce `tensor` (contiguous) in place over the group and wait for the result."""
        wait_all([self.launch_all_reduce(tensor, op)], self._network.timeout_s, self.name)

    def launch_all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> Any:
        """Start an in-place all-reduce of `tensor` (contiguous); the handle goes to `wait_all`."""
        if self._backend is None:
            return None
        self._record("all_reduce", tensor)
        options = dist.AllreduceOptions()
        options.reduceOp = _REDUCE_OPS[op]
        return self._backend.allreduce([tensor], options)

    def launch_all_to_all(
        self, output: torch.Tensor, source: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Any:
        """Start an all-to-all of flat tensors; `sent[i]` elements go to rank i, `received[i]` come from it."""
        if self._backend is None:
            return None
        self._record("all_to_all", source)
        return self._backend.alltoall_base(output, source, list(received), list(sent))

    def _record(self, operation: str, payload: torch.Tensor) -> None:
        if self._network.recorder is not None:
            self._network.recorder(operation, payload.numel() * payload.element_size(), self.size)

    def close(self) -> None:
        """Drop the backend; its sockets and threads go with it."""
        self._backend = None


def _backend(name: str, rank: int, size: int, store: Store, network: Network, cuda: bool) -> Any:
    prefixed = PrefixStore(name, store)
    if cuda:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=network.timeout_s)
        return dist.ProcessGroupNCCL(prefixed, rank, size, options)
    gloo: Any = ProcessGroupGloo  # torch's stub lacks the options
    options = gloo._Options()
    options._timeout = timedelta(seconds=network.timeout_s)
    options._threads = 1
    options._devices = [gloo.create_device(hostname=network.interface_address)]
    return gloo(prefixed, rank, size, options)


def wait_all(works: Sequence[Any], timeout_s: float, what: str) -> None:
    """Wait until every handle in `works` (None is ready) has finished.

    Raises:
        CommsError: a collective failed, or the deadline passed; the message names `what`.
    """
    deadline = time.monotonic() + timeout_s
    for work in works:
        if work is None:
            continue
        left = max(deadline - time.monotonic(), 0.001)
        try:
            done = work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise CommsError(f"collective on '{what}' failed or took more than {timeout_s:.0f} s: {error}") from error
        if done is False:
            raise CommsError(f"collective on '{what}' did not finish within {timeout_s:.0f} s.")


class Comms:
    """The groups of one generation on one device: the world, this replica's TP group, and the sync groups."""

    def __init__(
        self, store: Store, plan: Plan, layout: SyncLayout, place: Place, network: Network, cuda: bool = False
    ):
        """Form all groups in one global order, so that no two devices wait for each other."""
        self.generation = plan.generation
        self.network = network
        prefix = f"generation{plan.generation}"
        replica = plan.replica(place[0])
        tp_members = tuple((place[0], slot) for slot in replica.live_slots)

        def form(name: str, members: Members) -> Group:
            return Group(f"{prefix}/{name}", members, place, store, network, cuda)

        self.world = form("world", plan.places)
        self.tp = form(f"tp{place[0]}", tp_members)
        self.sync: dict[Members, Group] = {}
        for index, members in enumerate(layout.groups):
            if place in members:
                self.sync[members] = form(f"sync{index}", members)

    def group(self, members: Members) -> Group | None:
        """The sync group of `members`; None for a single member."""
        return self.sync.get(members)

    def wait(self, works: Sequence[Any], what: str) -> None:
        """Wait for handles of any group of this generation; CommsError names `what`."""
        wait_all(works, self.network.timeout_s, what)

    def close(self) -> None:
        """Drop all groups. Blocks while a collective of one of them is unfinished (gloo's destructor waits for it)."""
        for group in (self.world, self.tp, *self.sync.values()):
            group.close()
