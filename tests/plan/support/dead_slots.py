"""Which slots are dead, for hypothesis."""

from hypothesis import strategies as st

from runflat.plan.plan import Place


@st.composite
def dead_places(draw: st.DrawFn, tp: int = 4, replicas: int = 3) -> frozenset[Place]:
    """Dead places that leave each replica a device."""
    slots = st.frozensets(st.integers(0, tp - 1), max_size=tp - 1)
    return frozenset((replica, slot) for replica in range(replicas) for slot in draw(slots))
