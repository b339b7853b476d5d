"""Injected faults: the builder, who executes what, and that each strikes once."""

import json

import pytest

from runflat.cluster.events import Event, EventKind, event_to_json, parse_events
from runflat.elastic.inject import Inject, Script, Striker, check_events, for_controller, for_workers, told_to_return
from runflat.errors import TraceError

EVENTS = (
    Inject()
    .kill("1:2", 4, "backward")
    .stop("0:1", 5, duration_s=2.0)
    .slow("0:0", 6, 3.0)
    .flake("0:0", "1:0", 7)
    .raise_("0:3", 8)
    .drain("1:1", 9)
    .return_("1:2", 10)
    .corrupt("0:2", 3)
    .events
)


def test_the_builder_writes_what_the_file_format_reads() -> None:
    """Catches a builder whose events cannot be replayed from a file."""
    rows = [event_to_json(event) for event in EVENTS]
    text = "\n".join(json.dumps(row) for row in rows)
    assert parse_events(text) == EVENTS


def test_everything_is_executed_by_exactly_one_side() -> None:
    """Catches an event that nobody executes, or both."""
    assert set(for_workers(EVENTS)) | set(for_controller(EVENTS)) == set(EVENTS)
    assert {event.event for event in for_controller(EVENTS)} == {EventKind.DRAIN, EventKind.RETURN}
    dated = Event(event=EventKind.FAIL, device="0:0", time_s=3.0)
    assert for_controller([dated]) == (dated,)
    assert told_to_return(EVENTS) >= {"1:2", "0:1"}


def test_an_event_strikes_its_device_in_its_step_and_phase_once() -> None:
    """Catches a kill that comes again in the next life, or strikes a neighbour."""
    striker = Striker([event_to_json(event) for event in EVENTS], "1:2")
    assert striker.at(4, "forward") == ()
    assert striker.at(3, "backward") == ()
    assert [event.event for event in striker.at(4, "backward")] == [EventKind.KILL]
    assert striker.at(4, "backward") == ()
    assert Striker(EVENTS, "1:3").at(4, "backward") == ()
    assert len(Striker(EVENTS, "0:0").at(6, "forward")) == 1, "without a phase it strikes when the step begins"


def test_a_fault_put_into_a_running_job_strikes_at_its_next_phase_once() -> None:
    """Catches a fault that comes a step too late to be exact, and so never strikes, or that strikes again."""
    striker = Striker((), "1:2")
    striker.add({"event": "kill", "device": "1:2", "step": 4, "phase": "backward"})
    assert striker.at(3, "backward") == ()
    assert striker.at(6, "forward") == ()
    assert [event.event for event in striker.at(6, "backward")] == [EventKind.KILL]
    assert striker.at(6, "backward") == ()


def test_in_a_return_the_step_does_not_matter() -> None:
    """Catches an event in the self-test, where the device does not know the step yet, that never strikes."""
    events = Inject().kill("1:2", 8, "selftest").events
    assert len(Striker(events, "1:2").at(0, "selftest")) == 1


def test_the_script_is_due_by_steps_or_by_time_until_it_is_done() -> None:
    """Catches a return that is lost because it could not be carried out at once."""
    dated = Event(event=EventKind.KILL, device="0:0", time_s=3.0)
    script = Script((*EVENTS, dated))
    assert script.due(1.0, 8) == ()
    assert [event.event for event in script.due(1.0, 9)] == [EventKind.DRAIN]
    assert dated in script.due(3.0, 0)
    (first,) = script.due(1.0, 9)
    script.done(first)
    assert script.due(1.0, 9) == ()


def test_rates_are_seeded_and_a_device_returns_before_it_fails_again() -> None:
    """Catches runs that cannot be repeated, and a device that is killed twice without a return."""
    devices = ["0:0", "0:1", "1:0"]
    first, again, other = (Inject().by_rate(devices, 0.2, 50, seed, 5).events for seed in (1, 1, 2))
    assert first == again != other
    for device in devices:
        kinds = [event.event for event in first if event.device == device]
        assert kinds == [EventKind.KILL, EventKind.RETURN] * (len(kinds) // 2) + [EventKind.KILL] * (len(kinds) % 2)
    assert len(first) > 10


BAD = {
    "unknown device": (Event(event=EventKind.KILL, device="9:9", step=1), "no device 9:9"),
    "unknown peer": (Event(event=EventKind.FLAKE, device="0:0", peer="9:9", step=1), "no device 9:9"),
    "a node": (Event(event=EventKind.KILL, node="n1", step=1), "name a device"),
    "no moment": (Event(event=EventKind.KILL, device="0:0"), "no moment"),
    "a moment before there is one": (Inject().corrupt("0:0", 0, what="moment").events[0], "no moments"),
    "a flake by time": (Event(event=EventKind.FLAKE, device="0:0", peer="0:1", time_s=1.0), "give 'step'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_nobody_could_execute_is_refused(case: str) -> None:
    """Catches a script that silently does nothing."""
    event, part = BAD[case]
    with pytest.raises(TraceError, match=part):
        check_events([event], ["0:0", "0:1"])
    check_events([Event(event=EventKind.KILL, device="0:0", time_s=1.0)], ["0:0"])
