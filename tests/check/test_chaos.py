"""Chaos: strikes that the job can bear, at random and from a log, and a short run under them from end to end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_kind_comes_in_200_faults(seed: int) -> None:
    """Catches a kind that is possible too rarely to ever strike, as a flipped bit was: it takes that all are there."""
    source, struck, away, faults = Random(seed), set[str](), set[str](), 0
    while faults < 200:
        strike = source.next(sight(frozenset(away), step=10 * faults))
        assert strike is not None
        assert len(away) == 0 or all(event.event is not EventKind.CORRUPT for event in strike.events)
        struck |= {event.event.value for event in strike.events}
        faults += strike.num_faults
        away -= {event.place for event in strike.events if event.event is EventKind.RETURN}
        away |= strike.losing
    assert struck == {"kill", "stop", "slow", "flake", "drain", "return", "corrupt"}


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
    assert source.num_left_out == 0
    assert source.next(sight(absent, step=150, time_s=30.0)) is None
    assert source.exhausted
    assert source.num_left_out == 1


def test_a_replayed_flip_waits_until_all_are_there() -> None:
    """Catches a flipped bit that is fed to a device that joins, so that digests name others than the one it was in."""
    flip = Event(event=EventKind.CORRUPT, device="1:1", step=102, phase="forward", target="weight", seed=1)
    source = Replay([flip])
    assert source.next(sight(frozenset({"0:1"}), step=101)) is None
    assert source.next(sight(step=101)) == Strike((flip,))


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


LOG = (
    {"event": "corrupt", "device": "1:3", "step": 24, "phase": "forward", "target": "weight", "seed": 5}
    | {"detail": "strike 1"},
    {"event": "kill", "device": "0:2", "step": 46, "phase": "backward", "detail": "strike 2"},
    {"event": "kill", "device": "1:1", "step": 46, "phase": "sync", "detail": "strike 2"},
)
"""A flipped bit, and two kills at once."""


def _undated(rows: Sequence[Mapping[str, object]]) -> list[tuple[object, ...]]:
    """Faults as they were meant; those of one strike in the order of their devices, since any may come first."""
    return sorted(tuple(row.get(key) for key in ("step", "device", "event", "phase", "target", "seed")) for row in rows)


@pytest.mark.process
@pytest.mark.timeout(300)
def test_replay_of_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a log whose faults do not strike again, and a flipped bit that nobody finds or nobody counts."""
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in LOG))
    run = tmp_path / "run"
    code = chaos.main(["--seed", "0", "--replay", str(log), "--run", str(run), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["problems"] == []
    assert code == 0
    struck = [json.loads(line) for line in (run / "chaos.jsonl").read_text().splitlines()]
    assert struck[1]["detail"] == struck[2]["detail"] != struck[0]["detail"]
    assert _undated(struck) == _undated(LOG)
    assert (result["num_faults"], result["num_left_out"]) == (3, 0)
    assert (result["mismatches_injected"], result["mismatches_found"], result["mismatches"]) == (1, 1, 0)
