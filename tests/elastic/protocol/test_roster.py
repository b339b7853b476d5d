"""Who stands where: what is kept from roster to roster is what a look at every device would find."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from runflat.elastic.device import LIVE, Device, Standing
from runflat.elastic.roster import Roster

NAMES = ("0:0", "0:1", "1:0", "s0")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.sampled_from(Standing),
            st.sampled_from((None, 1.0, 2.0)),
            st.booleans(),
        )
    )
)
def test_what_is_kept_is_what_is_so(changes: list[tuple[str, Standing, float | None, bool]]) -> None:
    """Catches a standing that is remembered although it has changed, and a look at all where nothing has."""
    roster = Roster({name: Device(name, Standing.STARTING, 0.0) for name in NAMES})
    for name, standing, killed_at, awaited in changes:
        before, kept = roster[name], roster.standings
        roster = roster.changed(replace(before, standing=standing, killed_at=killed_at, awaited=awaited, heard=1.0))
        found, devices = roster.standings, roster.values()
        assert found.names(standing) == tuple(d.name for d in devices if d.standing is standing)
        assert found.names(*LIVE) == tuple(d.name for d in devices if d.standing in LIVE)
        assert found.live == tuple(d.name for d in devices if d.standing in LIVE and d.killed_at is None)
        assert found.dying == tuple(d.name for d in devices if d.standing in LIVE and d.killed_at is not None)
        assert found.standby == tuple(d.name for d in devices if d.standing is Standing.STANDBY and d.killed_at is None)
        same = (before.standing, before.killed_at is None, before.awaited) == (standing, killed_at is None, awaited)
        assert (found is kept) == same
