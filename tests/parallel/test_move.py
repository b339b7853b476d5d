"""Moving of state: the exchange rebuilds exactly the shard that the new plan wants, at exactly the planned bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from runflat.check.in_memory import InMemoryNetwork
from runflat.check.ranks import run_ranks
from runflat.check.small import proof_config
from runflat.parallel.comms import Comms, CommsError, Network
from runflat.parallel.move import (
    NOTHING,
    Change,
    Moved,
    ShardState,
    Slab,
    execute_transfers,
    install_moments,
    messages,
    read_state,
    relayout,
    slab_view,
    unit_slabs,
)
from runflat.parallel.optimizer import OptimizerSettings, build_optimizer
from runflat.parallel.shard import cut
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.plan import Place, Plan
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.sync_groups import SyncLayout
from runflat.plan.transfers import Transfer, transfers
from runflat.plan.units import TENSORS, ModelSpec, param_ranges

Full = Mapping[str, Mapping[str, torch.Tensor]]
NO_GROUPS = SyncLayout((), (), (), 0)
TP = 4
STEP = 7
MODELS = ("phi3", "qwen2", "llama-gqa4")
"""Fused weights; partitioned biases; KV heads that several devices hold."""


def spec_of(model: str) -> ModelSpec:
    """Returns the geometry of a small model whose FFN (77 columns) and vocabulary (503 rows) divide by nothing."""
    config = proof_config(model, intermediate_size=77, vocab_size=503, num_hidden_layers=1)
    return read_rules(build_meta_model(config, torch.float32), TP).spec


def plan_of(
    spec: ModelSpec, dead: Iterable[Place], previous: Plan | None = None, generation: int = 0, num_replicas: int = 2
) -> Plan:
    """Returns the plan of two replicas of TP 4 without the dead places."""
    return build_plan(spec, live_devices(TP, num_replicas, dead), TP, 8, 16, previous, generation)


def full_state(spec: ModelSpec) -> Full:
    """Returns random full tensors of each kind, by name."""
    generator = torch.Generator().manual_seed(0)
    return {kind: {p.name: torch.randn(p.shape, generator=generator) for p in spec.params} for kind in TENSORS}


def held_by(spec: ModelSpec, plan: Plan, device: str) -> dict[str, tuple[int, ...]]:
    """Returns the units of a device."""
    place = plan.place(device)
    assert place is not None
    return plan.replica(place[0]).held(spec.kinds, place[1])


def shard_of(spec: ModelSpec, plan: Plan, device: str, full: Full) -> ShardState:
    """Returns what `device` must hold under `plan`."""
    held = held_by(spec, plan, device)
    tensors = {
        kind: {p.name: cut(full[kind][p.name], p, param_ranges(spec, p, held)) for p in spec.params} for kind in TENSORS
    }
    return ShardState(tensors, STEP)


def change_of(spec: ModelSpec, old: Plan, new: Plan, device: str) -> Change:
    """Returns the change as `device` sees it, for float32 weights and moments."""
    return Change(spec, old, new, transfers(spec, old, new, 12), device, torch.float32, torch.device("cpu"))


def run(
    spec: ModelSpec,
    old: Plan,
    new: Plan,
    full: Full,
    states: Mapping[str, ShardState] | None = None,
    limit_bytes: int = 1 << 20,
    **ranks: Any,
) -> dict[str, Moved]:
    """Returns what each device of the new plan has after the exchange; those that were not there start with nothing."""

    def rank(place: Place, comms: Comms) -> Moved:
        device = new.device(place)
        start = shard_of(spec, old, device, full) if old.place(device) else NOTHING
        state = (states or {}).get(device, start)
        before = {kind: dict(state.tensors[kind]) for kind in TENSORS}
        kept = {kind: {name: tensor.clone() for name, tensor in before[kind].items()} for kind in TENSORS}
        moved = execute_transfers(change_of(spec, old, new, device), state, comms, limit_bytes)
        for kind in TENSORS:
            assert all(torch.equal(state.tensors[kind][name], kept[kind][name]) for name in kept[kind])
        return moved

    found = run_ranks(new, NO_GROUPS, rank, **({"in_memory": True} | ranks))
    return {new.device(place): moved for place, moved in found.items()}


def assert_right(spec: ModelSpec, new: Plan, full: Full, found: Mapping[str, Moved]) -> None:
    """Checks every device's state bit for bit."""
    for device, moved in found.items():
        expected = shard_of(spec, new, device, full)
        assert moved.state.optimizer_step == STEP
        for kind in TENSORS:
            assert list(moved.state.tensors[kind]) == list(expected.tensors[kind])
            for name, tensor in expected.tensors[kind].items():
                assert torch.equal(moved.state.tensors[kind][name], tensor), (device, kind, name)


