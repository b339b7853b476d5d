"""Digests of state: whatever differs between holders is found and named, and nothing else is."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from runflat.check.ranks import run_ranks
from runflat.check.small import proof_config
from runflat.parallel.comms import Comms, Network
from runflat.parallel.digest import NOT_HELD, SCALARS, checksum, compare, odd_weights, unit_digests
from runflat.parallel.shard import cut
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.plan import Place, Plan
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.sync_groups import SyncLayout
from runflat.plan.units import REPLICATED, ModelSpec, param_ranges, shard_pieces

Tensors = dict[str, dict[str, torch.Tensor]]
NO_GROUPS = SyncLayout((), (), (), 0)
KINDS = ("weight", "exp_avg", "exp_avg_sq")
SCALAR_VALUES = (12.0, 3e-4)


def spec_of(model: str = "phi3") -> ModelSpec:
    """Returns the geometry of a small model whose FFN and vocabulary divide by nothing."""
    config = proof_config(model, intermediate_size=77, vocab_size=503, num_hidden_layers=1)
    return read_rules(build_meta_model(config, torch.float32), 4).spec


def plan_of(spec: ModelSpec, *dead: Place) -> Plan:
    """Returns the plan of two replicas of TP 4 without the dead places."""
    return build_plan(spec, live_devices(4, 2, dead), 4, 8, 16)


def full_state(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Tensors:
    """Returns random full tensors of each kind, by name."""
    generator = torch.Generator().manual_seed(0)
    return {k: {p.name: torch.randn(p.shape, generator=generator).to(dtype) for p in spec.params} for k in KINDS}


def held_at(spec: ModelSpec, plan: Plan, place: Place) -> dict[str, tuple[int, ...]]:
    """Returns the units at a place."""
    return plan.replica(place[0]).held(spec.kinds, place[1])


def shard_of(spec: ModelSpec, held: Mapping[str, tuple[int, ...]], full: Tensors) -> Tensors:
    """Returns a device's shard of the full state, tensors of its own."""
    return {k: {p.name: cut(full[k][p.name], p, param_ranges(spec, p, held)) for p in spec.params} for k in KINDS}


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Flips one bit of one element in place."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.view(-1).view(integers[tensor.element_size()])
    sign = bit == 8 * tensor.element_size() - 1
    bits[element] ^= torch.iinfo(bits.dtype).min if sign else 1 << bit


def differing(plan: Plan, spec: ModelSpec, shards: Mapping[Place, Tensors], **scalars: float) -> list[tuple[str, int]]:
    """Returns what all devices say differs; `scalars` are learning rates by device id with an underscore."""

    def rank(place: Place, comms: Comms) -> list[tuple[str, int]]:
        lr = scalars.get(f"lr{place[0]}_{place[1]}", SCALAR_VALUES[1])
        digests = unit_digests(spec, held_at(spec, plan, place), shards[place], (SCALAR_VALUES[0], lr))
        return compare(spec, digests, comms)

    answers = list(run_ranks(plan, NO_GROUPS, rank, lambda _: Network(), in_memory=True).values())
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def shards_of(spec: ModelSpec, plan: Plan, full: Tensors) -> dict[Place, Tensors]:
    """Returns the shard of each device."""
    return {place: shard_of(spec, held_at(spec, plan, place), full) for place in plan.places}


