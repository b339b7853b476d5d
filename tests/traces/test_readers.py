import json
from pathlib import Path

import numpy as np
import pytest

from runflat.cluster.topology import Topology
from runflat.errors import TraceError
from runflat.traces.describe import describe, down_steps, facts_table
from runflat.traces.readers import read_trace, write_csv
from runflat.traces.trace import DAY_S, trace_from_events, trace_to_events


def fault(node: str, day: float, kind: str, desc: str = "a") -> dict[str, object]:
    """A row in the format of InfiniteHBD-Trace."""
    what = {"Level": "Hardware Failure", "Class": "GPU", "Desc": desc}
    return {"node_id": node, "event_time": day, "event_type": f"fault_{kind}", "fault_type": what}


FAULTS = [fault("a", 4.0, "start"), fault("b", 4.0, "start"), fault("a", 5.0, "end"), fault("b", 5.5, "end")]


def write(path: Path, text: str) -> Path:
    """The path, after the text was written to it."""
    path.write_text(text)
    return path


def test_infinitehbd_pairs_by_node_and_fault(tmp_path: Path) -> None:
    """Catches overlapping faults of one node that are paired crosswise, and days read as seconds."""
    rows = [*FAULTS[:2], fault("a", 4.5, "start", "fan"), *FAULTS[2:], fault("a", 6.0, "end", "fan")]
    trace = read_trace(write(tmp_path / "t.json", json.dumps(rows)), num_devices=10)
    assert trace.names == ("a", "b")
    assert trace.num_devices == 10
    assert (trace.duration_s / DAY_S).tolist() == [1.0, 1.5, 1.5]
    assert trace.span_s == 2 * DAY_S
    times, down = down_steps(trace)
    assert (times / DAY_S).tolist() == [0.0, 1.5, 2.0]
    assert down.tolist() == [2, 1, 0]


def test_spot_list_counts_from_removal_to_the_next_add(tmp_path: Path) -> None:
    """Catches a node that counts as failed before it existed."""
    text = "1000,add,n1\n2000,add,n2\n3000,remove,n1\n9000,add,n1\n9500,remove,n2\n"
    trace = read_trace(write(tmp_path / "spot.csv", text))
    assert trace.time_s.tolist() == [3.0, 9.5]
    assert trace.duration_s.tolist() == [6.0, float("inf")]


def test_our_csv_is_read_back_as_written(tmp_path: Path) -> None:
    """Catches a column that is lost, and an outage without end that becomes zero."""
    text = "time_s,duration_s,device,cause\n5,3.5,0:1,GPU\n1,,1:0,cable\n"
    first = read_trace(write(tmp_path / "a.csv", text))
    write_csv(tmp_path / "b.csv", first)
    second = read_trace(tmp_path / "b.csv")
    assert second.time_s.tolist() == [1.0, 5.0]
    assert np.isinf(second.duration_s[0])
    named = [second.names[device] for device in second.device]
    assert named == ["1:0", "0:1"]
    assert [second.causes[cause] for cause in second.cause] == ["cable", "GPU"]


