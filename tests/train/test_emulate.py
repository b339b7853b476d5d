"""What emulated devices are billed for a step."""

import pytest
import torch

from runflat.check.small import proof_config
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.cost import device_traffic
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.sync_groups import sync_layout
from runflat.plan.zero import ownership
from runflat.train.emulate import DeviceModel, step_seconds

SEQ_LEN = 16


@pytest.mark.parametrize("rate_flops", [1e3, 1e18], ids=["hidden", "exposed"])
def test_weights_of_other_devices_are_not_hidden_by_backward(rate_flops: float) -> None:
    """Catches zero1 billed as an all-reduce: what gathers weights comes after the update, which waits for backward."""
    spec = read_rules(build_meta_model(proof_config("llama-gqa4"), torch.float32), 4).spec
    plan = build_plan(spec, live_devices(4, 3, [(1, 2)]), 4, 6, SEQ_LEN)
    layout = sync_layout(spec, plan, 1 << 16, 4)
    owned = ownership(spec, plan, layout)
    model = DeviceModel(rate_flops, network_bytes=1e6)
    for place in plan.places:
        billed = step_seconds(model, spec, plan, layout, place, SEQ_LEN, 1, owned)
        alone = step_seconds(DeviceModel(rate_flops), spec, plan, layout, place, SEQ_LEN, 1, owned)
        sent = device_traffic(spec, plan, layout, place, SEQ_LEN, 1, 4, owned=owned)
        exposed = sent.gathered_bytes
        if rate_flops > 1e6:
            exposed += sent.sync_bytes + sent.replicated_bytes
        assert exposed > 0
        assert billed == pytest.approx(alone + exposed / 1e6)
