"""Waits for what a GPU does, with handles that behave as those of NCCL in torch's source."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runflat.errors import ConfigError
from runflat.parallel import nccl
from runflat.parallel.comms import AbortedError, CommsError, Group, Interrupt, Network, wait_all
from runflat.train.job import gpu_number

GPU = torch.device("cuda", 0)
MEMBERS = ((0, 0), (0, 1))


@dataclass
class DeviceWork:
    """A collective on a device: it has ended after `looks` looks, as `outcome` says (torch's WorkResult)."""

    looks: int = 0
    outcome: int = 0
    waits: list[tuple[Any, ...]] = field(default_factory=list)
    at_look: Callable[[int], object] = lambda left: None

    def is_completed(self) -> bool:
        self.at_look(self.looks)
        self.looks -= 1
        return self.looks < 0

    def get_future_result(self) -> Any:
        done = self.looks < 0 and self.outcome != 0
        return SimpleNamespace(done=lambda: done, value=lambda: self.outcome)

    def wait(self, *time_out: Any) -> bool:
        self.waits.append(time_out)
        return True


def test_the_host_looks_and_never_waits_with_a_time_out() -> None:
    """Catches the wait of gloo used for NCCL: after a slice torch aborts that one communicator (pytorch#119797)."""
    work = DeviceWork(looks=3)
    wait_all([work, None], 1, Network(), "sync", GPU)
    assert work.looks < 0
    assert work.waits == [()], "after its end, once, to order the stream"


def test_a_collective_that_failed_is_told_without_a_wait() -> None:
    """Catches a wait for a failed collective, in which torch aborts its communicator alone."""
    work = DeviceWork(looks=1, outcome=2)
    with pytest.raises(CommsError, match="'sync' failed"):
        wait_all([work], 1, Network(), "sync", GPU)
    assert work.waits == []


def test_what_an_abort_has_ended_does_not_count_as_done() -> None:
    """Catches the garbage of an aborted collective taken for its result: its event is done like that of a good one."""
    interrupt = Interrupt()
    work = DeviceWork(looks=1, at_look=lambda left: interrupt.leave_below(2) if not left else None)
    with pytest.raises(AbortedError):
        wait_all([work], 1, Network(interrupt=interrupt), "sync", GPU)
    assert work.waits == []


def test_a_wait_for_a_device_has_a_name_and_an_end() -> None:
    """Catches a device that waits for its peers and looks as if it worked, for which it would be killed."""
    said: list[str | None] = []
    with pytest.raises(CommsError, match="'sync' did not finish within 0 s"):
        wait_all([DeviceWork(looks=10**9)], 1, Network(timeout_s=0.15, waiting=said.append), "sync", GPU)
    assert said == ["sync"]


def test_a_leave_wakes_the_wait_for_a_device() -> None:
    """Catches a wait that lasts until its time-out though the generation was left."""
    interrupt, looking = Interrupt(), threading.Event()
    work = DeviceWork(looks=10**9, at_look=lambda left: looking.set())

    def leave() -> None:
        looking.wait(10)
        interrupt.leave_below(2)

    threading.Thread(target=leave).start()
    with pytest.raises(AbortedError):
        wait_all([work], 1, Network(interrupt=interrupt), "sync", GPU)


def test_inside_a_replica_only_the_stream_waits() -> None:
    """Catches the thread that launches forward and backward held up by each of its collectives."""
    work = DeviceWork(looks=10**9)
    backend = SimpleNamespace(allreduce=lambda tensors, options: work)
    group = Group(1, "tp0", MEMBERS, (0, 0), None, Network(backend=lambda *_: backend), GPU)
    group.all_reduce(torch.ones(1))
    assert work.looks == 10**9
    assert work.waits == [()]


def test_a_backend_is_known_before_it_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches groups that hang while they form and that no abort reaches; blocking ones; a first use that connects."""
    made: list[tuple[int, Any]] = []

    class Backend:
        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            self.options = options

        def eager_connect_single_device(self, device: torch.device) -> None:
            assert made == [(7, self)]
            raise RuntimeError(f"no way to {device}")

    def options() -> Any:
        return SimpleNamespace(config=SimpleNamespace(blocking=None))

    backend: Any = type("ProcessGroupNCCL", (Backend,), {"Options": staticmethod(options)})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", backend, raising=False)
    store = dist.HashStore()
    store.set("generation7/pair/here/1", "")
    network = Network(made=lambda generation, backend: made.append((generation, backend)))
    with pytest.raises(CommsError, match="did not form: no way to cuda:0"):
        Group(7, "pair", MEMBERS, (0, 0), store, network, GPU)
    ((_, formed),) = made
    assert formed.options.config.blocking == 0
    assert formed.options.group_name == "generation7/pair"


def test_a_broken_device_is_no_failed_collective() -> None:
    """Catches a lost CUDA context that is reported as a suspicion about peers: this process can only end."""

    def allreduce(tensors: list[torch.Tensor], options: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")

    backend = SimpleNamespace(allreduce=allreduce)
    group = Group(1, "tp0", MEMBERS, (0, 0), None, Network(backend=lambda *_: backend), GPU)
    with pytest.raises(torch.AcceleratorError):
        group.all_reduce(torch.ones(1))
    assert nccl.is_device_error(torch.AcceleratorError("CUDA error: unspecified launch failure"))
    assert not nccl.is_device_error(torch.AcceleratorError("CUDA error: device-side assert triggered"))
    assert not nccl.is_device_error(torch.OutOfMemoryError("CUDA out of memory"))


def test_the_names_are_torchs() -> None:
    """Catches a typing error in what only runs on a GPU: wheels for CPUs have a stub of NCCL's class only."""
    for name in ("is_completed", "get_future_result", "wait", "get_future"):
        assert hasattr(dist.Work, name), name
    backend: Any = torch._C._distributed_c10d.Backend
    for name in ("abort", "eager_connect_single_device", "allreduce", "alltoall_base"):
        assert hasattr(backend, name), name
    assert int(torch._C._distributed_c10d.WorkResult.SUCCESS) == 0
    stub = (Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi").read_text()
    own = stub[stub.index("class ProcessGroupNCCL") :]
    for text in ("blocking: int", "config: ProcessGroupNCCL.NCCLConfig", "def abort(self)", "options: Options,"):
        assert text in own[: own.index("class ProcessGroupUCC")], text
    for name in ("Event", "Stream", "mem_get_info", "memory_reserved", "max_memory_allocated", "set_device"):
        assert hasattr(torch.cuda, name), name


def test_settings_of_the_site_are_those_of_the_network() -> None:
    """Catches NCCL on another network than the one that was chosen, and a prefix taken for a name."""
    assert nccl.site_settings("eth1")["NCCL_SOCKET_IFNAME"] == "=eth1"
    assert "NCCL_SOCKET_IFNAME" not in nccl.site_settings(None)
    assert nccl.PROCESS_SETTINGS["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


@pytest.mark.parametrize(("index", "num_gpus", "number"), [(0, 8, 0), (7, 8, 7), (0, 1, 0), (5, 1, 0)])
def test_each_worker_has_its_gpu(index: int, num_gpus: int, number: int) -> None:
    """Catches two workers on one GPU, and a worker that is shown its own one only and asks for another."""
    assert gpu_number(index, num_gpus) == number


def test_more_workers_than_gpus_are_refused() -> None:
    """Catches two workers that share a GPU in silence."""
    with pytest.raises(ConfigError, match="worker 8 of this machine has no GPU: torch sees 8"):
        gpu_number(8, 8)
