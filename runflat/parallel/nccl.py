"""NCCL as runflat uses it: what its processes are told, and communicators that do not block.

What torch does is from the source of 2.13. Nothing here has run on a GPU (docs/limits.md).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store

NONBLOCKING_S = 5
"""Longest wait inside torch for a call of NCCL that is under way. It holds a lock that an abort needs too."""

PROCESS_SETTINGS = {
    # The watchdog is to watch only: by default it ends the process, once an error or a time-out is seen
    # (pytorch#126544). What to do is decided here, and by the controller, which has the whole view.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # A wait that blocks in torch aborts its own communicator when it is over, alone (pytorch#119797).
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # After an error the watchdog sleeps for four times this long, and a group is only gone when its watchdog has ended.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(NONBLOCKING_S),
}
"""Environment of a worker process. torch has no other way to set these, and reads them when a group is made."""


def site_settings(interface: str | None) -> dict[str, str]:
    """Settings of NCCL that hold unless the site has its own: the `interface` of the network that was chosen."""
    # Multicast memory (NVLS) outlives an abort: nvidia-resiliency-ext 0.7 asks for this too where processes stay.
    settings = {"NCCL_NVLS_ENABLE": "0"}
    if interface is not None:
        settings["NCCL_SOCKET_IFNAME"] = f"={interface}"  # by its whole name: NCCL takes a bare one as a prefix
    return settings


def create(store: Store, rank: int, size: int, name: str, timeout_s: float) -> Any:
    """A backend that is not connected yet: `connect` does that.

    Each generation makes new communicators from nothing but the store: none is split off or shrunk from one whose
    members are gone (NVIDIA/nccl#2397, pytorch#194679).
    """
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.group_name = name
    # A blocking call cannot be aborted from another thread. torch leaves it off since NCCL 2.26 hung (pytorch#153960).
    options.config.blocking = 0
    return nccl(store, rank, size, options)


def connect(backend: Any, device: torch.device) -> None:
    """Begin to connect, now and not in the first collective, which may be in the middle of a backward pass."""
    backend.eager_connect_single_device(device)


def failed(work: Any) -> bool:
    """Whether a collective that has ended did so by an error. Asking `wait` would abort its communicator, alone."""
    result = work.get_future_result()
    return bool(result.done() and result.value() != 0)  # torch's WorkResult.SUCCESS


def is_device_error(error: BaseException) -> bool:
    """Whether the device is to blame: its context is lost, so this process can only end (pytorch#126544).

    An assertion in a kernel is a bug, which would come again on the next device.
    """
    return isinstance(error, torch.AcceleratorError) and "device-side assert" not in str(error)
