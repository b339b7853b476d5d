"""Keep what you hold, deal out what was lost; as few moves as balance allows."""

import itertools
from collections.abc import Callable, Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runflat.errors import PlanError
from runflat.plan.assignment import Assignment, assign, base_assignment, held_units
from runflat.plan.units import Kind, ModelSpec


@st.composite
def layouts(draw: st.DrawFn, max_tp: int = 8, max_extra: int = 60) -> tuple[int, int, list[frozenset[int]]]:
    """(units, full degree, a history of dead slots that never kills all)."""
    tp = draw(st.integers(1, max_tp))
    units = tp + draw(st.integers(0, max_extra))
    dead = st.frozensets(st.integers(0, tp - 1), max_size=tp - 1)
    return units, tp, draw(st.lists(dead, min_size=1, max_size=4))


def history(units: int, tp: int, deaths: list[frozenset[int]]) -> list[Assignment]:
    """The assignment after each step of `deaths`, each from the one before."""
    found = [base_assignment(units, tp)]
    for dead in deaths:
        found.append(assign(units, tp, dead, found[-1]))
    return found[1:]


def moved(before: Assignment, after: Assignment) -> int:
    """Units that another slot holds than before."""
    where = {unit: slot for slot, units in enumerate(before) for unit in units}
    return sum(where.get(unit) != slot for slot, units in enumerate(after) for unit in units)


def fewest_moves(units: int, tp: int, dead: Collection[int], before: Assignment) -> int:
    """Moves of the best of all layouts in which live slots hold their base and loads differ by at most one."""
    base = base_assignment(units, tp)
    live = [slot for slot in range(tp) if slot not in dead]
    orphans = [unit for slot in dead for unit in base[slot]]
    best = units + 1
    for choice in itertools.product(live, repeat=len(orphans)):
        loads = [len(base[slot]) + choice.count(slot) for slot in live]
        if max(loads) - min(loads) <= 1:
            dealt = tuple(
                (*base[slot], *(unit for unit, to in zip(orphans, choice, strict=True) if to == slot))
                if slot in live
                else ()
                for slot in range(tp)
            )
            best = min(best, moved(before, dealt))
    return best


@given(layouts())
def test_cover_balance_and_base(layout: tuple[int, int, list[frozenset[int]]]) -> None:
    """Catches a unit that is lost or held twice, a load off by two, and a live slot that gave its own units away."""
    units, tp, deaths = layout
    base = base_assignment(units, tp)
    for dead, found in zip(deaths, history(units, tp, deaths), strict=True):
        assert sorted(unit for held in found for unit in held) == list(range(units))
        assert all(list(held) == sorted(held) for held in found)
        loads = [len(found[slot]) for slot in range(tp) if slot not in dead]
        assert max(loads) - min(loads) <= 1
        assert all(set(base[slot]) <= set(found[slot]) for slot in range(tp) if slot not in dead)
        assert all(not found[slot] for slot in dead)


@given(layouts(max_tp=4, max_extra=5))
def test_moves_are_fewest(layout: tuple[int, int, list[frozenset[int]]]) -> None:
    """Catches orphans that move although they could have stayed, against all possible layouts."""
    units, tp, deaths = layout
    before = base_assignment(units, tp)
    for dead, found in zip(deaths, history(units, tp, deaths), strict=True):
        assert moved(before, found) == fewest_moves(units, tp, dead, before)
        before = found


@given(st.data())
def test_moves_are_fewest_from_any_layout(data: st.DataObject) -> None:
    """Catches a rule that only works from layouts that it has made itself."""
    tp = data.draw(st.integers(2, 4))
    units = tp + data.draw(st.integers(0, 4))
    slots = data.draw(st.lists(st.integers(0, tp - 1), min_size=units, max_size=units))
    before = tuple(tuple(unit for unit in range(units) if slots[unit] == slot) for slot in range(tp))
    dead = data.draw(st.frozensets(st.integers(0, tp - 1), max_size=tp - 1))
    assert moved(before, assign(units, tp, dead, before)) == fewest_moves(units, tp, dead, before)


@given(layouts())
def test_return_to_base(layout: tuple[int, int, list[frozenset[int]]]) -> None:
    """Catches traces of old failures in the layout that has no dead slot."""
    units, tp, deaths = layout
    last = history(units, tp, deaths)[-1]
    assert assign(units, tp, (), last) == base_assignment(units, tp) == assign(units, tp, ())


def test_first_loss_moves_the_lost_shard_only() -> None:
    """Catches a layout that is dealt anew when one device is gone."""
    for slot in range(8):
        assert moved(base_assignment(64, 8), assign(64, 8, [slot])) == 8


def test_one_of_two_dead_slots_returns() -> None:
    """Catches a returned slot that gets its base only, where another is still dead: 5,4,3 instead of 4,4,4."""
    hurt = assign(12, 4, [2, 3])
    assert [len(held) for held in hurt] == [6, 6, 0, 0]
    back = assign(12, 4, [2], hurt)
    assert [len(held) for held in back] == [4, 4, 0, 4]
    assert set(back[3]) > {9, 10, 11}
    assert moved(hurt, back) == 4


def test_commonest_loss() -> None:
    """Catches eight orphaned query heads that are dealt as a whole KV group to one survivor."""
    found = assign(64, 8, [3])
    assert sorted(len(held) - 8 for slot, held in enumerate(found) if slot != 3) == [1, 1, 1, 1, 1, 1, 2]
    kinds = (Kind("head", 64, 1), Kind("kv", 8, 1, "head", 8))
    for slot in (0, 1, 2, 4, 5, 6, 7):
        assert held_units(kinds, {"head": found}, slot)["kv"] == tuple(sorted((3, slot)))


@given(layouts(), st.integers(1, 4))
def test_kv_heads_follow_query_heads(layout: tuple[int, int, list[frozenset[int]]], group: int) -> None:
    """Catches a device without the KV head of one of its query heads, or with one that it does not use."""
    num_kv, tp, deaths = layout
    found = history(num_kv * group, tp, deaths)[-1]
    kinds = (Kind("head", 3 * num_kv * group, 3), Kind("kv", 3 * num_kv, 3, "head", group))
    held = [held_units(kinds, {"head": found}, slot) for slot in range(tp)]
    for slot in range(tp):
        assert held[slot]["head"] == found[slot]
        assert set(held[slot]["kv"]) == {unit // group for unit in found[slot]}
    assert {unit for slot in range(tp) for unit in held[slot]["kv"]} == set(range(num_kv))


def test_kv_heads_of_the_spec(make_spec: Callable[..., ModelSpec]) -> None:
    """Catches a kind with a parent that is dealt by itself, away from its query heads."""
    spec = make_spec(heads=8, kv_heads=2)
    assert [kind.name for kind in spec.assigned_kinds] == ["head", "ffn", "vocab"]


@pytest.mark.parametrize(
    ("units", "tp", "dead", "parts"),
    [
        pytest.param(8, 4, [4], ["slot 4", "0..3"], id="slot too high"),
        pytest.param(8, 4, [-1], ["slot -1", "0..3"], id="slot negative"),
        pytest.param(8, 2, [0, 1], ["all 2 slots"], id="all dead"),
        pytest.param(3, 4, [], ["3 units", "TP 4", "at most 3"], id="more slots than units"),
    ],
)
def test_impossible(units: int, tp: int, dead: list[int], parts: list[str]) -> None:
    """Catches an impossible layout that is answered, or refused without its numbers."""
    with pytest.raises(PlanError) as info:
        assign(units, tp, dead)
    assert all(part in str(info.value) for part in parts)