@pytest.mark.parametrize("model", ["phi3", "qwen2", "llama-gqa4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_states_agree_in_any_layout(model: str, dtype: torch.dtype) -> None:
    """Catches a digest that depends on where a unit lies in the shard, or on what else the device holds."""
    spec = spec_of(model)
    full = full_state(spec, dtype)
    plan = plan_of(spec, (0, 1), (1, 0), (1, 3))
    assert differing(plan, spec, shards_of(spec, plan, full)) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bit", [0, 22, 31])
def test_one_flipped_bit_is_named(kind: str, bit: int) -> None:
    """Catches a tensor that is left out, a bit that is rounded away, and a unit with the wrong name."""
    spec = spec_of()
    plan = plan_of(spec, (1, 2))
    generator = torch.Generator().manual_seed(bit)
    for param in spec.params:
        shards = shards_of(spec, plan, full_state(spec))
        tensor = shards[1, 0][kind][param.name]
        element = int(torch.randint(tensor.numel(), (1,), generator=generator))
        flip(tensor, element, bit)
        if param.dim is None:
            expected = (REPLICATED, 0)
        else:
            row = element // tensor[0].numel() if param.dim == 0 else element % tensor.shape[1]
            pieces = shard_pieces(spec, param, held_at(spec, plan, (1, 0)))
            expected = next((p.kind, p.unit) for p in pieces if p.start <= row < p.stop)
        assert differing(plan, spec, shards) == [expected], param.name


def test_zero_and_minus_zero_differ() -> None:
    """Catches a digest of values in place of bits."""
    spec = spec_of()
    held = held_at(spec, plan_of(spec), (0, 0))
    full = full_state(spec)
    zeros = {k: {name: torch.zeros_like(t) for name, t in full[k].items()} for k in KINDS}
    minus = {k: {name: -t for name, t in zeros[k].items()} for k in KINDS}
    plus, negative = (unit_digests(spec, held, shard_of(spec, held, t), SCALAR_VALUES) for t in (zeros, minus))
    assert (plus != negative).sum() == sum(len(units) for units in held.values()) + 1


def test_exchanged_elements_differ() -> None:
    """Catches a sum that does not depend on position: rows, columns, tensors, segments and parameters change places."""
    spec = spec_of()
    held = held_at(spec, plan_of(spec), (0, 0))
    shard = shard_of(spec, held, full_state(spec))
    right = unit_digests(spec, held, shard, SCALAR_VALUES)
    for param in spec.params:
        tensor = shard["weight"][param.name]
        for dim in range(tensor.dim()):
            swapped = tensor.clone()
            swapped.select(dim, 0).copy_(tensor.select(dim, 1))
            swapped.select(dim, 1).copy_(tensor.select(dim, 0))
            changed = shard | {"weight": shard["weight"] | {param.name: swapped}}
            assert not torch.equal(unit_digests(spec, held, changed, SCALAR_VALUES), right), (param.name, dim)
    exchanged = shard | {"exp_avg": shard["exp_avg_sq"], "exp_avg_sq": shard["exp_avg"]}
    assert (unit_digests(spec, held, exchanged, SCALAR_VALUES) != right).sum() == sum(map(len, held.values())) + 1
    fused = next(param for param in spec.params if len({s.kind for s in param.segments}) == 1 < len(param.segments))
    half = shard["weight"][fused.name].chunk(2)
    changed = shard | {"weight": shard["weight"] | {fused.name: torch.cat(half[::-1])}}
    differ = unit_digests(spec, held, changed, SCALAR_VALUES) != right
    assert differ.sum() == len(held[fused.segments[0].kind])


def test_views_give_the_digest_of_their_elements() -> None:
    """Catches a view into a larger buffer, or a transposed one, that is refused or read as other elements."""
    spec = spec_of()
    held = held_at(spec, plan_of(spec), (0, 0))
    shard = shard_of(spec, held, full_state(spec))
    right = unit_digests(spec, held, shard, SCALAR_VALUES)
    for offset in (1, 2):
        views = {
            k: {n: torch.cat([t.new_zeros(offset), t.view(-1)])[offset:].view(t.shape) for n, t in by_name.items()}
            for k, by_name in shard.items()
        }
        assert torch.equal(unit_digests(spec, held, views, SCALAR_VALUES), right)
    transposed = {k: {n: t.t().contiguous().t() for n, t in by_name.items()} for k, by_name in shard.items()}
    assert torch.equal(unit_digests(spec, held, transposed, SCALAR_VALUES), right)


def test_scalars_are_compared() -> None:
    """Catches a step count or learning rate that differs unseen."""
    spec = spec_of()
    plan = plan_of(spec, (1, 2))
    shards = shards_of(spec, plan, full_state(spec))
    assert differing(plan, spec, shards, lr1_3=3.0000000000000003e-4) == [(SCALARS, 0)]
    held = held_at(spec, plan, (0, 0))
    digests = [unit_digests(spec, held, shards[0, 0], numbers)[-1] for numbers in ((12, 3e-4), (13, 3e-4), (3e-4, 12))]
    assert len({int(digest) for digest in digests}) == 3


def test_units_without_a_second_holder() -> None:
    """Catches a comparison in which a device that does not hold a unit has a say, or in which nobody holds it."""
    spec = spec_of()
    plan = plan_of(spec)
    num_units = sum(kind.num_units for kind in spec.kinds)

    def rank(place: Place, comms: Comms) -> list[tuple[str, int]]:
        digests = torch.full((num_units + 2,), NOT_HELD)
        digests[-2:] = torch.tensor([torch.iinfo(torch.int64).max, NOT_HELD + 1])
        if place == (0, 0):
            digests[:3] = torch.tensor([torch.iinfo(torch.int64).max, NOT_HELD + 1, -1])
        if place == (1, 1):
            digests[2:4] = torch.tensor([0, 5])
        return compare(spec, digests, comms)

    answers = run_ranks(plan, NO_GROUPS, rank, in_memory=True)
    assert {tuple(answer) for answer in answers.values()} == {((spec.kinds[0].name, 2),)}


def test_agreement_over_gloo() -> None:
    """Catches a maximum of 64-bit numbers that a real backend computes in another type."""
    spec = spec_of()
    plan = plan_of(spec, (1, 2))
    shards = shards_of(spec, plan, full_state(spec))
    flip(shards[0, 3]["exp_avg"][spec.params[0].name], 0, 0)

    def rank(place: Place, comms: Comms) -> list[tuple[str, int]]:
        held = held_at(spec, plan, place)
        return compare(spec, unit_digests(spec, held, shards[place], SCALAR_VALUES), comms)

    answers = list(run_ranks(plan, NO_GROUPS, rank).values())
    assert all(answer == answers[0] for answer in answers)
    assert len(answers[0]) == 1


@pytest.mark.parametrize("size", [0, 1, 5, 4096, 4097, 20_000])
def test_checksum_sees_every_bit(size: int) -> None:
    """Catches a checksum that skips a tail, or weights that are even and so lose the highest bits."""
    words = torch.randint(-(2**62), 2**62, (size,), generator=torch.Generator().manual_seed(0))
    right = checksum(words)
    assert checksum(words.clone()) == right
    for element in {0, size // 2, size - 1} if size else ():
        for bit in (0, 40, 63):
            flip(words, element, bit)
            assert checksum(words) != right
            flip(words, element, bit)
    if size > 1:
        assert checksum(words.flip(0)) != right


def odd_weight(index: int, salt: int) -> int:
    """Returns one weight by Python's own integers: the finalizer of splitmix64, made odd, as a signed number."""
    x = (index * 0x9E3779B97F4A7C15 + salt * 0x632BE59BD9B4E019) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64 | 1
    return x - 2**64 if x >= 2**63 else x


@pytest.mark.parametrize("salt", [1, 6])
def test_weights_are_odd_and_stable(salt: int) -> None:
    """Catches weights that depend on the machine, on torch's generator or on an overflow: holders would never agree."""
    weights = odd_weights(1000, salt, torch.device("cpu")).tolist()
    assert weights == [odd_weight(index, salt) for index in range(1000)]
    assert len(set(weights)) == 1000
    assert all(weight % 2 for weight in weights)
