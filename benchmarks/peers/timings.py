"""From what was seen of a job to seconds and tokens per second: no process, no clock, only records.

A *commit* is a step that training has completed, as it was seen from outside. A step that is done again after a restart
is a *replay*: it is no progress.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

NUM_INTERVALS = 4
"""Steps over which a rate is taken, before and after a kill."""


@dataclass(frozen=True)
class Commit:
    """A step that was committed at `time_s` with `tokens`; `epoch` changes when the members of the job do."""

    time_s: float
    step: int
    tokens: int
    epoch: int
    loss: float = 0.0


@dataclass(frozen=True)
class Kill:
    """SIGKILL of a worker at `time_s`; all workers train again, and have for a few steps, at `healthy_s`."""

    time_s: float
    victim: str
    healthy_s: float


@dataclass(frozen=True)
class Timing:
    """What one kill cost.

    `recover_s` is from SIGKILL to the next committed step, replays not counted, `any_step_s` to the first step of any
    kind. Rates are in tokens per second: before, and afterwards while the members stay the same (None where they did
    so for one step only). `lost_s` is how many seconds of training at the rate before are missing when all workers
    train again.
    """

    recover_s: float
    any_step_s: float
    num_replays: int
    before: float
    after: float | None
    lost_s: float
    whole_s: float


def parse_line(line: str, time_s: float, num_tokens: int) -> Commit:
    """A commit from a line of a peer's record, or of runflat's steps.jsonl (a step of `num_tokens`)."""
    row: dict[str, Any] = json.loads(line)
    epoch, tokens = row.get("epoch", row.get("generation")), row.get("tokens", num_tokens)
    return Commit(time_s, row["step"], tokens, epoch, row["loss"])


def progress(commits: Iterable[Commit]) -> list[Commit]:
    """Commits of steps that are new, one for each step: records of several replicas are added up, replays left out."""
    found: dict[int, Commit] = {}
    newest, begun = -1, 0.0
    for commit in sorted(commits, key=lambda commit: commit.time_s):
        if commit.step > newest:
            newest, begun = commit.step, commit.time_s
            found[newest] = commit
        elif commit.step == newest and commit.epoch == found[newest].epoch:
            first = found[newest]
            found[newest] = Commit(begun, newest, first.tokens + commit.tokens, first.epoch, first.loss)
    return list(found.values())


def losses(commits: Sequence[Commit], num_steps: int) -> list[float]:
    """Loss of the first steps, over all tokens of each."""
    found = []
    for step in range(num_steps):
        own = [commit for commit in commits if commit.step == step]
        own = [commit for commit in own if commit.epoch == own[0].epoch]
        if total := sum(commit.tokens for commit in own):
            found.append(sum(commit.loss * commit.tokens for commit in own) / total)
    return found


def rate(commits: Sequence[Commit]) -> float:
    """Tokens per second from the first commit to the last."""
    tokens = sum(commit.tokens for commit in commits[1:])
    return tokens / (commits[-1].time_s - commits[0].time_s)


def timing(commits: Sequence[Commit], kill: Kill) -> Timing:
    """What a kill cost.

    Raises:
        ValueError: there are too few commits around it.
    """
    steps = progress(commits)
    before = [commit for commit in steps if commit.time_s <= kill.time_s][-NUM_INTERVALS - 1 :]
    after = [commit for commit in steps if commit.time_s > kill.time_s]
    same = [commit for commit in after if commit.epoch == after[0].epoch][: NUM_INTERVALS + 1]
    if len(before) < 2 or not after:
        raise ValueError(f"{len(before)} commits before the kill of {kill.victim} and {len(after)} after it: too few")
    raw = [commit for commit in commits if kill.time_s < commit.time_s]
    replays = {commit.step for commit in raw if commit.step <= before[-1].step}
    whole = [commit for commit in steps if kill.time_s < commit.time_s <= kill.healthy_s]
    # The step in which the kill fell had begun before it: its part up to the kill is not missing.
    since = [before[-1], *whole]
    done_s = sum(commit.tokens for commit in whole) / rate(before)
    return Timing(
        recover_s=after[0].time_s - kill.time_s,
        any_step_s=min(commit.time_s for commit in raw) - kill.time_s,
        num_replays=len(replays),
        before=rate(before),
        after=rate(same) if len(same) > 1 else None,
        lost_s=since[-1].time_s - since[0].time_s - done_s,
        whole_s=since[-1].time_s - kill.time_s,
    )


def step_seconds(commits: Sequence[Commit]) -> float:
    """Median time between the latest commits."""
    times = [commit.time_s for commit in progress(commits)][-NUM_INTERVALS - 1 :]
    return statistics.median(later - earlier for earlier, later in pairwise(times))


HEADER = (
    "",
    "SIGKILL to the next committed step",
    "least to most",
    "tokens/s before",
    "tokens/s after",
    "after / before",
    "training lost until all train again",
)


def table(timings: Mapping[str, Sequence[Timing]]) -> list[tuple[str, ...]]:
    """A row for each system: medians over its kills."""
    rows = []
    for name, found in timings.items():
        seconds = [timing.recover_s for timing in found]
        rates = [(timing.after, timing.after / timing.before) for timing in found if timing.after is not None]
        rows.append(
            (
                f"{name} ({len(found)} kills)",
                f"{statistics.median(seconds):.2f} s",
                f"{min(seconds):.2f} to {max(seconds):.2f} s",
                f"{statistics.median(timing.before for timing in found):.0f}",
                f"{statistics.median(after for after, _ in rates):.0f}" if rates else "one step",
                f"{statistics.median(ratio for _, ratio in rates):.2f}" if rates else "",
                f"{statistics.median(timing.lost_s for timing in found):.1f} s",
            )
        )
    return rows
