"""Declared time: the replay by hand, and what it says of the two ways to exchange gradients."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from runflat.check.exchange import Recorded, record
from runflat.check.timeline import Compute, Launch, Links, Trace, Wait, fair_rates, only, replay, without_compute
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.cost import device_traffic
from runflat.plan.plan import Place
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.sync_groups import Sync, SyncLayout, sync_layout
from runflat.plan.units import ModelSpec

LINKS = Links(domain_bytes=90.0, network_bytes=10.0)
A, B, C = (0, 0), (1, 0), (0, 1)


def trace(members: dict[str, tuple[Place, ...]], **acts: list[Compute | Launch | Wait]) -> Trace:
    """Returns a trace of the places A, B and C."""
    places = {"a": A, "b": B, "c": C}
    ranks = {(name, rank): place for name, group in members.items() for rank, place in enumerate(group)}
    return Trace({places[name]: found for name, found in acts.items()}, ranks)


def test_transfer_under_compute_is_hidden() -> None:
    """Catches a collective that starts before its last member has launched it, and waiting that is not waited for."""
    key = ("sync0", 1)
    late = [Compute(2.0), Launch(key, 50.0, 50.0), Compute(1.0), Wait(key)]
    early = [Launch(key, 50.0, 50.0), Compute(4.0), Wait(key), Compute(1.0)]
    found = trace({"sync0": (A, B)}, a=late, b=early)
    timeline = replay(found, LINKS)
    assert [(span.start_s, span.end_s) for span in timeline.spans[A]] == [(2.0, 7.0)]
    assert timeline.spans[A] == timeline.spans[B]
    assert timeline.end_s == {A: 7.0, B: 8.0}
    assert timeline.computed_s == {A: 3.0, B: 8.0}
    assert replay(without_compute(found), LINKS).total_s == 5.0


def test_one_communicator_is_a_queue_and_ports_are_shared() -> None:
    """Catches collectives of one group side by side, and groups of one device that each get its whole port."""
    queue = [Launch(("sync0", 1), 10.0, 10.0), Launch(("sync0", 2), 10.0, 10.0)]
    assert replay(trace({"sync0": (A, B)}, a=queue, b=queue), LINKS).total_s == 2.0
    one, two = Launch(("sync0", 1), 10.0, 10.0), Launch(("sync1", 1), 30.0, 30.0)
    inside = Launch(("reshard0", 1), 360.0, 0.0)
    groups = {"sync0": (A, B), "sync1": (A, B), "reshard0": (A, C)}
    timeline = replay(trace(groups, a=[one, two, inside], b=[one, two], c=[inside]), LINKS)
    ends = {span.key[0]: span.end_s for span in timeline.spans[A]}
    # At half the port each until the short one ends; the domain's port is another one, nine times as fast.
    assert ends == {"sync0": 2.0, "sync1": 4.0, "reshard0": 4.0}
    assert replay(only(trace(groups, a=[one, two], b=[one, two]), lambda key: key[0] == "sync1"), LINKS).total_s == 3.0


def test_fair_shares() -> None:
    """Catches a share that a flow held up elsewhere cannot use, and that nobody gets."""
    flows = [((A, B), False), ((B, (2, 0)), False), (((2, 0), (3, 0)), False), (((2, 0), (4, 0)), False)]
    assert fair_rates(flows, LINKS) == pytest.approx([20 / 3, 10 / 3, 10 / 3, 10 / 3])
    assert fair_rates([((A, C), True), ((A, B), False)], LINKS) == [90.0, 10.0]


def narrow_llama(tp: int) -> ModelSpec:
    """Returns the spec of a small llama with the proportions of a large one."""
    sizes = {"hidden_size": 96, "intermediate_size": 384, "head_dim": 4, "vocab_size": 288}
    config = LlamaConfig(num_hidden_layers=12, num_attention_heads=24, num_key_value_heads=8, **sizes)
    return read_rules(build_meta_model(config, torch.float32), tp).spec


def job(sync: Sync, backward_s: float, dead: bool = True) -> tuple[Recorded, ModelSpec, SyncLayout]:
    """Returns a recorded step of two replicas of TP 4, slot 1 of the second dead."""
    spec = narrow_llama(4)
    plan = build_plan(spec, live_devices(4, 2, [(1, 1)] if dead else []), 4, 16, 64)
    layout = sync_layout(spec, plan, 1 << 16, 4, sync)
    return record(spec, plan, layout, backward_s), spec, layout


@pytest.mark.parametrize("sync", ["direct", "reshard"])
def test_backward_hides_the_exchange(sync: Sync) -> None:
    """Catches a bucket that is launched late, or waited for in the middle of backward: 80 % must be hidden.

    Backward takes twice the time of the failure-free exchange. Bytes are those of the plan.
    """
    full, _, _ = job("direct", 1.0, dead=False)
    hurt, spec, layout = job(sync, 2 * full.alone_s(LINKS))
    assert hurt.hidden(LINKS) >= 0.80
    for place in hurt.plan.places:
        said = device_traffic(spec, hurt.plan, layout, place, 64, 1, 4)
        assert hurt.sent_bytes(place) == pytest.approx(said.exchange_bytes)
    # The same, with all of the exchange after backward.
    launched_late = {
        place: sorted(acts, key=lambda act: not isinstance(act, Compute)) for place, acts in hurt.trace.acts.items()
    }
    assert Recorded(hurt.plan, Trace(launched_late, hurt.trace.members)).hidden(LINKS) == pytest.approx(0, abs=0.01)


def test_resharding_costs_time_inside_the_replica() -> None:
    """Catches phases that are mixed up: direct has one; the two of resharding move the same bytes, there and back."""
    (direct, _, _), (reshard, _, _) = job("direct", 1.0), job("reshard", 1.0)
    before, summed, after = reshard.phases_s(LINKS)
    assert before > 0
    assert before == pytest.approx(after)
    assert direct.phases_s(LINKS)[::2] == (0.0, 0.0)
    assert sum(direct.phases_s(LINKS)) <= 0.95 * (before + summed + after)


def busiest_bytes(tp: int, sync: Sync, dead: bool = True) -> tuple[Recorded, float]:
    """Returns a recorded step of two replicas of a narrow llama3-70b, and what its busiest healthy device sent."""
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 4}
    config = LlamaConfig(num_hidden_layers=8, hidden_size=256, intermediate_size=896, vocab_size=400, **heads)
    spec = read_rules(build_meta_model(config, torch.float32), tp).spec
    plan = build_plan(spec, live_devices(tp, 2, [(1, 1)] if dead else []), tp, 32, 64)
    found = record(spec, plan, sync_layout(spec, plan, 1 << 20, 4, sync), 1.0)
    return found, max(found.sent_bytes(place) for place in plan.places if place[0] == 0)


@pytest.mark.parametrize(("tp", "most"), [(8, 0.80), (4, 0.65)])
def test_direct_sends_less(tp: int, most: float) -> None:
    """Catches an exchange that loads a device more than its share: counted bytes with one dead slot.

    Against `reshard` of the busiest healthy device; against the failure-free exchange of healthy devices at other
    slots, and of survivors, which have tp_full / tp of the units.
    """
    (full, _), (direct, sent), (_, resharded) = (
        busiest_bytes(tp, "direct", dead=False),
        busiest_bytes(tp, "direct"),
        busiest_bytes(tp, "reshard"),
    )
    assert sent <= most * resharded
    growth = {place: direct.sent_bytes(place) / full.sent_bytes(place) for place in direct.plan.places}
    assert max(growth[place] for place in growth if place[0] == 0 and place[1] != 1) <= 1.05
    assert max(growth[place] for place in growth if place[0] == 1) <= 1.05 * tp / (tp - 1)
