"""Where units lie in parameters: ranges, pieces and sizes must tell one story."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runflat.errors import PlanError
from runflat.plan.plan import Plan
from runflat.plan.units import (
    Kind,
    ModelSpec,
    ParamSpec,
    Segment,
    axis_ranges,
    block_size,
    param_ranges,
    parse_slot,
    ranges_size,
    shard_pieces,
    shard_shape,
    unit_bytes,
)

MakeSpec = Callable[..., ModelSpec]
MakePlan = Callable[..., Plan]


def elements(ranges: object) -> list[int]:
    """All elements of ranges, in their order."""
    assert isinstance(ranges, tuple)
    return [index for start, stop in ranges for index in range(start, stop)]


@given(st.data())
def test_ranges_and_pieces_agree(make_spec: MakeSpec, make_plan: MakePlan, data: st.DataObject) -> None:
    """Catches a shard whose storage order differs from where its pieces say that each unit lies; fused weights too."""
    spec = make_spec(fused=data.draw(st.booleans()), kv_heads=data.draw(st.sampled_from([2, 4, 8])))
    dead = data.draw(st.frozensets(st.tuples(st.just(0), st.integers(0, 3)), max_size=3))
    replica = make_plan(spec, 4, 1, dead).replica(0)
    for param in spec.params:
        seen: list[int] = []
        for slot in replica.live_slots:
            held = replica.held(spec.kinds, slot)
            if param.dim is None:
                assert shard_shape(spec, param, held) == param.shape
                continue
            stored = elements(param_ranges(spec, param, held))
            position = 0
            for piece in shard_pieces(spec, param, held):
                assert piece.start == position
                start, stop = spec.kind(piece.kind).range_of(piece.unit)
                offset = param.segments[piece.segment].offset
                assert stored[piece.start : piece.stop] == list(range(offset + start, offset + stop))
                position = piece.stop
            assert position == len(stored) == shard_shape(spec, param, held)[param.dim]
            seen += stored
        if param.dim is not None:
            assert set(seen) == set(range(param.shape[param.dim]))
            if all(segment.kind != "kv" for segment in param.segments):
                assert len(seen) == param.shape[param.dim]


@given(st.integers(1, 200), st.integers(1, 64), st.data())
def test_sizes_agree(size: int, unit_size: int, data: st.DataObject) -> None:
    """Catches a last, smaller block that is counted as a whole one."""
    kind = Kind("ffn", size, unit_size)
    units = sorted(data.draw(st.sets(st.integers(0, kind.num_units - 1))))
    assert (
        kind.size_of(units) == ranges_size(axis_ranges(kind, units)) == sum(b - a for a, b in map(kind.range_of, units))
    )
    assert elements(axis_ranges(kind, range(kind.num_units))) == list(range(size))


def test_fused_weight_by_hand() -> None:
    """Catches gate and up that are interleaved, or the second segment without its offset."""
    kinds = (Kind("ffn", 5, 2),)
    param = ParamSpec("gate_up", (10, 3), "sharded", True, 0, 1, 0, (Segment("ffn", 0), Segment("ffn", 5)))
    spec = ModelSpec("Hand", kinds, (param,), 3, 1, 1)
    held = {"ffn": (0, 2)}
    assert param_ranges(spec, param, held) == ((0, 2), (4, 7), (9, 10))
    assert [(piece.segment, piece.unit, piece.start, piece.stop) for piece in shard_pieces(spec, param, held)] == [
        (0, 0, 0, 2),
        (0, 2, 2, 3),
        (1, 0, 3, 5),
        (1, 2, 5, 6),
    ]
    assert shard_shape(spec, param, held) == (6, 3)
    assert unit_bytes(spec, "ffn", 0, 4) == 2 * 2 * 3 * 4
    assert unit_bytes(spec, "ffn", 2, 4) == 2 * 1 * 3 * 4


def test_unit_bytes_add_up(make_spec: MakeSpec) -> None:
    """Catches a parameter that is left out of, or counted twice in, the bytes of its units."""
    for fused in (False, True):
        spec = make_spec(fused=fused)
        units = sum(unit_bytes(spec, kind.name, unit, 1) for kind in spec.kinds for unit in range(kind.num_units))
        assert units + spec.replicated_numel == spec.num_params


@pytest.mark.parametrize(
    ("size", "tp", "block"), [(28672, 8, 64), (11008, 32, 16), (1000, 8, 4), (503, 8, 2), (100, 8, 1), (7, 8, 1)]
)
def test_block_size(size: int, tp: int, block: int) -> None:
    """Catches blocks so large that a lost shard cannot be dealt out evenly."""
    assert block_size(size, tp) == block


@pytest.mark.parametrize("text", ["13", "1-3", "1:", ":3", "1:3:4", "a:3", "-1:3", "1:\u00b2", "\u0661:0", ""])
def test_bad_place(text: str) -> None:
    """Catches a traceback, or a silent guess, for a place that is not replica:slot (digits of other scripts too)."""
    with pytest.raises(PlanError, match="replica:slot"):
        parse_slot(text)


def test_place() -> None:
    """Catches replica and slot that are swapped."""
    assert parse_slot("1:3") == (1, 3)
