"""What must move where weights and moments lie differently: no piece too few, no byte too many, from who has it."""

from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runflat.plan.piece_moves import (
    TENSORS_OF,
    ParamHeld,
    Part,
    PieceMoves,
    piece_bytes,
    piece_moves,
    union,
    whole_weights,
    without,
)
from runflat.plan.plan import Plan
from runflat.plan.units import REPLICATED, ModelSpec

MakeSpec = Callable[..., ModelSpec]
MakePlan = Callable[..., Plan]
Atom = tuple[str, str, str, int]
"""(what, parameter, kind, unit)"""

ELEMENT = 4
DEVICES = ("0:0", "0:1", "1:0", "1:1")


def atoms(part: Part) -> set[Atom]:
    """All that `part` has, one by one."""
    return {
        (what, name, kind, unit)
        for what in TENSORS_OF
        for name, held in part.of(what).items()
        for kind, units in held.items()
        for unit in units
    }


def received(moves: PieceMoves) -> dict[str, Counter[Atom]]:
    """What each device gets, and how often."""
    found: dict[str, Counter[Atom]] = defaultdict(Counter)
    for move in moves.moves:
        found[move.target].update((move.what, move.param, move.kind, unit) for unit in range(move.start, move.stop))
    return found


def every_atom(spec: ModelSpec) -> list[Atom]:
    return [
        (what, param.name, kind, unit)
        for what in TENSORS_OF
        for param in spec.params
        for kind in param.kinds
        for unit in range(1 if kind == REPLICATED else spec.kind(kind).num_units)
    ]


def part_with(chosen: set[Atom]) -> Part:
    held: dict[str, dict[str, dict[str, list[int]]]] = {what: {} for what in TENSORS_OF}
    for what, name, kind, unit in sorted(chosen):
        held[what].setdefault(name, {}).setdefault(kind, []).append(unit)
    return Part(held["weight"], held["moments"])


@given(data=st.data(), fused=st.booleans())
def test_each_device_gets_what_it_lacks_once_from_who_has_it(
    make_spec: MakeSpec, make_plan: MakePlan, data: st.DataObject, fused: bool
) -> None:
    """Catches a piece that does not arrive, comes twice or from who lacks it, and a loss that is not told."""
    spec = make_spec(heads=2, kv_heads=2, ffn=6, vocab=5, layers=1, tp=2, fused=fused)
    listed = every_atom(spec)
    masks = data.draw(st.lists(st.integers(0, 15), min_size=2 * len(listed), max_size=2 * len(listed)))
    chosen = [
        {name: {a for a, mask in zip(listed, half, strict=True) if mask >> at & 1} for at, name in enumerate(DEVICES)}
        for half in (masks[: len(listed)], masks[len(listed) :])
    ]
    have, want = chosen
    moves = piece_moves(
        spec,
        {name: part_with(had) for name, had in have.items() if had},
        {name: part_with(wanted) for name, wanted in want.items()},
        make_plan(spec, 2, 2),
        ELEMENT,
    )
    nobody = set(listed) - set().union(*have.values())
    assert set(moves.lost) == nobody & set().union(*want.values())
    for name in DEVICES:
        assert received(moves)[name] == Counter(want[name] - have[name] - nobody)
    for move in moves.moves:
        assert move.source != move.target
        sent = {(move.what, move.param, move.kind, unit) for unit in range(move.start, move.stop)}
        assert sent <= have[move.source]
        param = next(param for param in spec.params if param.name == move.param)
        size = len(TENSORS_OF[move.what]) * ELEMENT
        assert move.num_bytes == piece_bytes(spec, param, move.kind, range(move.start, move.stop), size)


def test_the_same_replica_comes_first_and_then_who_has_sent_least(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches transfers that leave the replica where they need not, or that all come from one device."""
    spec = make_spec(layers=1)
    plan = make_plan(spec, 2, 2)
    names = [param.name for param in spec.params if param.dim is None]
    all_of: ParamHeld = {name: {REPLICATED: (0,)} for name in names}
    whole = Part(all_of, all_of)
    want = dict.fromkeys(plan.devices, whole)
    near = piece_moves(spec, {name: whole for name in ("0:0", "0:1", "1:0")}, want, plan, ELEMENT)
    assert {move.source for move in near.moves} == {"1:0"}
    have = {name: whole for name in ("0:0", "0:1")}
    spread = Counter(move.source for move in piece_moves(spec, have, want, plan, ELEMENT).moves)
    assert set(spread) == {"0:0", "0:1"}
    assert max(spread.values()) - min(spread.values()) <= 1


def test_a_whole_shard_moves_when_a_device_has_nothing(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches bytes of a newcomer that are not those of its shard: a segment counted once, a norm left out."""
    spec = make_spec(fused=True)
    plan = make_plan(spec, 4, 2)
    parts = {name: Part(whole_weights(spec, plan, name), {}) for name in plan.devices}
    have = {name: part for name, part in parts.items() if name != "1:2"}
    moves = piece_moves(spec, have, parts, plan, ELEMENT)
    held = plan.held(spec.kinds, "1:2")
    numel = sum(spec.rows_by_kind[kind] * spec.kind(kind).size_of(units) for kind, units in held.items())
    assert moves.num_bytes == ELEMENT * (numel + spec.replicated_numel)
    assert {move.target for move in moves.moves} == {"1:2"}
    assert not moves.lost


def test_wrong_units_are_not_used_as_weights_only(make_spec: MakeSpec, make_plan: MakePlan) -> None:
    """Catches a device that is healed from itself, and moments thrown away with a weight."""
    spec = make_spec()
    plan = make_plan(spec, 4, 2)
    whole = whole_weights(spec, plan, "0:1")
    unit = plan.held(spec.kinds, "0:1")["ffn"][0]
    part = without(Part(whole, whole), (f"ffn {unit}", "replicated 0"))
    gone = atoms(Part(whole, whole)) - atoms(part)
    assert {(what, kind, number) for what, _, kind, number in gone} == {
        ("weight", "ffn", unit),
        ("weight", REPLICATED, 0),
    }
    assert without(part, ()) is part


@pytest.mark.parametrize("device", ["0:0", "9:9"])
def test_the_union_of_parts_has_the_units_of_each(make_spec: MakeSpec, make_plan: MakePlan, device: str) -> None:
    """Catches copies of several devices of which some units are forgotten, or come out of order."""
    spec = make_spec()
    plan = make_plan(spec, 4, 2)
    parts = [whole_weights(spec, plan, name) for name in (device, "0:3", "1:3")]
    joined = union(parts)
    assert atoms(Part(joined, {})) == set().union(*(atoms(Part(part, {})) for part in parts))
    assert all(list(units) == sorted(units) for held in joined.values() for units in held.values())
