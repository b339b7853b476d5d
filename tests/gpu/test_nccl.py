"""gloo and NCCL with one member, waits for a real device, and the end of real communicators.

A group of two whose second member is NCCL's communicator of one: all that runflat asks of a group is asked of NCCL.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, Store

from runflat.check.live import footprint, until
from runflat.elastic.communicators import ABORT_S, Communicators
from runflat.parallel import gloo, nccl
from runflat.parallel.comms import AbortedError, CommsError, Group, Interrupt, Network, wait_all
from runflat.parallel.sockets import LOOPBACK
from runflat.parallel.staging import host_copy

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nccl_settings")]

MEMBERS = ((0, 0), (0, 1))
TIMEOUT_S = 30.0
NUM_CYCLES = 12
SPARED = 4
"""Cycles before it is measured what stays: the first ones fill caches."""


class Groups:
    """Communicators of one process: makes backends, and ends them as a worker does."""

    def __init__(self) -> None:
        self.stuck: list[str] = []
        self.communicators = Communicators(LOOPBACK, self.stuck.append, linger_s=0.0)
        self._store: Store = HashStore()
        self._number = 0

    def make(self, device: torch.device, generation: int = 1, size: int = 1) -> Any:
        """A backend that has begun to connect; of one that is larger, the others never come."""
        self._number += 1
        name = f"generation{generation}/{self._number}"
        backend = nccl.create(PrefixStore(name, self._store), 0, size, name, TIMEOUT_S)
        self.communicators.made(generation, backend)
        nccl.connect(backend, device)
        return backend

    def pair(self, device: torch.device, network: Network, generation: int = 1) -> Group:
        """A group that takes itself for two."""
        backend = self.make(device, generation)
        network = replace(network, backend=lambda name, rank, size: backend)
        return Group(generation, "pair", MEMBERS, (0, 0), None, network, device)

    def end(self, generation: int) -> None:
        """Abort all of `generation`; returns when they are gone."""
        self.communicators.abort(generation)
        with self.communicators.recording(generation + 1):
            assert not self.communicators._aborts, f"an abort was under way after {ABORT_S} s"
        self.communicators.forget(generation)
        assert not self.stuck


@pytest.fixture
def groups() -> Groups:
    return Groups()


def test_gloo_of_one_beside_a_gpu(gpu: torch.device) -> None:
    """Catches a gloo that cannot take what was copied out of a GPU, as copies in memory and feeds do."""
    backend = gloo.create(HashStore(), 0, 1, LOOPBACK, TIMEOUT_S, TIMEOUT_S)
    copied = host_copy(torch.arange(1000.0, device=gpu))
    wait_all([backend.allreduce([copied])], 1, Network(), "gloo")
    assert torch.equal(copied, torch.arange(1000.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_nccl_of_one(gpu: torch.device, groups: Groups, dtype: torch.dtype) -> None:
    """Catches a communicator that does not form, a type that NCCL refuses, and a good collective taken for failed."""
    ends: list[str] = []

    def launched(name: str, operation: str, num_bytes: int) -> Callable[[], None]:
        return lambda: ends.append(operation)

    group = groups.pair(gpu, Network(launched=launched))
    tensor = torch.arange(1000, device=gpu).to(dtype)
    wanted = tensor.clone()
    work = group.launch_all_reduce(tensor)
    wait_all([work], 1, Network(), group.name, gpu)
    assert not nccl.failed(work)
    group.all_reduce(tensor, "max")
    assert torch.equal(tensor, wanted)
    assert ends == ["all_reduce", "all_reduce"]
    groups.end(1)


def test_nccl_sends_rows(gpu: torch.device, groups: Groups) -> None:
    """Catches an all-to-all with counts that NCCL, or its communicator that does not block, refuses."""
    backend = groups.make(gpu)
    rows, output = torch.randn(5, 3, device=gpu), torch.zeros(5, 3, device=gpu)
    wait_all([backend.alltoall_base(output, rows, [5], [5])], 1, Network(), "rows", gpu)
    assert torch.equal(output, rows)
    groups.end(1)


def test_only_the_stream_waits(gpu: torch.device, groups: Groups, keep_busy: Callable[[], None]) -> None:
    """Catches a host held up by collectives in a replica, and a collective that overtakes what it is to send."""
    group = groups.pair(gpu, Network())
    tensor = torch.zeros(1 << 20, device=gpu)
    tensor += 1
    group.all_reduce(tensor)  # connects
    torch.cuda.synchronize(gpu)
    keep_busy()
    tensor += 1
    group.all_reduce(tensor)
    tensor += 1
    assert not torch.cuda.current_stream(gpu).query(), "the host is ahead of the device"
    assert bool((tensor == 3).all())
    groups.end(1)


def test_a_wait_for_a_busy_gpu_can_be_left(gpu: torch.device, groups: Groups, keep_busy: Callable[[], None]) -> None:
    """Catches a host that sits in the driver: a loss would be noticed only when the device is done, if ever."""
    interrupt = Interrupt()
    group = groups.pair(gpu, Network(interrupt=interrupt))
    tensor = torch.ones(8, device=gpu)
    group.all_reduce(tensor)
    keep_busy()
    work = group.launch_all_reduce(tensor)
    threading.Timer(0.05, interrupt.leave_below, (2,)).start()
    with pytest.raises(AbortedError):
        wait_all([work], 1, Network(interrupt=interrupt), group.name, gpu)
    assert not torch.cuda.current_stream(gpu).query()
    groups.end(1)


def test_a_wait_for_a_gpu_has_an_end(gpu: torch.device, groups: Groups, keep_busy: Callable[[], None]) -> None:
    """Catches a wait without a deadline, and one whose end aborts its communicator alone (pytorch#119797)."""
    backend = groups.make(gpu)
    tensor = torch.ones(8, device=gpu)
    wait_all([backend.allreduce([tensor])], 1, Network(), "first", gpu)
    keep_busy()
    work = backend.allreduce([tensor])
    with pytest.raises(CommsError, match="did not finish"):
        wait_all([work], 1, Network(timeout_s=0.05), "short", gpu)
    wait_all([work, backend.allreduce([tensor])], 1, Network(), "again", gpu)
    groups.end(1)


def test_all_go_at_once_and_others_come(gpu: torch.device, groups: Groups, keep_busy: Callable[[], None]) -> None:
    """Catches an abort that hangs (pytorch#149153), a member that never came among them, and a process that is spent.

    Three communicators of one generation: one at rest, one with work in flight, one that waits for its second member.
    """
    idle, busy = groups.make(gpu), groups.make(gpu)
    tensor = torch.ones(1 << 20, device=gpu)
    for backend in (idle, busy):
        wait_all([backend.allreduce([tensor])], 1, Network(), "first", gpu)
    groups.make(gpu, size=2)
    keep_busy()
    interrupt = Interrupt()
    work = busy.allreduce([tensor])
    interrupt.leave_below(2)
    groups.end(1)
    with pytest.raises(AbortedError):
        wait_all([work], 1, Network(interrupt=interrupt), "aborted", gpu)
    fresh = groups.make(gpu, generation=2)
    tensor = torch.full((1 << 20,), 7.0, device=gpu)
    wait_all([fresh.allreduce([tensor])], 2, Network(), "fresh", gpu)
    assert bool((tensor == 7).all())
    groups.end(2)


def test_a_member_that_never_comes_fails_in_time(gpu: torch.device, groups: Groups) -> None:
    """Catches a first collective that waits for ever for a group that does not form, or cannot be aborted then."""
    backend = groups.make(gpu, size=2)
    with pytest.raises(RuntimeError):  # after nccl.NONBLOCKING_S, in torch
        backend.allreduce([torch.ones(8, device=gpu)])
    groups.end(1)


def test_nothing_stays_of_what_is_over(gpu: torch.device, groups: Groups) -> None:
    """Catches threads, descriptors and device memory of each generation that stay (pytorch#129868, pytorch#40400)."""
    occupied: list[tuple[int, int, int]] = []
    tensor = torch.ones(1 << 16, device=gpu)
    for generation in range(1, NUM_CYCLES + 1):
        backends = [groups.make(gpu, generation) for _ in range(3)]
        wait_all([backend.allreduce([tensor]) for backend in backends], generation, Network(), "cycle", gpu)
        groups.end(generation)
        del backends
        torch.cuda.synchronize(gpu)
        until("the threads of aborts", lambda: not _helpers(), TIMEOUT_S)
        seen = footprint(os.getpid())
        occupied.append((seen.num_threads, seen.num_descriptors, torch.cuda.mem_get_info(gpu)[0]))
    (threads, descriptors, free_bytes), last = occupied[SPARED], occupied[-1]
    assert last[0] <= threads, occupied
    assert last[1] <= descriptors, occupied
    assert last[2] >= free_bytes - (32 << 20), occupied


def _helpers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("nccl")]
