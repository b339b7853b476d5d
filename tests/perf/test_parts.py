"""Single kernels, collectives, shares: what the parts of a step are made of."""

from collections import Counter

import pytest

from runflat.cluster.hardware import load_hardware
from runflat.errors import ModelError, PlanError
from runflat.perf.comm_time import Fabric
from runflat.perf.device_time import Device, tile_work
from runflat.perf.efficiency import Efficiencies
from runflat.perf.layer_time import share_of
from runflat.perf.layout import Layout, stage_layers
from runflat.perf.shape import ModelShape, load_model, model_names
from runflat.perf.step_time import Replica, Stage, StepTimeModel
from runflat.plan.cost import held_numel, sequence_flops
from runflat.plan.plan import Place, ReplicaPlan
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.sync_groups import sync_layout
from runflat.plan.units import Kind, ModelSpec, ParamSpec, Segment

H100 = load_hardware("h100")
PERFECT = Efficiencies(1, 1, 1, 1, 0, 1, 1, 1)
FABRIC = Fabric(H100, PERFECT)


@pytest.mark.parametrize(("m", "n", "k"), [(4096, 8192, 8192), (4096, 100, 8192), (1, 1, 1), (333, 777, 64)])
def test_tiles_never_beat_the_arithmetic(m: int, n: int, k: int) -> None:
    """Catches a quantisation that predicts more than the peak rate."""
    assert tile_work(m, n, k, 1, 132) >= 2 * m * n * k


def test_narrow_shards_waste_more() -> None:
    """Catches a model without wave effects: an eighth of the columns must cost more than an eighth of the time."""
    waste = [tile_work(2048, n, 8192, 1, 132) / (2 * 2048 * n * 8192) for n in (8192, 1024, 256)]
    assert waste[0] < 1.2
    assert waste[0] < waste[1] < waste[2]


def test_speed_scales_arithmetic_only() -> None:
    """Catches a boost that speeds up memory: a fat product follows the clock, a thin one does not."""
    slow, fast = Device(H100, PERFECT), Device(H100, PERFECT, speed=1.25)
    assert slow.matmul_s(8192, 8192, 8192, "bf16") == pytest.approx(1.25 * fast.matmul_s(8192, 8192, 8192, "bf16"))
    assert slow.matmul_s(8192, 8192, 1, "bf16") == fast.matmul_s(8192, 8192, 1, "bf16")


def test_all_reduce_inside_and_across_domains() -> None:
    """Catches a wrong ring volume, and a group of same-slot peers that is charged for links it does not have."""
    gigabyte = 1e9
    assert FABRIC.all_reduce_s(gigabyte, 8) == pytest.approx(2 * 7 / 8 / 450, rel=0.05)
    assert FABRIC.all_reduce_s(gigabyte, 16, stride=8) == pytest.approx(2 * 15 / 16 / 50, rel=0.05)
    two_nodes = 2 * 7 / 8 / 450 + 2 * 1 / 2 / 8 / 50
    assert FABRIC.all_reduce_s(gigabyte, 16) == pytest.approx(two_nodes, rel=0.05)
    assert FABRIC.all_reduce_s(gigabyte, 1) == 0


def test_uneven_shares_count_the_fullest_device() -> None:
    """Catches a mean instead of the maximum, and KV copies that are forgotten (64 query, 8 KV heads at TP 7 of 8)."""
    shape = load_model("llama3-70b")
    full, hurt = share_of(shape, 8, ()), share_of(shape, 8, (3,))
    assert (full.heads, full.kv_heads) == (8, 1)
    assert (hurt.heads, hurt.kv_heads) == (10, 2)
    assert full.ffn == shape.ffn_size // 8
    assert shape.ffn_size / 7 <= hurt.ffn < shape.ffn_size / 7 + 64


