"""What the groups of a generation prove before anybody uses them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from runflat.elastic.formation import Formation
from runflat.parallel.comms import Network
from runflat.parallel.sockets import Sockets
from runflat.plan.plan import Plan, ReplicaPlan

PLAN = Plan(0, 1, (ReplicaPlan(0, ("0:0",), (), 1), ReplicaPlan(1, ("1:0",), (), 1)))


@pytest.fixture
def building() -> Iterator[None]:
    """While it lasts some thread of this process builds a float64 model, as transformers does it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def test_the_proof_does_not_depend_on_torchs_default_type(building: None) -> None:
    """Catches 8 bytes sent to a rank that takes 4: where ranks are threads, gloo then ends the whole process."""
    sent: list[torch.dtype] = []

    class Double:
        def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
            sent.append(tensors[0].dtype)
            tensors[0] *= 2
            return SimpleNamespace(wait=lambda timeout: True)

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    network = Network(backend=lambda name, rank, size: Double())
    layout: Any = SimpleNamespace(groups=(), resharded=())
    Formation(PLAN, layout, (0, 0), network, Sockets(), ("127.0.0.1", store.port), torch.device("cpu")).wait()
    assert sent == [torch.float32]
