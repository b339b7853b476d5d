import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runflat.cluster.ledger import GOODPUT_NAMES, Category, Incident, Ledger, append_json_line


def test_every_category_has_a_goodput_name_and_a_place_in_the_table() -> None:
    """Catches a category that was added without its name beside it, or that the JSON leaves out."""
    assert set(GOODPUT_NAMES) == set(Category)
    assert list(Ledger().to_json()) == [category.value for category in Category]


@given(st.lists(st.tuples(st.sampled_from(list(Category)), st.floats(0, 1e7), st.integers(0, 100_000))))
def test_parts_sum_to_the_total_and_survive_json(charges: list[tuple[Category, float, int]]) -> None:
    """Catches time that is booked twice, dropped on the way to a file, or merged wrongly."""
    ledger = Ledger()
    for category, seconds, num_devices in charges:
        ledger.charge(category, seconds, num_devices)
    wanted = sum(seconds * num_devices for _, seconds, num_devices in charges)
    assert ledger.total_device_s == pytest.approx(wanted, rel=1e-12)
    again = Ledger.from_json(json.loads(json.dumps(ledger.to_json())))
    assert again == ledger
    assert ledger.merge([again]).total_device_s == pytest.approx(2 * wanted, rel=1e-12)


def test_check_finds_lost_and_doubled_time() -> None:
    """Catches a check that cannot fail."""
    ledger = Ledger()
    ledger.charge(Category.PRODUCTIVE, 10.0, 4)
    ledger.check(4, 10.0)
    with pytest.raises(ValueError, match="sum to 40"):
        ledger.check(4, 10.1)
    ledger.move(Category.REPLAY, Category.PRODUCTIVE, 1.0)
    with pytest.raises(ValueError, match="replay"):
        ledger.check(4, 10.0)


def test_discarded_work_moves_without_changing_the_total() -> None:
    """Catches a replayed step that is counted both as productive and as replay."""
    ledger = Ledger()
    ledger.charge(Category.PRODUCTIVE, 10.0, 4)
    ledger.move(Category.PRODUCTIVE, Category.REPLAY, 6.0)
    assert ledger.to_json()["replay"] == 6.0
    assert ledger.total_device_s == 40.0
    assert ledger.share(Category.PRODUCTIVE) == pytest.approx(0.85)


def test_time_is_never_booked_backwards() -> None:
    """Catches a clock that ran backwards and would hide another second."""
    with pytest.raises(ValueError, match="-1"):
        Ledger().charge(Category.IDLE, -1.0)


def test_a_category_of_another_version_is_named() -> None:
    """Catches a ledger file whose unknown part would silently vanish."""
    with pytest.raises(ValueError, match="coffee"):
        Ledger.from_json({"coffee": 1.0})


def test_an_incident_is_one_line_that_event_readers_pass_over(tmp_path: Path) -> None:
    """Catches an incident without its total or one that is taken for an event."""
    incident = Incident(
        number=0, device="1:2", cause="kill", started_s=3.0, strategy="ntp", phases_s={"detect": 0.5, "form": 0.25}
    )
    append_json_line(tmp_path / "events.jsonl", incident.to_json())
    append_json_line(tmp_path / "events.jsonl", incident.to_json())
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert len(lines) == 2
    row = json.loads(lines[0])
    assert row["record"] == "incident"
    assert row["stopped_s"] == 0.75
