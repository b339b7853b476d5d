import json
from pathlib import Path

import pytest

from runflat.cluster.events import Event, EventKind, event_to_json, parse_events, read_events, write_events
from runflat.errors import TraceError

ISSUED = """[{"event": "kill", "device": "1:2", "step": 4, "phase": "backward"},
             {"event": "return", "device": "1:2", "step": 8}]"""


def test_the_json_list_that_the_injector_documents_is_read() -> None:
    """Catches a reader that takes JSON lines only, or that loses step or phase."""
    kill, back = parse_events(ISSUED)
    assert kill == Event(event=EventKind.KILL, device="1:2", step=4, phase="backward")
    assert back == Event(event=EventKind.RETURN, device="1:2", step=8)
    assert kill.loses_device
    assert not back.loses_device


def test_lines_are_read_back_as_written(tmp_path: Path) -> None:
    """Catches a field that is dropped or changes its type on the way through a file."""
    events = (
        Event(event=EventKind.FAIL, node="n7", time_s=12.5, duration_s=3600.0, cause="GPU HBM3"),
        Event(event=EventKind.SLOW, device="0:1", step=3, phase="forward", factor=2.0, seed=7, generation=2),
        Event(event=EventKind.FLAKE, device="0:1", peer="1:1", step=0, detail="cable"),
        Event(event=EventKind.CORRUPT, device="s0", time_s=1.0, target="moment"),
    )
    path = tmp_path / "events.jsonl"
    write_events(path, events)
    assert read_events(path) == events
    assert "peer" not in event_to_json(events[0])


def test_other_notes_of_the_runtime_are_passed_over() -> None:
    """Catches a reader that fails on a run's own events.jsonl because it also holds incidents."""
    text = '{"record": "incident", "anything": 1}\n\n{"event": "fail", "device": "0:0", "time_s": 1}\n'
    assert [event.place for event in parse_events(text)] == ["0:0"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"event": "explode", "device": "0:0"}, ["row 2", "'event'", "explode", "kill, stop"]),
        ({"event": "kill", "device": "0:0", "stepp": 1}, ["row 2", "'stepp'", "allowed", "phase"]),
        ({"event": "kill", "device": "0:0", "step": "4"}, ["row 2", "'step'", "'4'", "int"]),
        ({"event": "kill", "device": "0:0", "step": True}, ["row 2", "'step'", "True"]),
        ({"event": "kill"}, ["row 2", "'device' or 'node'"]),
        ({"event": "kill", "device": "0:0", "node": "a"}, ["row 2", "exactly one"]),
        ({"event": "kill", "device": "0:0", "phase": "sync"}, ["row 2", "'phase'", "'step'"]),
        ({"event": "kill", "device": "0:0", "step": 1, "phase": "lunch"}, ["row 2", "lunch", "backward"]),
        ({"event": "kill", "device": "0:0", "time_s": -1}, ["row 2", "'time_s'", "-1"]),
        ({"event": "fail", "device": "0:0", "time_s": float("nan")}, ["row 2", "'time_s'", "nan"]),
        ({"event": "slow", "device": "0:0", "step": 1}, ["row 2", "'factor'"]),
        ({"event": "slow", "device": "0:0", "step": 1, "factor": 0}, ["row 2", "'factor'", "above 0"]),
        ({"event": "flake", "device": "0:0", "step": 1}, ["row 2", "'peer'"]),
        ({"event": "flake", "device": "0:0", "peer": "0:0", "step": 1}, ["row 2", "'peer'", "two different ends"]),
        ({"event": "corrupt", "device": "0:0", "step": 1, "target": "soul"}, ["row 2", "soul", "moment"]),
    ],
)
def test_a_bad_row_is_named_with_file_row_field_and_what_is_allowed(row: dict[str, object], words: list[str]) -> None:
    """Catches a message that leaves the reader of a 10,000 row trace without the place or the remedy."""
    text = "\n".join(json.dumps(line) for line in ({"event": "kill", "device": "0:0", "step": 0}, row))
    with pytest.raises(TraceError) as caught:
        parse_events(text, source="faults.jsonl")
    assert "faults.jsonl" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("text", ['{"event": "kill"', "[1, 2]", '{"event": "kill", "device": "0:0"}\n7', "[{]"])
def test_text_that_is_no_list_of_objects_is_refused_by_name(text: str) -> None:
    """Catches a JSON error or a type error that reaches the user as a traceback."""
    with pytest.raises(TraceError, match=r"faults\.json"):
        parse_events(text, source="faults.json")


def test_a_missing_file_is_a_trace_error(tmp_path: Path) -> None:
    """Catches a traceback for a mistyped file name."""
    with pytest.raises(TraceError, match=r"no\.json"):
        read_events(tmp_path / "no.json")
