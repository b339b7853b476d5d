"""What is left of a gradient exchange when its plan has ended."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from runflat.check.verify import BUCKET_BYTES
from runflat.parallel.comms import Comms, Network
from runflat.parallel.grad_sync import GradSync
from runflat.parallel.owned_sync import OwnedSync
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.sync_groups import sync_layout
from runflat.plan.units import Kind, ModelSpec, ParamSpec, Segment
from runflat.plan.zero import ownership


@pytest.mark.parametrize("owned", [False, True])
def test_nothing_stays_of_an_exchange_that_was_closed(owned: bool) -> None:
    """Catches a circle that keeps an exchange, and its groups' sockets and threads, until the collector comes by."""
    param = ParamSpec("head.weight", (4, 2), "sharded", True, 0, 1, 0, (Segment("vocab", 0),))
    spec = ModelSpec("one", (Kind("vocab", 4, 1),), (param,), 2, 0, 1)
    plan = build_plan(spec, live_devices(1, 1, ()), 1, 1, 8)
    layout = sync_layout(spec, plan, BUCKET_BYTES, 4)
    comms = Comms(HashStore(), plan, layout, (0, 0), Network())
    params = {param.name: nn.Parameter(torch.zeros(4, 2))}
    gc.disable()
    try:
        if owned:
            sync: GradSync | OwnedSync = OwnedSync(plan, layout, ownership(spec, plan, layout), (0, 0), comms, params)
        else:
            sync = GradSync(spec, plan, layout, (0, 0), comms, params)
        alive = weakref.ref(sync)
        sync.close()
        del sync
        assert alive() is None
    finally:
        gc.enable()