def spec_of(shape: ModelShape) -> ModelSpec:
    """Returns the units and matrices of a Llama-like model, as the runtime describes one."""
    h, d = shape.hidden_size, shape.head_dim
    kinds = (
        Kind("head", shape.num_heads * d, d),
        Kind("kv", shape.num_kv_heads * d, d, parent="head", group=shape.num_heads // shape.num_kv_heads),
        Kind("ffn", shape.ffn_size, 64),
        Kind("vocab", shape.vocab_size, 64),
    )

    def matrix(name: str, kind: str, dim: int, matmuls: int = 1) -> ParamSpec:
        size = next(k.size for k in kinds if k.name == kind)
        sizes = (size, h) if dim == 0 else (h, size)
        return ParamSpec(name, sizes, "sharded", True, 0, matmuls, dim, (Segment(kind, 0),))

    layer = [("q", "head", 0), ("k", "kv", 0), ("v", "kv", 0), ("o", "head", 1)]
    layer += [("gate", "ffn", 0), ("up", "ffn", 0), ("down", "ffn", 1)]
    params = [matrix(f"{i}.{name}", kind, dim) for i in range(shape.num_layers) for name, kind, dim in layer]
    params += [matrix("embed", "vocab", 0, matmuls=0), matrix("head", "vocab", 0)]
    return ModelSpec(shape.name, kinds, tuple(params), h, shape.num_layers, d)


def test_counts_agree_with_the_planner() -> None:
    """Catches two counts of the same thing that drift apart: parameters and FLOPs here and in `plan.cost`."""
    shape = ModelShape("small", 3, 512, 8, 2, 64, 2048, 4096, gated=True, tied=False)
    spec = spec_of(shape)
    whole = tuple((k.name, (tuple(range(k.num_units)),)) for k in spec.assigned_kinds)
    replica = ReplicaPlan(0, ("0:0",), whole, 1)
    assert held_numel(spec, replica, 0) == shape.num_params
    assert sequence_flops(spec, replica, 0, 1024) == shape.model_flops(1024, 1024)


@pytest.mark.parametrize("live", [7, 6, 4, 3, 1])
def test_reshard_moves_what_the_plan_moves(live: int) -> None:
    """Catches resharding whose price forgets the busiest device: the one that sends all, or below half one that gets.

    Seconds are turned back into bytes, and compared with the largest transfer of one device in one direction.
    """
    shape = load_model("llama3-70b")
    spec = spec_of(shape)
    plan = build_plan(spec, live_devices(8, 2, [(1, slot) for slot in range(live, 8)]), 8, 32, 4096)
    layout = sync_layout(spec, plan, 1 << 40, 4, "reshard")
    moved: Counter[tuple[str, Place]] = Counter()
    for move in (move for moves in layout.moves(0).values() for move in moves):
        moved["out", move.source] += 4 * move.entry.numel
        moved["in", move.target] += 4 * move.entry.numel
    job = Layout(tp=8, pp=1, dp=2, global_batch=32, seq_len=4096, overlap_dp=False, sync="reshard")
    predictor = StepTimeModel(H100, shape, job, PERFECT)
    seconds = predictor.step([predictor.healthy, Replica((Stage(live),), 1)]).reshard_s
    num_bytes = (seconds / 2 - H100.launch_us.value * 1e-6) * FABRIC.link_bytes_per_s
    # Copies of KV heads travel once more than the model of step times knows.
    assert num_bytes == pytest.approx(max(moved.values()), rel=0.02)


def test_stages() -> None:
    """Catches lost layers, and a remainder that lands on the stages with embedding and head."""
    layout = Layout(tp=8, pp=16, dp=1, global_batch=16, seq_len=4096)
    layers = stage_layers(126, layout)
    assert sum(layers) == 126
    assert (layers[0], layers[-1]) == (7, 7)
    with pytest.raises(PlanError, match="8 layers"):
        stage_layers(8, layout)


@pytest.mark.parametrize("name", model_names())
def test_shipped_models(name: str) -> None:
    """Catches a mistyped size: the parameter count must be that of the model's name."""
    billions = {"1t": 1008.0, "480b": 505.0}
    size = name.rsplit("-", 1)[1]
    expected = billions.get(size) or float(size.removesuffix("b"))
    assert load_model(name).num_params == pytest.approx(expected * 1e9, rel=0.05)


def test_model_errors() -> None:
    """Catches a traceback for a name that is not known, and KV heads that do not divide."""
    with pytest.raises(ModelError, match="llama3-70b"):
        load_model("llama")
    with pytest.raises(ModelError, match="multiple"):
        ModelShape("odd", 1, 64, 7, 2, 8, 64, 64)


@pytest.mark.parametrize("change", [{"tp": 0}, {"global_batch": 3}, {"virtual": 2, "pp": 1}])
def test_layout_errors(change: dict[str, int]) -> None:
    """Catches layouts that cannot run and would give a number all the same."""
    with pytest.raises(PlanError):
        Layout(**{"tp": 2, "pp": 2, "dp": 4, "global_batch": 8, "seq_len": 128, **change})
