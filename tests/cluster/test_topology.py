import pytest
from hypothesis import given
from hypothesis import strategies as st

from runflat.cluster.events import Event, EventKind
from runflat.cluster.health import Health
from runflat.cluster.topology import Topology, seats_by_rank
from runflat.errors import ConfigError, TraceError


@given(
    st.integers(1, 8), st.integers(1, 5), st.integers(1, 3), st.integers(8, 20), st.integers(0, 2), st.integers(0, 3)
)
def test_every_device_has_one_name_and_every_group_its_devices(
    tp: int, dp: int, pp: int, domain: int, spare_domains: int, spares: int
) -> None:
    """Catches two devices with one name, or a group that does not have tp devices in one domain."""
    shape = Topology(
        tp_full=tp, dp=dp, pp=pp, domain_size=domain, num_spare_domains=spare_domains, num_spare_devices=spares
    )
    names = [shape.device_id(number) for number in range(shape.num_devices)]
    assert len(set(names)) == shape.num_devices
    assert [shape.device_number(name) for name in names] == list(range(shape.num_devices))
    groups = [shape.group_of(number) for number in range(shape.num_devices)]
    for group in range(shape.num_groups):
        members = [number for number, found in enumerate(groups) if found == group]
        assert len(members) == tp
        assert len({shape.domain_of(number) for number in members}) == 1
    assert sum(":" in name for name in names) == shape.num_job_devices


@pytest.mark.parametrize("name", ["9:0", "0:9", "s5", "d0.0", "x", "0:-1", ""])
def test_unknown_devices_are_named(name: str) -> None:
    """Catches an event about a device that does not exist and would hit another one."""
    with pytest.raises(TraceError, match="no device"):
        Topology(tp_full=4, dp=2, domain_size=4, num_spare_devices=1).device_number(name)


def test_impossible_shapes_are_refused() -> None:
    """Catches tensor parallelism across domains, which no fast link joins."""
    with pytest.raises(ConfigError, match="tp_full 16 exceeds the domain of 8"):
        Topology(tp_full=16, dp=1, domain_size=8)
    with pytest.raises(ConfigError, match="num_spare_devices is -1"):
        Topology(tp_full=1, dp=1, num_spare_devices=-1)


def test_health_follows_events() -> None:
    """Catches a return that does not heal, or a slow device that counts as failed."""
    health = Health(("0:0", "0:1"))
    slow = health.after(Event(event=EventKind.SLOW, device="0:1", step=1, factor=2.0))
    assert slow.live == ("0:0", "0:1")
    assert slow.slowness("0:1") == 2.0
    down = slow.after(Event(event=EventKind.KILL, device="0:1", step=2))
    assert not down.is_live("0:1")
    assert down.after(Event(event=EventKind.RETURN, device="0:1", step=3)) == health
    assert health.after(Event(event=EventKind.FLAKE, device="0:0", peer="0:1", step=1)) == health
    assert not health.is_live("9:9")


def test_ranks_are_packed_into_domains() -> None:
    """Catches a replica that two nodes share, what is left over on a node and is no spare, and spares counted twice."""
    assert seats_by_rank(4, 2, 2, 4) == (*(f"{r}:{slot}" for r in range(2) for slot in range(4)), "s0", "s1")
    assert seats_by_rank(3, 3, 4, 8) == (
        *("0:0", "0:1", "0:2", "1:0", "1:1", "1:2", "s0", "s1"),
        *("2:0", "2:1", "2:2", "s2", "s3"),
    )
    assert seats_by_rank(3, 3, 1, 8)[6:] == ("s0", None, "2:0", "2:1", "2:2")
    with pytest.raises(ConfigError, match="exceeds the domain of 4"):
        seats_by_rank(8, 2, 0, 4)
