"""Streams, copies, events, memory and numbers of a real GPU."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

from runflat.elastic.joining import self_test
from runflat.parallel.digest import checksum
from runflat.parallel.nccl import is_device_error
from runflat.parallel.staging import STAGE_BYTES, host_copy
from runflat.train.device_clock import DeviceClock
from runflat.train.job import peak_bytes, worker_device

pytestmark = pytest.mark.gpu


def test_a_worker_gets_a_gpu(gpu: torch.device) -> None:
    """Catches a worker that computes on the CPU beside an idle GPU, and one with another current device."""
    assert worker_device(0) == gpu
    assert torch.cuda.current_device() == gpu.index
    assert worker_device(0, emulated=True).type == "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("num_bytes", [8, STAGE_BYTES - 8, STAGE_BYTES, 5 * STAGE_BYTES + 24])
def test_every_byte_leaves_the_gpu(gpu: torch.device, dtype: torch.dtype, num_bytes: int) -> None:
    """Catches a pinned buffer that is read before the device has filled it, or filled again before it was read."""
    words = torch.arange(num_bytes // 8, device=gpu) * 0x9E3779B97F4A7C1
    copied = host_copy(words.view(dtype))
    assert copied.device.type == "cpu"
    assert not copied.is_pinned(), "pinned memory is the whole machine's: a copy that stays must not be pinned"
    assert torch.equal(copied.view(torch.int64), torch.arange(num_bytes // 8) * 0x9E3779B97F4A7C1)


def test_a_copy_is_of_the_moment(gpu: torch.device, keep_busy: Callable[[], None]) -> None:
    """Catches a copy that overtakes the step whose result it is to hold, and one that follows the next step."""
    tensor = torch.zeros(3 * STAGE_BYTES // 4, device=gpu)
    keep_busy()
    tensor += 1
    copied = host_copy(tensor.view(3, -1).t())
    tensor += 1
    assert copied.shape == (STAGE_BYTES // 4, 3)
    assert copied.is_contiguous()
    assert bool((copied == 1).all())


def test_a_copy_takes_no_memory_of_the_gpu(gpu: torch.device) -> None:
    """Catches a second copy of the shard on a device that is full."""
    tensor = torch.zeros(1 << 26, device=gpu)
    torch.cuda.reset_peak_memory_stats(gpu)
    before = peak_bytes(gpu)
    assert before >= tensor.nbytes
    host_copy(tensor)
    assert peak_bytes(gpu) == before


def test_the_clock_of_the_gpu_is_that_of_the_host(gpu: torch.device, keep_busy: Callable[[], None]) -> None:
    """Catches a profile whose device times are in other units or from another zero, and marks that stop the device."""
    clock = DeviceClock(time.monotonic)
    clock.mark()  # the first one waits
    torch.cuda.synchronize(gpu)
    began_s = time.monotonic()
    first = clock.mark()
    keep_busy()
    second = clock.mark()
    assert not torch.cuda.current_stream(gpu).query(), "a mark waits for nothing"
    first_s, second_s = first(), second()
    ended_s = time.monotonic()
    slack_s = 0.05
    assert began_s - slack_s <= first_s < second_s <= ended_s + slack_s
    assert second_s - first_s > 0.8 * (ended_s - began_s)


def test_a_product_is_exact(gpu: torch.device) -> None:
    """Catches a healthy device that is sent away by the test that each newcomer must pass."""
    assert self_test(gpu) == ""


def test_a_digest_is_the_same_on_a_gpu(gpu: torch.device) -> None:
    """Catches holders that differ by where they count: a wrapped product or a shift that a device does otherwise."""
    words = torch.arange(1 << 20) * 0x2545F4914F6CDD1D
    flipped = words.clone()
    flipped[12345] ^= 1 << 62
    assert checksum(words.to(gpu)) == checksum(words)
    assert checksum(flipped.to(gpu)) == checksum(flipped) != checksum(words)


def test_bf16_is_that_of_the_cpu(gpu: torch.device) -> None:
    """Catches a device that rounds otherwise (it is to round to the nearest) or sums products in bf16."""
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(256, 256, generator=generator) for _ in range(2))
    assert torch.equal(left.to(gpu).bfloat16().cpu(), left.bfloat16())
    exact = left.bfloat16().double() @ right.bfloat16().double()
    product = (left.bfloat16().to(gpu) @ right.bfloat16().to(gpu)).double().cpu()
    assert float((product - exact).norm() / exact.norm()) < 2**-8


def test_memory_that_has_run_out_is_not_the_devices_fault(gpu: torch.device) -> None:
    """Catches a job that is too large taken for a broken device: one after the other would be given up."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8, device=gpu)
    assert not is_device_error(caught.value)


def test_an_assertion_in_a_kernel_is_not_the_devices_fault(gpu: torch.device) -> None:
    """Catches an index that is out of range taken for a broken device. It ends the context: in a process of its own."""
    program = """
import sys, torch
from runflat.parallel.nccl import is_device_error
try:
    torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]
    torch.cuda.synchronize()
except RuntimeError as error:
    sys.exit(f"taken for a broken device: {error!r}" if is_device_error(error) else 0)
sys.exit("no error was raised")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 0, done.stderr[-2000:]
