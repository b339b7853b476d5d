import pytest

from runflat.sim.engine import Engine


def test_events_run_in_order_of_time_then_of_entry() -> None:
    """Catches a heap that swaps events of the same time, which would make a run depend on chance."""
    engine: Engine[int] = Engine([(2.0, "b", 1), (1.0, "a", 2), (2.0, "c", 3)])
    engine.put(1.0, "d", 4)
    seen: list[tuple[float, str, int]] = []
    assert [entry[2] for entry in engine.pending()] == ["a", "d", "b", "c"]
    assert engine.run(1.5, lambda *event: seen.append(event)) == 2
    assert engine.now_s == 1.5
    engine.run(9.0, lambda *event: seen.append(event))
    assert seen == [(1.0, "a", 2), (1.0, "d", 4), (2.0, "b", 1), (2.0, "c", 3)]
    assert engine.now_s == 9.0


def test_an_event_may_put_further_ones_but_not_into_the_past() -> None:
    """Catches history that runs backwards."""
    engine: Engine[int] = Engine([(1.0, "tick", 0)])
    seen: list[float] = []

    def handle(time_s: float, kind: str, value: int) -> None:
        seen.append(time_s)
        if value < 3:
            engine.put(time_s + 1, kind, value + 1)

    assert engine.run(10.0, handle) == 4
    assert seen == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(ValueError, match="before now"):
        engine.put(5.0, "late", 0)
