"""Counts what a run lost, from its files alone: steps, sequences, differing bits, hangs, seconds to recover.

It shares no code with the runtime that it judges but the reader of checkpoints (in `unsharded`): step numbers, sample
numbers, the order of sequences and their hash are worked out here once more, from what a step is meant to be. Input is
a run that has ended: steps.jsonl, events.jsonl, summary.json, plans/, its tokens and its newest checkpoint.

Step k of a job with a global batch of B uses the samples kB .. kB+B-1. Every one of them must be used once, every step
must be in the books once, and whatever was committed must stay so, unless the run says in words that it goes back.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from runflat.errors import RunError

GOES_BACK = ("memory", "checkpoint", "start")
"""Ways to take a plan up that say that steps will be done again."""
HANG_S = 60.0
"""Longest time between two commits that is not a hang; every wait of the runtime is shorter than that."""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Books:
    """What a run has written of itself, and what it was to do: `batch` samples a step in `order`."""

    steps: Sequence[Row]
    events: Sequence[Row]
    summary: Row
    progress: Row
    """Of the newest checkpoint: step, optimizer_step, num_samples, sample_hash."""
    batch: int
    order: Order

    def records(self, kind: str) -> list[Row]:
        """Records of one kind in events.jsonl, in the order of time."""
        return [row for row in self.events if row.get("record") == kind]


@dataclass
class Counts:
    """What the checker has found. All counts are 0 and `problems` is empty for a run that lost nothing."""

    hangs: int = 0
    committed_steps_lost: int = 0
    steps_applied_twice: int = 0
    sequences_lost: int = 0
    sequences_doubled: int = 0
    mismatches: int = 0
    """Differing bits that nobody injected: digests at run time, and tensors or losses unlike the unsharded ones."""
    mismatches_injected: int = 0
    """Bits that were flipped on purpose."""
    mismatches_found: int = 0
    """How many of these a digest found, naming the device. Rounding may remove a low bit before the next digest; what
    a flip that was not found has done to weights and losses counts under `mismatches`."""
    steps_gone_back: int = 0
    """Committed steps that were done again, as the run said: no live device held a unit, or its bits were wrong."""
    problems: list[str] = field(default_factory=list)
    """Each finding in words, with step and device."""
    recovery_s: dict[str, float | None] = field(default_factory=dict)
    """Seconds from the fault to the next committed step: median, p99, max; None without incidents."""

    @property
    def clean(self) -> bool:
        """Whether nothing was lost, doubled or different, and nothing hung."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """All counts by name."""
        return asdict(self)

    def find(self, count: str, number: int, text: str) -> None:
        """Add `number` findings of one kind, if there are any."""
        if number:
            setattr(self, count, getattr(self, count) + number)
            self.problems.append(text)


class Order:
    """Which sequence a sample is: a permutation of the training sequences for each pass, from the seed alone."""

    def __init__(self, num_sequences: int, num_holdout: int, seed: int):
        """`num_sequences` whole sequences, of which `num_holdout` are held out."""
        held_out = {permuted(number, num_sequences, seed, 0) for number in range(num_holdout)}
        self._train = [index for index in range(num_sequences) if index not in held_out]
        self._seed = seed

    def sequence(self, sample: int) -> int:
        """Index of the sequence behind a sample number."""
        number, offset = divmod(sample, len(self._train))
        return self._train[permuted(offset, len(self._train), self._seed, 1, number)]


ROUNDS = 8
LEAST_BITS = 4
"""Of each half of a number."""
ALL_BITS = (1 << 64) - 1


def permuted(number: int, count: int, *seeds: int) -> int:
    """Where a permutation of 0 .. count-1 takes `number`: a Feistel network, keyed by `seeds`, walked until inside."""
    half = max(LEAST_BITS, -(-max(count - 1, 1).bit_length() // 2))
    keys = [int(key) for key in np.random.SeedSequence(list(seeds)).generate_state(ROUNDS, np.uint64)]
    place = count
    while place >= count:
        left, right = divmod(number, 1 << half)
        for key in keys:
            left, right = right, left ^ splitmix(right ^ key) % (1 << half)
        place = number = left << half | right
    return place


def splitmix(value: int) -> int:
    """The finalizer of splitmix64."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & ALL_BITS
    value = (value ^ value >> 27) * 0x94D049BB133111EB & ALL_BITS
    return value ^ value >> 31


