"""All process groups of one generation on one device, in one object that is passed as an argument.

There is no default process group and nothing is registered globally: several generations, and all ranks of a test, can
live in one process. Groups are raw backends over a store prefix that carries the generation, so that a key or a
connection of an older generation is never met.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from runflat.errors import RunError
from runflat.parallel import gloo, nccl
from runflat.plan.plan import Place, Plan
from runflat.plan.sync_groups import Members, SyncLayout

Op = Literal["sum", "max"]
Recorder = Callable[[str, int, int], None]
"""Called with (operation, payload bytes, members) for every collective that is launched."""

SLICE_S = 0.2
"""Longest uninterrupted wait inside the backend: after this a waiting thread looks whether it is to leave."""

POLL_S = 1e-4
"""Pause between two looks at what a device does. They never block; a wait in the driver could not be left."""

CPU = torch.device("cpu")

_REDUCE_OPS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class CommsError(RunError):
    """A collective failed or did not end in time. On its own it says nothing about who is at fault."""


class AbortedError(RunError):
    """The generation that a wait belongs to has been left."""


class Interrupt:
    """Tells waiting threads to leave: every generation below `target`. Set by one thread, seen by all.

    Without it survivors of a loss that the controller knows of would wait for their time-out (torchft#164).
    """

    def __init__(self) -> None:
        """Nobody is to leave."""
        self.changed = threading.Condition()
        self.target = 0

    def leave_below(self, generation: int) -> None:
        """Wake all waiting threads of generations below `generation`."""
        with self.changed:
            self.target = max(self.target, generation)
            self.changed.notify_all()

    def check(self, generation: int) -> None:
        """Raise `AbortedError` if `generation` is to be left."""
        if generation < self.target:
            raise AbortedError(f"generation {generation} was left for generation {self.target}.")

    def rest(self, generation: int, seconds: float) -> None:
        """Sleep; raises `AbortedError` as soon as `generation` is to be left."""
        with self.changed:
            self.changed.wait_for(lambda: generation < self.target, seconds)
        self.check(generation)


@dataclass(frozen=True)
class Network:
    """How groups connect: `interface_address` to listen on, `timeout_s` after which a collective counts as lost.

    `meet_timeout_s` bounds the wait for all members of a group, `form_timeout_s` its forming then; `backend`, called
    with (group name, rank, size), stands in for gloo and NCCL (a fake network, in tests); `interrupt` ends waits from
    another thread; `waiting` is told what a thread waits for once that takes longer than a slice, and None when it is
    over; `waited` the seconds of each wait on the host; `made` each backend of NCCL as it is made, with its generation.
    """

    interface_address: str = "127.0.0.1"
    timeout_s: float = 60.0
    meet_timeout_s: float = 30.0
    form_timeout_s: float = 30.0
    recorder: Recorder | None = None
    backend: Callable[[str, int, int], Any] | None = None
    interrupt: Interrupt = field(default_factory=Interrupt)
    waiting: Callable[[str | None], None] = lambda what: None
    waited: Callable[[float], None] = lambda seconds: None
    made: Callable[[int, Any], None] = lambda generation, backend: None
    launched: Callable[[str, str, int], Callable[[], None] | None] | None = None
    """Called with (group, operation, bytes) as a collective is launched; what it returns is called at its end."""


class Group:
    """One communicator: its members in rank order, and the collectives that runflat uses.

    A group of one member has no backend and its collectives do nothing.
    """

    def __init__(
        self,
        generation: int,
        name: str,
        members: Members,
        place: Place,
        store: Store | None,
        network: Network,
        device: torch.device = CPU,
    ):
        """Connect to the other members; blocks until all of them are there or the forming time-out is over."""
        self.generation = generation
        self.name = f"generation{generation}/{name}"
        self.members = members
        self.rank = members.index(place)
        self.size = len(members)
        self._network = network
        self._device = device
        self._backend: Any = None
        if self.size > 1:
            if network.backend is not None:
                self._backend = network.backend(self.name, self.rank, self.size)
            else:
                assert store is not None
                meet = PrefixStore(self.name, store)  # keys of an older generation are never met (pytorch#135712)
                self._backend = self._connected(meet)

    def _connected(self, store: Store) -> Any:
        """The backend: of gloo, or of NCCL, which goes on connecting while this device forms its next group."""
        network = self._network
        try:
            # gloo begins only when all are here: its own time-out is short, and must not count for who comes late.
            store.set(f"here/{self.rank}", "")
            here = [f"here/{member}" for member in range(self.size)]
            store.wait(here, timedelta(seconds=network.meet_timeout_s))
            if self._device.type == "cpu":
                return gloo.create(
                    store,
                    self.rank,
                    self.size,
                    network.interface_address,
                    network.form_timeout_s,
                    network.timeout_s,
                )
            backend = nccl.create(store, self.rank, self.size, self.name, network.timeout_s)
            network.made(self.generation, backend)
            nccl.connect(backend, self._device)
        except RuntimeError as error:
            raise CommsError(f"a group of {self.size} devices did not form: {error}") from error
        return backend

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> None:
        """Reduce `tensor` (contiguous) in place over the group and wait for the result."""
        self.wait([self.launch_all_reduce(tensor, op)])

    def launch_all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> Any:
        """Start an in-place all-reduce of `tensor` (contiguous); the handle goes to `wait`."""
        if self._backend is None:
            return None
        options = dist.AllreduceOptions()
        options.reduceOp = _REDUCE_OPS[op]
        return self._launch("all_reduce", tensor.nbytes, lambda backend: backend.allreduce([tensor], options))

    def launch_all_to_all(
        self, output: torch.Tensor, source: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Any:
        """Start an all-to-all; `sent[i]` rows of `source` go to rank i, `received[i]` of `output` come from it.

        What a device keeps for itself does not count as sent.
        """
        if self._backend is None:
            return None
        sizes = list(received), list(sent)
        num_bytes = (sum(sent) - sent[self.rank]) * prod(source.shape[1:]) * source.element_size()
        return self._launch("all_to_all", num_bytes, lambda backend: backend.alltoall_base(output, source, *sizes))

    def _launch(self, operation: str, num_bytes: int, call: Callable[[Any], Any]) -> Any:
        self._network.interrupt.check(self.generation)
        if self._network.recorder is not None:
            self._network.recorder(operation, num_bytes, self.size)
        launched = self._network.launched
        ended = launched(self.name, operation, num_bytes) if launched else None
        # The handle keeps the payload alive, whatever streams it is used on, until it is waited for.
        with failing(f"a collective on '{self.name}' could not be started"):
            work = call(self._backend)
            if ended is not None:
                work.get_future().add_done_callback(lambda _: ended())
        return work

    def wait(self, works: Sequence[Any]) -> None:
        """Wait for handles of this group's generation: on the CPU the thread does, on a GPU only its stream.

        Raises:
            CommsError: a collective failed, or the deadline passed; the message names the group.
            AbortedError: the generation was left meanwhile.
        """
        if self._device.type == "cpu":
            wait_all(works, self.generation, self._network, self.name)
            return
        for work in works:
            self._network.interrupt.check(self.generation)
            if work is not None:
                with failing(f"a collective on '{self.name}' failed"):
                    work.wait()

    def close(self) -> None:
        """Drop the backend; its sockets and threads go with it."""
        self._backend = None


@contextmanager
def failing(what: str) -> Iterator[None]:
    """What a backend raises becomes a `CommsError`: `what`, and why. An error of the device stays what it is."""
    try:
        yield
    except RuntimeError as error:
        if nccl.is_device_error(error):
            raise
        raise CommsError(f"{what}: {error}") from error


def wait_all(works: Sequence[Any], generation: int, network: Network, what: str, device: torch.device = CPU) -> None:
    """Wait on the host until every handle in `works` (None is ready) has finished.

    A backend may never signal a collective whose peer has died, so the thread waits in slices and looks in between
    whether its generation is to be left.

    Raises:
        CommsError: a collective failed, or the deadline passed; the message names `what`.
        AbortedError: the generation was left meanwhile.
    """
    look = _look if device.type == "cpu" else _look_at_device
    looks = [partial(look, work, generation, network, what) for work in works if work is not None]
    _wait(looks, generation, network, what)


Look = Callable[[], tuple[bool, RuntimeError | None]]
"""Waits a moment: whether what it waits for has ended, and what was said instead."""


def _wait(looks: Sequence[Look], generation: int, network: Network, what: str) -> None:
    began = time.monotonic()
    told = False
    for look in looks:
        network.interrupt.check(generation)
        ended, said = look()
        while not ended:
            waited_s = time.monotonic() - began
            if not told and waited_s > SLICE_S / 2:
                network.waiting(what)
                told = True
            if waited_s > network.timeout_s:
                raise CommsError(f"collective on '{what}' did not finish within {network.timeout_s:.0f} s.") from said
            network.interrupt.check(generation)
            ended, said = look()
    network.waited(time.monotonic() - began)
    if told:
        network.waiting(None)


def _look(work: Any, generation: int, network: Network, what: str) -> tuple[bool, RuntimeError | None]:
    try:
        return work.wait(timedelta(seconds=SLICE_S)) is not False, None
    except RuntimeError as error:
        # The slice is over, or the collective has failed; only a finished one knows.
        if not work.is_completed():
            return False, error
    try:
        work.wait(timedelta(seconds=SLICE_S))
    except RuntimeError as error:
        network.interrupt.check(generation)
        raise CommsError(f"collective on '{what}' failed: {error}") from error
    return True, None


def _look_at_device(work: Any, generation: int, network: Network, what: str) -> tuple[bool, RuntimeError | None]:
    # Never a wait with a time-out: when it is over, torch aborts this communicator alone, from here (pytorch#119797).
    if not work.is_completed():
        network.interrupt.rest(generation, POLL_S)
        return False, None
    network.interrupt.check(generation)  # what is in flight is ended by an abort, too
    if nccl.failed(work):
        raise CommsError(f"collective on '{what}' failed.")
    work.wait()  # orders this thread's stream behind it, and lets torch drop what it kept of the payload
    return True, None


class Comms:
    """The groups of one generation on one device: world, its replica's for TP and for resharding, sync groups.

    `reshard` is None where nothing moves inside the replica.
    """

    def __init__(
        self, store: Store, plan: Plan, layout: SyncLayout, place: Place, network: Network, device: torch.device = CPU
    ):
        """Form all groups in one global order, so that no two devices wait for each other."""
        self.generation = plan.generation
        self.network = network
        self.device = device
        replica = plan.replica(place[0])
        tp_members = tuple((place[0], slot) for slot in replica.live_slots)

        def form(name: str, members: Members) -> Group:
            network.interrupt.check(plan.generation)
            return Group(plan.generation, name, members, place, store, network, device)

        self.world = form("world", plan.places)
        self.tp = form(f"tp{place[0]}", tp_members)
        moving = any(number == place[0] for _, number in layout.resharded)
        self.reshard = form(f"reshard{place[0]}", tp_members) if moving else None
        self.sync: dict[Members, Group] = {}
        for index, members in enumerate(layout.groups):
            if place in members:
                self.sync[members] = form(f"sync{index}", members)

    def group(self, members: Members) -> Group | None:
        """The sync group of `members`; None for a single member."""
        return self.sync.get(members)

    def prove(self) -> None:
        """Have groups count their members: all of them where a group connects at its first use, else the world.

        A group that has formed may still be wrong (NVIDIA/nccl#2397).

        Raises:
            CommsError: a group does not work.
        """
        groups = [self.world] if self.device.type == "cpu" else self.groups()
        # Typed, since torch's default type belongs to the process: another thread may be building its model in float64.
        for group in groups:
            ones = torch.ones(1, dtype=torch.float32, device=self.device)
            self.wait([group.launch_all_reduce(ones)], group.name)
            if int(ones) != group.size:
                raise CommsError(f"the first all-reduce of generation {self.generation} counted {int(ones)} devices.")

    def groups(self) -> list[Group]:
        """All groups, in the order in which they form."""
        return [group for group in (self.world, self.tp, self.reshard, *self.sync.values()) if group is not None]

    def reduce(self, tensor: torch.Tensor, op: Op = "sum") -> None:
        """Reduce `tensor` in place over all devices, and wait on the host for the result."""
        self.wait([self.world.launch_all_reduce(tensor, op)], self.world.name)

    def wait(self, works: Sequence[Any], what: str) -> None:
        """Wait on the host for handles of any group of this generation; the error names `what`."""
        wait_all(works, self.generation, self.network, what, self.device)

    def catch_up(self, what: str) -> None:
        """Wait on the host until the device has done what was launched so far, before the host reads a result.

        Read at once, it would be waited for in the driver, where nobody knows why and an abort ends no wait.
        """
        if self.device.type == "cpu":
            return
        reached = torch.cuda.Event()
        reached.record()

        def look() -> tuple[bool, None]:
            if reached.query():
                return True, None
            self.network.interrupt.rest(self.generation, POLL_S)
            return False, None

        _wait([look], self.generation, self.network, what)

    def close(self) -> None:
        """Drop all groups. Blocks while a collective of one of them is unfinished (gloo's destructor waits for it)."""
        for group in self.groups():
            group.close()
