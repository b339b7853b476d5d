"""Chaos: strikes that the job can bear, at random and from a log, and a short run under them from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runflat.check.chaos import MOST_AWAY, Random, Replay, Sight, Strike, bearable
from runflat.cluster.events import PHASES, Event, EventKind, event_to_json, parse_events
from runflat.commands import chaos

HEALTHY = {0: ("0:0", "0:1", "0:2", "0:3"), 1: ("1:0", "1:1", "1:2", "1:3")}
ALL = frozenset(device for members in HEALTHY.values() for device in members)


def sight(away: frozenset[str] = frozenset(), step: int = 100, time_s: float = 0.0) -> Sight:
    """Two replicas of TP 4, some of them away."""
    live = {replica: tuple(d for d in members if d not in away) for replica, members in HEALTHY.items()}
    return Sight(
        time_s, step, {replica: members for replica, members in live.items() if members}, tuple(away), 4, len(ALL)
    )


def kill(device: str, phase: str = "sync") -> Event:
    """A kill at step 102."""
    return Event(event=EventKind.KILL, device=device, step=102, phase=phase)


@pytest.mark.parametrize(
    ("away", "lost", "ok"),
    [
        ((), ("0:1",), True),
        ((), ("0:1", "0:2"), True),
        ((), ("0:1", "1:2"), True),
        ((), ("0:1", "1:1"), False),
        (("0:1",), ("0:2",), True),
        (("0:1",), ("1:2",), True),
        (("0:1",), ("1:2", "0:3"), False),
        (("0:0", "0:1", "0:2", "0:3"), ("1:0",), False),
        (("0:0", "0:1", "0:2", "1:0", "1:1"), ("1:2",), False),
    ],
)
def test_bearable(away: tuple[str, ...], lost: tuple[str, ...], ok: bool) -> None:
    """Catches chaos that takes the last holder of a unit, after which going back is right and no fault of the job."""
    assert bearable(sight(frozenset(away)), Strike(tuple(kill(device) for device in lost))) is ok


@given(st.integers(0, 1000), st.sets(st.sampled_from(sorted(ALL)), max_size=5))
def test_random_strikes_hit_who_is_there(seed: int, away: set[str]) -> None:
    """Catches strikes at devices that are away, returns of devices that are there, and losses that nobody survives."""
    seen = sight(frozenset(away))
    strike = Random(seed).next(seen)
    if strike is None:
        assert not away
        return
    back = {event.place for event in strike.events if event.event is EventKind.RETURN}
    assert back <= away
    assert {event.place for event in strike.events} - back <= ALL - away
    assert bearable(seen, strike)
    assert back or len(away) < MOST_AWAY
    assert parse_events(json.dumps([event_to_json(event) for event in strike.events])) == strike.events


def test_random_reaches_every_kind_and_phase() -> None:
    """Catches a kind of fault, or a phase, that chaos never tries."""
    kinds, phases = set(), set()
    source = Random(1)
    for number in range(3000):
        strike = source.next(sight(frozenset({"0:2"} if number % 2 else set())))
        assert strike is not None
        kinds |= {event.event.value for event in strike.events}
        phases |= {event.phase for event in strike.events if event.phase}
    assert kinds == {"kill", "stop", "slow", "flake", "drain", "return", "corrupt"}
    assert phases == set(PHASES)


def test_same_seed_same_strikes() -> None:
    """Catches a choice that is not the seed's."""
    one, other = (Random(7) for _ in range(2))
    assert [one.next(sight(step=n)) for n in range(50)] == [other.next(sight(step=n)) for n in range(50)]


def test_replay_strikes_when_step_and_devices_are_there() -> None:
    """Catches a replay that strikes too early, splits a pair, or waits for ever for a device that does not come."""
    pair = (kill("0:1"), kill("1:2"))
    rows = [*pair, Event(event=EventKind.RETURN, device="0:1", step=120), kill("0:3")]
    details = ["strike 1", "strike 1", "strike 2", "strike 3"]
    text = "\n".join(json.dumps({**event_to_json(e), "detail": d}) for e, d in zip(rows, details, strict=True))
    source = Replay(parse_events(text))
    assert source.next(sight(step=99)) is None
    assert source.next(sight(step=101)) == Strike(pair)
    assert source.next(sight(step=117)) is None
    assert source.next(sight(frozenset({"0:1"}), step=118)) == Strike((rows[2],))
    absent = frozenset({"0:3"})
    assert source.next(sight(absent, step=130, time_s=10.0)) is None
    assert source.next(sight(absent, step=140, time_s=20.0)) is None
    assert not source.exhausted
    assert source.next(sight(absent, step=150, time_s=30.0)) is None
    assert source.exhausted


@pytest.mark.process
@pytest.mark.timeout(400)
def test_chaos_of_30_faults_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches whatever a random mix of faults can break; the log in the message replays it."""
    code = chaos.main(["--faults", "30", "--seed", "1", "--run", str(tmp_path / "run"), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["problems"] == [], (tmp_path / "run" / "chaos.jsonl").read_text()
    assert code == 0
    assert result["num_faults"] >= 30
    zero = ("hangs", "committed_steps_lost", "sequences_lost", "sequences_doubled", "mismatches")
    assert {name: result[name] for name in zero} == dict.fromkeys(zero, 0)
    assert set(result["recovery_s"]) == {"median", "p99", "max"}