def read_books(run: Path) -> Books:
    """The files of a run that has ended.

    Raises:
        RunError: a file is missing or damaged.
    """
    try:
        config = json.loads((run / "config.json").read_text())
        data = config["data"]
        (tokens,) = (run / "tokens").glob("*.npy")
        num_sequences = len(np.load(tokens, mmap_mode="r")) // data["seq_len"]
        holdout = 0
        if data["holdout_fraction"] > 0:
            holdout = max(1, min(int(num_sequences * data["holdout_fraction"]), data["holdout_sequences"]))
        newest = max((run / "checkpoints").glob("step-" + "[0-9]" * 8))
        return Books(
            steps=_rows(run / "steps.jsonl"),
            events=_rows(run / "events.jsonl"),
            summary=json.loads((run / "summary.json").read_text()),
            progress=json.loads((newest / "index.json").read_text())["progress"],
            batch=config["train"]["global_batch"],
            order=Order(num_sequences, holdout, data["seed"]),
        )
    except (OSError, ValueError, KeyError) as error:
        raise RunError(
            f"{run} cannot be checked: {type(error).__name__}: {error}. Name a run that has ended."
        ) from error


def _rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_books(books: Books, hang_s: float = HANG_S) -> Counts:
    """What the books alone show: steps, samples, hash, what was undone, mismatches that the run found, hangs."""
    counts = Counts()
    _check_steps(books, counts)
    _check_undone(books, counts)
    _check_samples(books, counts)
    _check_hash(books, counts)
    _check_digests(books, counts)
    _check_time(books, counts, hang_s)
    return counts


def _check_steps(books: Books, counts: Counts) -> None:
    """Each step once, as many as the summary and the checkpoint name."""
    seen = Counter(row["step"] for row in books.steps)
    total = max([books.summary["step"], books.progress["step"], *(step + 1 for step in seen)])
    missing = [step for step in range(total) if step not in seen]
    counts.find("committed_steps_lost", len(missing), f"steps {_few(missing)} are not in the books")
    twice = [step for step, number in seen.items() if number > 1]
    counts.find("steps_applied_twice", len(twice), f"steps {_few(twice)} are in the books more than once")
    for source, progress in (("the summary", books.summary), ("the newest checkpoint", books.progress)):
        short = total - progress["step"]
        counts.find(
            "committed_steps_lost", short, f"{source} stands at step {progress['step']}, {total} were committed"
        )
    applied = sum(not row["skipped"] for row in {row["step"]: row for row in books.steps}.values()) + len(missing)
    extra = books.progress["optimizer_step"] - applied
    counts.find("steps_applied_twice", max(extra, 0), f"the optimizer counts {extra} steps more than were committed")
    counts.find(
        "committed_steps_lost", max(-extra, 0), f"the optimizer counts {-extra} steps fewer than were committed"
    )


def _check_undone(books: Books, counts: Counts) -> None:
    """A plan that starts before a step that was committed already must say that it goes back."""
    told = sorted(
        [row for row in books.events if row.get("record") in ("plan", "took")], key=lambda row: float(row["time_s"])
    )
    highest = 0
    steps = sorted((row["time_s"], row["step"]) for row in books.steps)
    position = 0
    for row in told:
        while position < len(steps) and steps[position][0] < row["time_s"]:
            highest = max(highest, steps[position][1] + 1)
            position += 1
        undone = highest - row["committed"]
        if row.get("action") in GOES_BACK:
            highest = row["committed"]
        else:
            text = f"generation {row['generation']} starts at step {row['committed']}, but {highest} were committed"
            counts.find("committed_steps_lost", max(undone, 0), text)
            highest = max(highest, row["committed"])
    starts = {row["generation"]: row["committed"] for row in books.records("plan")}
    back = (row["step"] - starts[row["generation"]] for row in books.records("incident") if row["action"] in GOES_BACK)
    counts.steps_gone_back = sum(back)