LOSSES = {
    "one": ((), ((1, 2),)),
    "the first": ((), ((0, 0),)),
    "one in each": ((), ((0, 3), (1, 1))),
    "another": (((1, 2),), ((1, 0), (1, 2))),
    "down to one": (((1, 2),), ((1, 0), (1, 1), (1, 2))),
    "a replica": ((), ((1, 0), (1, 1), (1, 2), (1, 3))),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", LOSSES)
def test_loss(model: str, name: str) -> None:
    """Catches a shard in the wrong order or of the wrong rows, a moment left behind, and bytes that are off."""
    spec = spec_of(model)
    before, after = LOSSES[name]
    old = plan_of(spec, before)
    live = {place: device for place, device in live_devices(TP, 2, ()).items() if place not in after}
    new = build_plan(spec, live, TP, 8, 16, old, 1)
    full = full_state(spec)
    found = run(spec, old, new, full)
    assert_right(spec, new, full, found)
    moves = transfers(spec, old, new, 12)
    for device, moved in found.items():
        assert moved.received_bytes == sum(move.num_bytes for move in moves if move.target == device)
    assert bool(moves) == (name != "a replica")


def test_rounds() -> None:
    """Catches a chunk that is lost or doubled where a message needs many collectives, also with unequal messages."""
    spec = spec_of("phi3")
    old = plan_of(spec, ())
    new = plan_of(spec, ((1, 2),), old, 1)
    full = full_state(spec)
    launched: list[tuple[str, int, int]] = []

    def network(_: Place) -> Network:
        return Network(recorder=lambda *call: launched.append(call))

    assert_right(spec, new, full, run(spec, old, new, full, limit_bytes=1000, network_of=network))
    assert max(num_bytes for _, num_bytes, _ in launched) <= 1000
    assert {operation for operation, _, _ in launched} == {"all_to_all"}
    assert len(launched) > 10 * len(new.places)


def test_over_gloo() -> None:
    """Catches an exchange that only the fake network can do: zero and unequal splits over real sockets."""
    spec = spec_of("qwen2")
    old = plan_of(spec, ())
    new = plan_of(spec, ((0, 1),), old, 1)
    full = full_state(spec)
    assert_right(spec, new, full, run(spec, old, new, full, in_memory=False, limit_bytes=10_000))


def test_growth_drops_without_a_collective() -> None:
    """Catches a device that keeps orphans which have gone home, and an exchange when there is nothing to move."""
    spec = spec_of("phi3")
    old = plan_of(spec, ((1, 2),))
    new = plan_of(spec, (), old, 1)
    full = full_state(spec)
    launched: list[Any] = []

    def rank(place: Place, comms: Comms) -> Moved:
        device = new.device(place)
        state = shard_of(spec, new if device == "1:2" else old, device, full)
        change = replace(change_of(spec, old, new, device), moves=())
        if device == "1:2":  # it has been fed under the coming plan already
            return Moved(state, 0)
        return execute_transfers(change, state, comms)

    def network(_: Place) -> Network:
        return Network(recorder=lambda *call: launched.append(call))

    found = run_ranks(new, NO_GROUPS, rank, network, in_memory=True)
    assert_right(spec, new, full, {new.device(place): moved for place, moved in found.items()})
    assert launched == []


def test_newcomer() -> None:
    """Catches a newcomer that misses replicated parameters, the step count, or gets them from every source."""
    spec = spec_of("llama-gqa4")
    old = plan_of(spec, ((1, 2),))
    new = plan_of(spec, (), old, 1)
    full = full_state(spec)
    found = run(spec, old, new, full)
    assert_right(spec, new, full, found)
    moved = sum(move.num_bytes for move in transfers(spec, old, new, 12))
    assert found["1:2"].received_bytes == moved + 12 * spec.replicated_numel
    listed = messages(change_of(spec, old, new, "1:2"))
    hosts = {m.source for m in listed if any(slab.segment == -1 for slab in m.slabs)}
    assert hosts == {next(move.source for move in transfers(spec, old, new, 12) if move.target == "1:2")}


def test_devices_that_hold_different_plans() -> None:
    """Catches an exchange that needs all devices to come from one plan: a loss while a transfer was under way."""
    spec = spec_of("qwen2")
    first = plan_of(spec, ())
    second = plan_of(spec, ((1, 2),), first, 1)
    third = plan_of(spec, ((1, 1), (1, 2)), second, 2)
    full = full_state(spec)
    base = {device: second if device in ("1:0", "0:3") else first for device in map(third.device, third.places)}
    base["1:3"] = third  # the place of one that has just been started, which holds nothing
    moves: list[Transfer] = []
    for device, plan in base.items():
        had = {} if device == "1:3" else held_by(spec, plan, device)
        for kind, units in held_by(spec, third, device).items():
            for unit in units:
                if unit not in had.get(kind, ()):
                    source = next(d for d in base if d[0] == "0" and unit in held_by(spec, base[d], d)[kind])
                    moves.append(Transfer(kind, unit, unit + 1, source, device, 0))

    def rank(place: Place, comms: Comms) -> Moved:
        device = third.device(place)
        state = NOTHING if device == "1:3" else shard_of(spec, base[device], device, full)
        change = replace(change_of(spec, base[device], third, device), moves=tuple(moves))
        return execute_transfers(change, state, comms)

    found = run_ranks(third, NO_GROUPS, rank, in_memory=True)
    assert_right(spec, third, full, {third.device(place): moved for place, moved in found.items()})


class Spoiler:
    """A member's backend that flips one bit of what it sends."""

    def __init__(self, backend: Any, bit: int):
        self._backend = backend
        self._bit = bit

    def alltoall_base(self, output: torch.Tensor, source: torch.Tensor, received: Any, sent: Any) -> Any:
        """Sends damaged words."""
        damaged = source.clone()
        if len(damaged):
            damaged[len(damaged) // 2] ^= 1 << self._bit
        return self._backend.alltoall_base(output, damaged, received, sent)


@pytest.mark.parametrize("bit", [0, 62])
def test_damage_is_named(bit: int) -> None:
    """Catches a transfer without a checksum, or an error that does not say between whom."""
    spec = spec_of("phi3")
    old = plan_of(spec, ())
    new = plan_of(spec, ((1, 2),), old, 1)
    memory = InMemoryNetwork()
    source = transfers(spec, old, new, 12)[0].source

    def network(place: Place) -> Network:
        def backend(name: str, rank: int, size: int) -> Any:
            member = memory.backend(name, rank, size)
            return Spoiler(member, bit) if new.device(place) == source else member

        return Network(backend=backend)

    with pytest.raises(CommsError, match=rf"{source} sent to 1:\d came damaged"):
        run(spec, old, new, full_state(spec), network_of=network, in_memory=False)


def test_states_of_different_steps_do_not_mix() -> None:
    """Catches a holder that is a step behind and whose moments would be mixed with newer ones."""
    spec = spec_of("phi3")
    old = plan_of(spec, ())
    new = plan_of(spec, ((1, 2),), old, 1)
    full = full_state(spec)
    source = transfers(spec, old, new, 12)[0].source
    behind = replace(shard_of(spec, old, source, full), optimizer_step=STEP - 1)
    with pytest.raises(CommsError, match=rf"{source} sent to 1:\d is of optimizer step 6, not of 7"):
        run(spec, old, new, full, {source: behind})


def test_a_missing_unit_is_an_error() -> None:
    """Catches a shard that would be filled with whatever was in memory where a unit did not come."""
    spec = spec_of("phi3")
    old = plan_of(spec, ())
    new = plan_of(spec, ((1, 2),), old, 1)
    tensors = shard_of(spec, old, "1:0", full_state(spec)).tensors["weight"]
    with pytest.raises(KeyError):
        relayout(spec, held_by(spec, old, "1:0"), held_by(spec, new, "1:0"), tensors, {})


@pytest.mark.parametrize("model", MODELS)
def test_slabs_cover_the_shard(model: str) -> None:
    """Catches a slab that lies elsewhere than storage order says: a shard built of slabs alone must be the shard."""
    spec = spec_of(model)
    plan = plan_of(spec, ((1, 1), (1, 3)))
    full = full_state(spec)
    held = held_by(spec, plan, "1:0")
    tensors = shard_of(spec, plan, "1:0", full).tensors["weight"]
    params = {param.name: param for param in spec.params}
    slabs = [s for kind in spec.kinds for u in held[kind.name] for s in unit_slabs(spec, kind.name, u, u + 1)]
    received = {s: slab_view(spec, params[s.param], s, held, tensors[s.param]).clone() for s in slabs}
    received |= {Slab(p.name): full["weight"][p.name] for p in spec.params if p.dim is None}
    nothing: dict[str, tuple[int, ...]] = {kind.name: () for kind in spec.kinds}
    rebuilt = relayout(spec, nothing, held, {}, received)
    assert all(torch.equal(rebuilt[name], tensors[name]) for name in tensors)


@pytest.fixture
def trained() -> Callable[[int], tuple[ModelSpec, dict[str, nn.Parameter], torch.optim.AdamW]]:
    """Returns build(steps): a small set of parameters and its optimizer after some steps."""

    def build(num_steps: int) -> tuple[ModelSpec, dict[str, nn.Parameter], torch.optim.AdamW]:
        spec = spec_of("qwen2")
        generator = torch.Generator().manual_seed(1)
        params = {p.name: nn.Parameter(torch.randn(p.shape, generator=generator)) for p in spec.params}
        optimizer = build_optimizer(spec, params, OptimizerSettings())
        for _ in range(num_steps):
            step(params, optimizer, generator)
        return spec, params, optimizer

    return build


def step(params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    """Applies one step with random gradients."""
    for param in params.values():
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize("num_steps", [0, 3])
def test_read_and_install(trained: Callable[..., Any], num_steps: int) -> None:
    """Catches moments or a step count that are lost on the way, also where AdamW has no state yet."""
    spec, params, optimizer = trained(num_steps)
    state = read_state(params, optimizer)
    assert state.optimizer_step == num_steps
    copies = {kind: {name: tensor.clone() for name, tensor in state.tensors[kind].items()} for kind in TENSORS}
    others = {name: nn.Parameter(tensor) for name, tensor in copies["weight"].items()}
    other = build_optimizer(spec, others, OptimizerSettings())
    install_moments(other, others, ShardState(copies, num_steps))
    step(params, optimizer, torch.Generator().manual_seed(2))
    step(others, other, torch.Generator().manual_seed(2))
    first, second = read_state(params, optimizer), read_state(others, other)
    assert first.optimizer_step == second.optimizer_step == num_steps + 1
    for kind in TENSORS:
        assert all(torch.equal(first.tensors[kind][name], second.tensors[kind][name]) for name in params)