def test_a_runs_events_are_a_trace_and_a_trace_is_events(tmp_path: Path) -> None:
    """Catches a run's own events.jsonl that cannot be described or simulated."""
    lines = [
        '{"event": "kill", "device": "1:2", "step": 1, "phase": "backward"}',
        '{"event": "fail", "device": "1:2", "time_s": 3.0}',
        '{"record": "incident", "anything": 1}',
        '{"event": "fail", "device": "1:2", "time_s": 3.5}',
        '{"event": "return", "device": "1:2", "time_s": 8.0}',
        '{"event": "fail", "device": "0:0", "time_s": 9.0, "cause": "cable"}',
    ]
    trace = read_trace(write(tmp_path / "events.jsonl", "\n".join(lines)))
    assert trace.time_s.tolist() == [3.0, 9.0]
    assert trace.duration_s.tolist() == [5.0, float("inf")]
    topology = Topology(tp_full=4, dp=2, domain_size=4)
    again = trace_from_events(trace_to_events(trace, topology), span_s=trace.span_s)
    assert again.duration_s.tolist() == trace.duration_s.tolist()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.json", json.dumps([FAULTS[2]]), ["row 1", "without a 'fault_start'"]),
        ("t.json", json.dumps([{**FAULTS[0], "event_time": "x"}]), ["row 1", "'event_time'", "'x'"]),
        ("t.json", json.dumps([FAULTS[0], {**FAULTS[1], "event_type": "boom"}]), ["row 2", "boom", "fault_end"]),
        ("t.json", json.dumps([{k: v for k, v in FAULTS[0].items() if k != "fault_type"}]), ["'fault_type'"]),
        ("t.json", '[{"node_id": 1,', ["not JSON"]),
        ("t.csv", "1,add,n\n2,add,n\n", ["row 2", "'n'", "already up"]),
        ("t.csv", "1,add,n\n2,remove,m\n", ["row 2", "not up"]),
        ("t.csv", "1,add,n\n2,explode,n\n", ["row 2", "explode", "add, remove"]),
        ("t.csv", "1,add,n\n-5,remove,n\n", ["row 2", "'-5'"]),
        ("t.csv", "time_s,duration_s,device\n1,2,0:0\n1,nan,0:1\n", ["row 3", "'duration_s'", "nan"]),
        ("t.csv", "time_s,duration_s,device\n1,2,\n", ["row 2", "'device'"]),
        ("t.csv", "when,device\n1,0:0\n", ["time_s", "when", "wanted"]),
        ("t.jsonl", '{"event": "return", "device": "a", "time_s": 1}', ["event 1", "had not failed"]),
        ("t.jsonl", '{"event": "kill", "device": "a", "step": 1}', ["event 1", "'time_s'"]),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, name: str, text: str, words: list[str]) -> None:
    """Catches a traceback, or a row that is skipped in silence."""
    with pytest.raises(TraceError) as caught:
        read_trace(write(tmp_path / name, text))
    for word in [name, *words]:
        assert word in str(caught.value)


def test_more_devices_than_said_are_refused(tmp_path: Path) -> None:
    """Catches a concurrency over 100 % because the file names more nodes than the user said."""
    path = write(tmp_path / "t.json", json.dumps(FAULTS))
    with pytest.raises(TraceError, match="names 2 devices, more than the 1"):
        read_trace(path, num_devices=1)
    with pytest.raises(TraceError, match="cannot read"):
        read_trace(tmp_path / "absent.json")


def test_facts_are_printed_with_their_units(tmp_path: Path) -> None:
    """Catches a table without the numbers that matter."""
    facts = describe(read_trace(write(tmp_path / "t.json", json.dumps(FAULTS)), num_devices=4))
    assert facts.repair_mean_h == pytest.approx(30)
    assert facts.num_never_hit == 2
    text = facts_table(facts)
    for word in ("2 failures", "per device-day", "repair, hours  mean 30.0", "out at once"):
        assert word in text


def test_the_recorded_cluster_has_its_published_numbers(reference_data: Path) -> None:
    """Catches any change in pairing or concurrency: facts of the InfiniteHBD trace, computed independently."""
    facts = describe(read_trace(reference_data / "infinitehbd" / "fault_trace.json", num_devices=400))
    assert (facts.num_outages, facts.num_never_hit) == (584, 169)
    assert facts.down_quantiles == (0.0175, 0.055, 0.0775)
    assert facts.down_max == 0.0875
    assert facts.repair_mean_h == pytest.approx(132.8, abs=0.05)
    assert facts.repair_quantiles_h == pytest.approx((2.1, 20.4, 75.9, 311.3, 737.7), abs=0.06)
    assert facts.gap_cv == pytest.approx(1.76, abs=0.005)
    assert facts.top_tenth_share == pytest.approx(0.41, abs=0.005)


def test_the_recorded_spot_market_is_read(reference_data: Path) -> None:
    """Catches a reader that loses rows of the spot trace: 79 adds, 74 removals."""
    facts = describe(read_trace(reference_data / "bamboo_spot" / "g4dn-trace.csv"))
    assert facts.num_outages == 74
    assert facts.num_devices == 79
