"""Specs and plans made by hand: what the planner sees of a model, without a model."""

from collections.abc import Callable, Collection

import pytest

from runflat.plan.plan import Place, Plan
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.sync_groups import SyncLayout, sync_layout
from runflat.plan.units import Kind, ModelSpec, ParamSpec, Segment, block_size

MakeSpec = Callable[..., ModelSpec]
MakePlan = Callable[..., Plan]


def spec_by_hand(
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 4,
    ffn: int = 50,
    vocab: int = 37,
    layers: int = 2,
    tp: int = 4,
    fused: bool = False,
) -> ModelSpec:
    """A llama-like decoder; `fused`: QKV and gate_up are one weight each, as in phi3."""
    hidden = heads * head_dim
    kv = "kv" if kv_heads < heads else "head"
    kv_size = kv_heads * head_dim
    kinds = [Kind("head", hidden, head_dim)]
    if kv == "kv":
        kinds.append(Kind("kv", kv_size, head_dim, "head", heads // kv_heads))
    kinds.append(Kind("ffn", ffn, block_size(ffn, tp, blocks_per_slot=2)))
    kinds.append(Kind("vocab", vocab, block_size(vocab, tp, blocks_per_slot=2)))
    params: list[ParamSpec] = []

    def add(name: str, shape: tuple[int, ...], dim: int | None, *kinds_of: tuple[str, int], matmuls: int = 1) -> None:
        offsets = [sum(size for _, size in kinds_of[:index]) for index in range(len(kinds_of))]
        segments = tuple(Segment(kind, offset) for (kind, _), offset in zip(kinds_of, offsets, strict=True))
        rule = "sharded" if dim is not None else "equal"
        decay, uses = len(shape) > 1, matmuls if len(shape) > 1 else 0
        params.append(ParamSpec(name, shape, rule, decay, len(params), uses, dim, segments))

    add("embed.weight", (vocab, hidden), 0, ("vocab", vocab), matmuls=0)
    for layer in range(layers):
        add(f"{layer}.norm.weight", (hidden,), None)
        qkv = (("head", hidden), (kv, kv_size), (kv, kv_size))
        if fused:
            add(f"{layer}.qkv.weight", (hidden + 2 * kv_size, hidden), 0, *qkv)
            add(f"{layer}.gate_up.weight", (2 * ffn, hidden), 0, ("ffn", ffn), ("ffn", ffn))
        else:
            for name, part in zip("qkv", qkv, strict=True):
                add(f"{layer}.{name}.weight", (part[1], hidden), 0, part)
                add(f"{layer}.{name}.bias", (part[1],), 0, part)
            add(f"{layer}.gate.weight", (ffn, hidden), 0, ("ffn", ffn))
            add(f"{layer}.up.weight", (ffn, hidden), 0, ("ffn", ffn))
        add(f"{layer}.o.weight", (hidden, hidden), 1, ("head", hidden))
        add(f"{layer}.down.weight", (hidden, ffn), 1, ("ffn", ffn))
    add("norm.weight", (hidden,), None)
    add("head.weight", (vocab, hidden), 0, ("vocab", vocab))
    return ModelSpec("ByHand", tuple(kinds), tuple(params), hidden, layers, head_dim)


@pytest.fixture(scope="session")
def make_spec() -> MakeSpec:
    """Returns the builder of specs, `spec_by_hand`."""
    return spec_by_hand


@pytest.fixture(scope="session")
def make_plan() -> MakePlan:
    """Returns a builder of plans for (spec, tp, replicas, dead places, previous plan), ten sequences per replica."""

    def make(
        spec: ModelSpec, tp: int, replicas: int, dead: Collection[Place] = (), previous: Plan | None = None
    ) -> Plan:
        return build_plan(spec, live_devices(tp, replicas, dead), tp, 10 * replicas, 8, previous)

    return make


@pytest.fixture(scope="session")
def crowded(make_spec: MakeSpec, make_plan: MakePlan) -> tuple[ModelSpec, Plan, SyncLayout]:
    """Returns a layout with more groups than communicators: six replicas of TP 8 at six degrees."""
    spec = make_spec(heads=64, kv_heads=64, ffn=640, vocab=512, tp=8)
    dead = [(replica, slot) for replica in range(5) for slot in range(replica + 1)]
    plan = make_plan(spec, 8, 6, dead)
    return spec, plan, sync_layout(spec, plan, 12_000, 4)