def _check_samples(books: Books, counts: Counts) -> None:
    """Every sample of every step once."""
    used: Counter[int] = Counter()
    for row in books.steps:
        used.update(_samples(row, books.batch))
    due = len({row["step"] for row in books.steps}) * books.batch
    expected = {k * books.batch + i for k in {row["step"] for row in books.steps} for i in range(books.batch)}
    lost = sorted(expected - used.keys())
    doubled = sorted(sample for sample, number in used.items() if number > 1)
    strange = sorted(used.keys() - expected)
    counts.find("sequences_lost", len(lost), f"samples {_few(lost)} were never used: {_where(books, lost)}")
    again = sum(used[sample] - 1 for sample in doubled) + len(strange)
    counts.find("sequences_doubled", again, f"samples {_few(doubled + strange)} were used when they were not due")
    for name, progress in (("summary", books.summary), ("checkpoint", books.progress)):
        short = due - progress["num_samples"]
        if short and progress["step"] == len({row["step"] for row in books.steps}):
            counts.find("sequences_lost", abs(short), f"the {name} counts {progress['num_samples']} samples, not {due}")


def _samples(row: Row, batch: int) -> list[int]:
    """Sample numbers that a step used: those that each replica reported, else those of its place in the plan."""
    used: list[int] = []
    place = row["step"] * batch
    for replica in row["replicas"]:
        first = replica["first_sample"]
        start = place if first is None else first
        used += range(start, start + replica["num_samples"])
        place += replica["num_samples"]
    return used


def _where(books: Books, samples: Sequence[int]) -> str:
    """The sequences behind samples, in words."""
    return "sequences " + _few([books.order.sequence(sample) for sample in samples[:4]])


def _check_hash(books: Books, counts: Counts) -> None:
    """The hash over (sample, sequence) of all steps, worked out anew, at each step and at the end."""
    value = ""
    for row in sorted({row["step"]: row for row in books.steps}.values(), key=lambda row: int(row["step"])):
        samples = sorted(_samples(row, books.batch))
        digest = hashlib.sha256(bytes.fromhex(value))
        digest.update(struct.pack("<qq", row["step"], len(samples)))
        for sample in samples:
            digest.update(struct.pack("<qq", sample, books.order.sequence(sample)))
        value = digest.hexdigest()
        if row["sample_hash"] != value:
            counts.find("mismatches", 1, f"the hash of all samples is not what it must be from step {row['step']} on")
            return
    for name, progress in (("summary", books.summary), ("checkpoint", books.progress)):
        if progress["step"] == len(books.steps):
            counts.find(
                "mismatches", int(progress["sample_hash"] != value), f"the {name} has another hash of all samples"
            )


def _check_digests(books: Books, counts: Counts) -> None:
    """Flipped bits, and digests that differed: each is explained by flips before it in a device that it names."""
    hidden: list[Row] = []
    for row in books.events:
        if row.get("event") == "corrupt":
            hidden.append(row)
            counts.mismatches_injected += 1
        elif row.get("record") == "incident" and "digest" in row["cause"]:
            found = [flip for flip in hidden if flip["device"] in row["device"].split()]
            hidden = [flip for flip in hidden if flip not in found]
            counts.mismatches_found += len(found)
            text = f"{row['device']} at step {row['step']}: {row['cause']}, and no bit was flipped there on purpose"
            counts.find("mismatches", int(not found), text)


def _check_time(books: Books, counts: Counts, hang_s: float) -> None:
    """Gaps between commits that nothing explains, and how long recoveries took."""
    times = sorted(row["time_s"] for row in books.steps)
    for earlier, later in zip(times, [*times[1:], books.summary["wall_s"]], strict=True):
        if later - earlier > hang_s:
            counts.find("hangs", 1, f"no step was committed from {earlier:.1f} s to {later:.1f} s")
    recoveries = recovery_seconds(books)
    if recoveries:
        ordered = sorted(recoveries)
        rank = math.ceil(0.99 * len(ordered)) - 1
        counts.recovery_s = {"median": statistics.median(ordered), "p99": ordered[rank], "max": ordered[-1]}
    else:
        counts.recovery_s = dict.fromkeys(("median", "p99", "max"))


def recovery_seconds(books: Books) -> list[float]:
    """Of each incident: from the fault to the first step committed under a later plan, the step itself included."""
    found = []
    commits = sorted((row["time_s"], row["generation"]) for row in books.steps)
    for incident in books.records("incident"):
        began = incident["started_s"]
        after = [time_s for time_s, number in commits if time_s > began and number >= incident["generation"]]
        if after:
            found.append(after[0] - began)
    return found


def _few(values: Sequence[object]) -> str:
    """The first values, and how many more there are."""
    text = ", ".join(map(str, values[:4]))
    return text if len(values) <= 4 else f"{text} and {len(values) - 4} more"
