"""The timeline of a step: what a browser loads shows that gradients are exchanged while backward still runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runflat.check.small import proof_config
from runflat.train.timing import MERGED, Mark, StepTimes, Timeline, merge_traces

PLACES = ((0, 0), (0, 1), (1, 0), (1, 1))


def test_overlap_can_be_seen(jobs: Any, tmp_path: Path) -> None:
    """Catches collectives without an end, on the wrong row, or all after backward; warm-up that is recorded."""
    job, run = jobs
    timelines = {
        place: Timeline(tmp_path / f"{place[0]}-{place[1]}.json", f"{place[0]}:{place[1]}", 1) for place in PLACES
    }
    task = job(proof_config("llama-gqa"), tp=2, num_steps=4, micro_batch=4, bucket_bytes=1 << 14, in_memory=False)
    run(task, timelines=timelines)
    merged = merge_traces(tmp_path)
    assert merged == tmp_path / MERGED
    events = json.loads(merged.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"device 0:0", "device 0:1", "device 1:0", "device 1:1"}
    for pid in {event["pid"] for event in events}:
        spans = [event for event in events if event["pid"] == pid and event["ph"] == "X"]
        (backward,) = (span for span in spans if span["name"] == "backward")
        end = backward["ts"] + backward["dur"]
        exchanged = [span for span in spans if span["cat"] == "exchange" and "sync" in span["name"]]
        under = [span for span in exchanged if backward["ts"] < span["ts"] < end and span["dur"] > 0]
        assert len(under) > len(exchanged) / 2 > 1, f"{len(under)} of {len(exchanged)} began under backward"
        assert any(span["cat"] == "tensor parallel" for span in spans)
    assert merge_traces(tmp_path / "nothing") is None


def test_what_a_device_does_is_timed_by_its_marks(tmp_path: Path) -> None:
    """Catches GPU times that are those of the launches, a mark that is waited for in the step, and a part too many."""
    passed = iter(range(100))
    asked: list[int] = []

    def mark() -> Mark:
        number = next(passed)

        def seconds() -> float:
            asked.append(number)
            return 10.0 * number

        return seconds

    timeline = Timeline(tmp_path / "0-0.json", "0:0", 1, lambda: 1e6, mark)
    parts = StepTimes(lambda name: None, timeline, lambda: 5.0)
    for _ in range(4):
        timeline.step()
        parts.begin("forward")  # mark 0 in the recorded step
        ended = timeline.launched("generation1/tp0", "all_reduce", 8)  # 1
        if ended is not None:
            ended()  # 2
        parts.enter("backward")  # 3
        assert not asked, "the host waits for the device in the middle of a step"
        parts.end()  # 4
        asked.clear()
    spans = [e for e in json.loads((tmp_path / "0-0.json").read_text())["traceEvents"] if e["ph"] == "X"]
    found = {(span["cat"], span["name"]): (span["ts"] / 1e6, span["dur"] / 1e6) for span in spans}
    assert found["device", "forward"] == (0.0, 30.0)
    assert found["device", "backward"] == (30.0, 10.0)
    assert found["tensor parallel", "all_reduce tp0, 8 bytes"] == (10.0, 10.0)
    assert found["step", "forward"] == (5.0, 0.0)
    assert len(spans) == 5


def test_parts_of_a_step() -> None:
    """Catches a part that is counted twice, that of a step before, and seconds between parts that nobody gets."""
    times = iter(range(100))
    heard: list[str] = []
    parts = StepTimes(heard.append, clock=lambda: float(next(times)))
    parts.begin("data")
    for name in ("forward", "backward", "forward", "backward", "sync"):
        parts.enter(name)
    assert parts.end() == {"data": 1.0, "forward": 2.0, "backward": 2.0, "sync": 1.0}
    assert heard == ["forward", "backward", "forward", "backward", "sync"]
    parts.begin("data")
    assert parts.end() == pytest.approx({"data": 1.0})
