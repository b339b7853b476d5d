"""What the benchmark against peers makes of the commits that it saw: no job is started here."""

import json
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def timings(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("peers/timings.py")


def test_a_line_of_each_system_is_read(timings: ModuleType) -> None:
    """Catches a record whose fields have other names: a peer's own, and a step of runflat's books."""
    peer = {"step": 3, "tokens": 384, "epoch": 2, "loss": 5.0}
    ours = {"step": 3, "generation": 2, "loss": 5.0, "tokens_per_s": 99.0}
    assert timings.parse_line(json.dumps(peer), 7.0, 768) == timings.Commit(7.0, 3, 384, 2, 5.0)
    assert timings.parse_line(json.dumps(ours), 7.0, 768) == timings.Commit(7.0, 3, 768, 2, 5.0)


def test_replays_are_no_progress(timings: ModuleType) -> None:
    """Catches a restart from a checkpoint that is taken for recovered when it repeats old steps."""
    seen = [timings.Commit(float(step), step, 100, 0) for step in range(8)]
    again = [timings.Commit(20.0 + step, step, 100, 1) for step in range(5, 13)]
    one = timings.timing([*seen, *again], timings.Kill(7.5, "1:1", 32.0))
    assert one.any_step_s == 17.5
    assert one.num_replays == 3
    assert one.recover_s == 20.5
    assert (one.before, one.after) == (100.0, 100.0)
    assert [commit.step for commit in timings.progress([*seen, *again])] == list(range(13))
    # 5 new steps of 1 s each in the 25 s since the last commit before the kill
    assert one.lost_s == pytest.approx(20.0)


def test_half_a_batch_is_half_a_rate(timings: ModuleType) -> None:
    """Catches a rate in steps instead of tokens: a group that goes on alone makes as many steps as before."""
    whole = [timings.Commit(step + part / 100, step, 50, 2) for step in range(6) for part in (0, 1)]
    half = [timings.Commit(2.0 + step, step, 50, 1) for step in range(6, 12)]
    full = [timings.Commit(2.0 + step + part / 100, step, 50, 2) for step in range(12, 17) for part in (0, 1)]
    one = timings.timing([*whole, *half, *full], timings.Kill(5.5, "0:1", 18.5))
    assert one.recover_s == 2.5
    assert one.after / one.before == pytest.approx(0.5)
    # 13 s since the last commit, 6 half steps and 5 whole ones
    assert one.lost_s == pytest.approx(13.0 - 3.0 - 5.0)


def test_losses_are_of_whole_steps(timings: ModuleType) -> None:
    """Catches losses that look different because one system writes a line for each replica, or repeats a step."""
    seen = [(0, 0, 50, 6.0), (0, 0, 50, 5.0), (1, 0, 50, 4.0), (1, 0, 150, 2.0), (1, 1, 50, 9.0)]
    commits = [
        timings.Commit(1.0 + number, step, tokens, epoch, loss)
        for number, (step, epoch, tokens, loss) in enumerate(seen)
    ]
    assert timings.losses(commits, 3) == [5.5, 2.5]


def test_too_little_is_refused(timings: ModuleType) -> None:
    """Catches a time to recover without a commit, and a rate from a single one: here the dead group is back at once."""
    seen = [timings.Commit(float(step), step, 100, 0) for step in range(4)]
    with pytest.raises(ValueError, match="too few"):
        timings.timing(seen, timings.Kill(3.5, "1:0", 9.0))
    back = [timings.Commit(9.0, 4, 50, 1), *(timings.Commit(5.0 + step, step, 100, 2) for step in range(5, 9))]
    one = timings.timing([*seen, *back], timings.Kill(3.5, "1:0", 13.0))
    assert (one.recover_s, one.after) == (5.5, None)
    (row,) = timings.table({"theirs": [one]})
    assert row[4:6] == ("one step", "")


def test_table_has_a_row_for_each_system(timings: ModuleType) -> None:
    """Catches a column that does not belong to its heading, and a mean instead of a median."""
    kills = [timings.Timing(seconds, 0.5, 0, 1000.0, 750.0, 2.0, 9.0) for seconds in (1.0, 2.0, 9.0)]
    (row,) = timings.table({"ours": kills})
    assert len(row) == len(timings.HEADER)
    assert row == ("ours (3 kills)", "2.00 s", "1.00 to 9.00 s", "1000", "750", "0.75", "2.0 s")
