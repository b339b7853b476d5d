"""What a log says of those who are turned away."""

from __future__ import annotations

from runflat.cluster.refusals import NOTE_EVERY_S, Refusals


def test_refusals_are_counted_and_summed() -> None:
    """Catches a log that strangers can fill, one that says nothing, and a table that grows with addresses."""
    refusals = Refusals()
    for _ in range(3):
        refusals.add("10.0.0.1", "why")
    assert refusals.due(0.0) == ["refused 3 calls from 10.0.0.1: why"]
    for _ in range(997):
        refusals.add("10.0.0.1", "why")
    assert refusals.due(NOTE_EVERY_S - 1) == []
    refusals.add("10.0.0.2", "another reason")
    assert refusals.due(NOTE_EVERY_S - 1) == ["refused a call from 10.0.0.2: another reason"]
    assert refusals.due(NOTE_EVERY_S) == ["refused 997 calls from 10.0.0.1: why"]
    for number in range(1000):
        refusals.add(f"10.1.{number // 250}.{number % 250}", "many")
    lines = refusals.due(2 * NOTE_EVERY_S)
    assert len(lines) <= 65
    assert any("other addresses" in line for line in lines)
    refusals.add("10.0.0.1", "at the end")
    assert refusals.due(2 * NOTE_EVERY_S + 1, all_of_them=True) == ["refused a call from 10.0.0.1: at the end"]
