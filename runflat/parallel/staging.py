"""Copies of a device's tensors in main memory. From a GPU they pass through two small pinned buffers in turn.

The copies themselves are not pinned: they stay for a long time, and pinned memory is taken from the whole machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

STAGE_BYTES = 16 << 20
"""Size of a pinned buffer. torch keeps freed ones, so that the next copy does not pay for pinning again."""


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU, in memory of its own."""
    if tensor.device.type == "cpu":
        return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return staged_copy(tensor, STAGE_BYTES)


def staged_copy(tensor: torch.Tensor, stage_bytes: int) -> torch.Tensor:
    """`host_copy` by pieces of at most `stage_bytes`: while one is copied on, the device fills the next one."""
    pinned = tensor.device.type == "cuda"
    source = tensor.detach().contiguous().view(-1).view(torch.uint8)
    result = torch.empty(tensor.shape, dtype=tensor.dtype)
    pieces = zip(source.split(stage_bytes), result.view(-1).view(torch.uint8).split(stage_bytes), strict=True)
    free = deque(torch.empty(min(stage_bytes, len(source)), dtype=torch.uint8, pin_memory=pinned) for _ in range(2))
    filling: deque[tuple[torch.Tensor, torch.Tensor, Callable[[], object]]] = deque()

    def empty_oldest() -> None:
        stage, target, await_filled = filling.popleft()
        await_filled()
        target.copy_(stage[: len(target)])
        free.append(stage)

    for part, target in pieces:
        if not free:
            empty_oldest()
        stage = free.popleft()
        stage[: len(part)].copy_(part, non_blocking=True)
        filling.append((stage, target, _reached(tensor.device)))
    while filling:
        empty_oldest()
    return result


def _reached(device: torch.device) -> Callable[[], object]:
    """Waits until `device` has done what was launched so far."""
    if device.type == "cpu":
        return lambda: None
    event = torch.cuda.Event(blocking=True)  # gives the core away meanwhile
    event.record(torch.cuda.current_stream(device))
    return event.synchronize
