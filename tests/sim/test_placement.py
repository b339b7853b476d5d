from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from runflat.cluster.topology import Topology
from runflat.plan.strategies import Strategy
from runflat.sim.arrange import Arrangement, Full, Packed, Placed, Seats
from runflat.sim.placement import Placement

SHAPE = Topology(tp_full=3, dp=3, pp=2, domain_size=7, num_spare_domains=1, num_spare_devices=2)
MOVES = st.lists(st.tuples(st.integers(0, SHAPE.num_devices - 1), st.booleans()), max_size=60)


def stays(lost: int) -> Strategy:
    """A chain that keeps a group down to one device."""
    return Strategy.NTP if lost < 3 else Strategy.DROP


def leaves(lost: int) -> Strategy:
    """A chain that drops every hit group."""
    return Strategy.DROP


def drive(placement: Placement, arrangement: Arrangement | None, moves: list[tuple[int, bool]]) -> Counter[int]:
    """How often each device is down after all moves; a return of a healthy device is left out."""
    down: Counter[int] = Counter()
    for device, failed in moves:
        if not failed and not down[device]:
            continue
        down[device] += 1 if failed else -1
        change = (placement.fail if failed else placement.back)(device)
        if change is not None and arrangement is not None:
            arrangement.apply(change, failed=failed)
    return +down


@given(MOVES, st.booleans())
def test_lost_devices_are_those_that_no_spare_covers(moves: list[tuple[int, bool]], cover: bool) -> None:
    """Catches a dead device that is forgotten or counted twice, and a spare that serves two slots."""
    placement = Placement(SHAPE, cover=cover)
    down = drive(placement, None, moves)
    assert placement.num_failed == len(down)
    roles = Counter(placement.role(device) for device in range(SHAPE.num_devices))
    fresh = Counter(Placement(SHAPE, cover=cover).role(device) for device in range(SHAPE.num_devices))
    assert roles == fresh
    by_role = Counter(placement.role(device) for device in down)
    assert placement.lost == {role[1]: count for role, count in by_role.items() if role[0] == "group"}
    if cover and placement.lost:
        alive = [d for d in range(SHAPE.num_devices) if d not in down and placement.role(d) == ("spare", 0)]
        assert not alive


@given(MOVES, st.sampled_from(["packed", "placed"]), st.booleans(), st.sampled_from([stays, leaves]))
def test_classes_are_those_of_a_count_from_scratch(
    moves: list[tuple[int, bool]], kind: str, swap: bool, link: object
) -> None:
    """Catches bookkeeping that drifts over many failures and returns."""
    placement = Placement(SHAPE, cover=False)
    seats = Seats(6, SHAPE.num_groups, swap=swap)
    rule = stays if link is stays else leaves
    arrangement: Packed | Placed = (Packed if kind == "packed" else Placed)(seats, 6, 2, rule)
    drive(placement, arrangement, moves)
    if swap and len(placement.lost) <= 2:
        assert not seats.lost
    lost = sorted(seats.lost.values())
    classes = arrangement.classes()
    groups: Counter[int] = Counter()
    for entry in classes:
        assert sum(num for _, num in entry.groups) == entry.num * 2
        assert entry.worst == max(k for k, _ in entry.groups)
        groups.update(dict(entry.groups))
    num_replicas = sum(entry.num for entry in classes)
    if kind == "packed":
        usable = 6 - sum(rule(k) is not Strategy.NTP for k in lost)
        assert num_replicas == usable // 2
        assert groups[0] == min(6 - len(lost), num_replicas * 2)
    else:
        wanted = [
            r
            for r in range(3)
            if all(rule(seats.lost.get(s, 0)) is Strategy.NTP or s not in seats.lost for s in (2 * r, 2 * r + 1))
        ]
        assert num_replicas == len(wanted)


@given(MOVES, st.booleans(), st.booleans())
def test_full_replicas_use_whole_groups_only(moves: list[tuple[int, bool]], spare: bool, eager: bool) -> None:
    """Catches a restart that counts dead groups in, or a job that stays down although groups are whole."""
    placement = Placement(SHAPE, cover=False)
    full = Full(SHAPE.num_groups, 3, 2, spare=spare, eager=eager)
    drive(placement, full, moves)
    whole = SHAPE.num_groups - len(placement.lost)
    active = sum(entry.num for entry in full.classes())
    assert active <= min(3, whole // 2)
    if eager:
        assert active == min(3, whole // 2)
    if whole >= 2:
        assert active >= 1


def test_packing_fills_replicas_from_the_most_hit_group_down() -> None:
    """Catches one group hit hard that drags down more replicas than it must."""
    seats = Seats(8, 8, swap=False)
    packed = Packed(seats, 8, 2, stays)
    placement = Placement(Topology(tp_full=3, dp=4, pp=2, domain_size=3), cover=False)
    for device in (0, 1, 6, 12):  # groups 0 (two lost), 2 and 4
        change = placement.fail(device)
        assert change is not None
        packed.apply(change, failed=True)
    assert [(entry.num, entry.worst, entry.groups) for entry in packed.classes()] == [
        (1, 2, ((2, 1), (1, 1))),
        (1, 1, ((1, 1), (0, 1))),
        (2, 0, ((0, 4),)),
    ]


def test_a_left_over_device_serves_its_own_domain_only() -> None:
    """Catches a rack's spare GPU that is wired into another rack's fast links."""
    shape = Topology(tp_full=3, dp=2, domain_size=4)
    placement = Placement(shape, cover=True)
    first = placement.fail(0)
    assert first is not None
    assert (first.by_spare, first.lost) == (True, 0)
    second = placement.fail(1)
    assert second is not None
    assert (second.by_spare, second.lost) == (False, 1)
    assert placement.lost == {0: 1}
    back = placement.back(0)
    assert back is not None
    assert (back.by_spare, back.lost) == (True, 0)
