"""The checker of chaos runs: a run with failures passes, and each fault planted in a copy of it is found."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runflat.check.checker import Books, Counts, check_books, read_books
from runflat.check.reference import AdamW
from runflat.check.unsharded import Settings, Truth, compare_losses, compare_tensors, unsharded_run
from runflat.commands.models import section_config
from runflat.commands.train import parse
from runflat.commands.training import train

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

STEPS, BATCH, SEQ_LEN, LR, SEED = 9, 4, 16, 1e-5, 3
FLAGS = (
    "--model.preset tiny --model.num-layers 1 --model.hidden-size 32 --model.num-heads 8 --model.num-kv-heads 4 "
    f"--model.head-dim 4 --model.ffn-size 64 --model.vocab-size 257 --data.seq-len {SEQ_LEN} --layout.tp 2 "
    f"--layout.replicas 2 --train.global-batch {BATCH} --train.steps {STEPS} --train.lr {LR} --train.schedule constant "
    f"--train.dtype float64 --train.lift-casts --train.seed {SEED}"
)
EVENTS = [
    {"event": "kill", "device": "1:1", "step": 3, "phase": "backward"},
    {"event": "flake", "device": "0:0", "peer": "0:1", "step": 6, "phase": "sync"},
]


@dataclass(frozen=True)
class Recorded:
    """One run with two failures, and the same steps done by one process."""

    run: Path
    truth: Truth
    again: Callable[[list[list[int]]], Truth]

    def copy(self, folder: Path) -> Path:
        """A copy to plant faults in."""
        return Path(shutil.copytree(self.run, folder / "planted"))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "text.txt").write_text("".join(f"{n} + {n} = {2 * n}\n" for n in range(300)))
    (folder / "events.json").write_text(json.dumps(EVENTS))
    run = folder / "run"
    flags = [*FLAGS.split(), "--data.paths", str(folder / "text.txt"), "--inject", str(folder / "events.json")]
    config = parse([*flags, "--run", str(run)])
    assert train(config)[0] == 0
    section = config.train
    settings = Settings(SEED, SEQ_LEN, AdamW(LR, section.weight_decay, section.beta1, section.beta2, section.eps, 1.0))
    (tokens,) = (run / "tokens").glob("*.npy")

    def again(batches: list[list[int]]) -> Truth:
        return unsharded_run(section_config(config.model), settings, tokens, batches, lambda step: None)

    return Recorded(run, again(batches_of(read_books(run))), again)


def batches_of(books: Books) -> list[list[int]]:
    """Sequence indices of each step."""
    return [[books.order.sequence(step * BATCH + n) for n in range(BATCH)] for step in range(STEPS)]


def check(run: Path, truth: Truth) -> Counts:
    """All that the checker finds."""
    books = read_books(run)
    counts = check_books(books)
    compare_losses(books, truth, counts)
    compare_tensors(run, truth, counts)
    return counts


def edit_steps(run: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Rewrite steps.jsonl."""
    path = run / "steps.jsonl"
    rows = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def checkpoint(run: Path) -> Path:
    """The folder of its newest checkpoint."""
    return max((run / "checkpoints").glob("step-*"))


def seal(folder: Path, **progress: int) -> None:
    """Make a checkpoint that was tampered with look whole again."""
    index = json.loads((folder / "index.json").read_text())
    del index["sha256"]
    index["progress"] |= progress
    for entry in index["files"]:
        data = (folder / entry["name"]).read_bytes()
        entry["sha256"], entry["num_bytes"] = hashlib.sha256(data).hexdigest(), len(data)
    body = json.dumps(index, sort_keys=True).encode()
    (folder / "index.json").write_text(json.dumps(index | {"sha256": hashlib.sha256(body).hexdigest()}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of each shard of a checkpoint in place."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)


def test_a_run_with_failures_passes(recorded: Recorded) -> None:
    """Catches a checker that cries wolf, and one that sees no recovery where there were two."""
    counts = check(recorded.run, recorded.truth)
    assert counts.problems == []
    assert counts.clean
    assert 0 < counts.recovery_s["median"] <= counts.recovery_s["max"] < 60
    assert len(read_books(recorded.run).records("incident")) == len(EVENTS)


def test_skipped_sequence(recorded: Recorded, tmp_path: Path) -> None:
    """Catches a checker that misses a sample that no replica took."""
    run = recorded.copy(tmp_path)

    def skip(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rows[5]["replicas"][-1]["num_samples"] -= 1
        return rows

    edit_steps(run, skip)
    counts = check(run, recorded.truth)
    assert (counts.sequences_lost, counts.sequences_doubled) == (1, 0)
    sample = 5 * BATCH + BATCH - 1
    assert f"samples {sample} were never used: sequences {read_books(run).order.sequence(sample)}" in counts.problems[0]


def test_doubled_sequence(recorded: Recorded, tmp_path: Path) -> None:
    """Catches a checker that misses a sample that two replicas took."""
    run = recorded.copy(tmp_path)

    def double(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        share = rows[7]["replicas"][1]
        share |= {"first_sample": share["first_sample"] - 1, "num_samples": share["num_samples"] + 1}
        return rows

    edit_steps(run, double)
    counts = check(run, recorded.truth)
    assert (counts.sequences_lost, counts.sequences_doubled) == (0, 1)


def test_sequence_that_was_computed_twice_but_reported_once(recorded: Recorded) -> None:
    """Catches a checker that believes what workers report: here one sequence stands for another in step 5."""
    books = read_books(recorded.run)
    batches = batches_of(books)
    batches[5][1] = batches[5][0]
    counts = Counts()
    compare_losses(books, recorded.again(batches), counts)
    assert counts.mismatches == 1
    assert "the loss of step 5" in counts.problems[0]


def test_dropped_commit(recorded: Recorded, tmp_path: Path) -> None:
    """Catches a checker that does not miss a step of the books."""
    run = recorded.copy(tmp_path)
    edit_steps(run, lambda rows: rows[:4] + rows[5:])
    assert check(run, recorded.truth).committed_steps_lost == 1


def test_undone_commit(recorded: Recorded, tmp_path: Path) -> None:
    """Catches a checker that lets a recovery start before a committed step without a word; with one it is no loss."""
    run = recorded.copy(tmp_path)
    path = run / "events.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    plan = [row for row in rows if row.get("record") == "plan"][-1]
    plan["committed"] -= 2
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert check(run, recorded.truth).committed_steps_lost == 2
    plan["action"] = "memory"
    incident = next(row for row in rows if row.get("record") == "incident" and row["generation"] == plan["generation"])
    incident["action"] = "memory"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = check(run, recorded.truth)
    assert (counts.committed_steps_lost, counts.steps_gone_back) == (0, 2)


@pytest.mark.parametrize("sealed", [True, False])
def test_flipped_unit(recorded: Recorded, tmp_path: Path, sealed: bool) -> None:
    """Catches a checker that believes a checkpoint, with or without its checksums: one bit of one element differs."""
    run = recorded.copy(tmp_path)
    name = "weight/model.layers.0.mlp.up_proj.weight"

    def flip(tensors: dict[str, torch.Tensor]) -> None:
        if name in tensors:
            tensors[name].view(torch.int64)[0, 0] ^= 1 << 51  # the highest bit of the mantissa

    edit_tensors(checkpoint(run), flip)
    if sealed:
        seal(checkpoint(run))
    counts = check(run, recorded.truth)
    assert counts.mismatches >= 1
    assert any(("up_proj" if sealed else "checksum") in problem for problem in counts.problems)


def test_step_applied_twice(recorded: Recorded, tmp_path: Path) -> None:
    """Catches a checker that misses an update that was made a second time, counted by the optimizer or not."""
    run = recorded.copy(tmp_path)
    seal(checkpoint(run), optimizer_step=STEPS + 1)
    assert check(run, recorded.truth).steps_applied_twice == 1

    def apply_again(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.startswith("weight/")]:
            first, second = (tensors[key.replace("weight/", f"{kind}/")] for kind in ("exp_avg", "exp_avg_sq"))
            scale = (1 - 0.95**STEPS) ** 0.5 / (1 - 0.9**STEPS)
            tensors[key] -= LR * scale * first / (second.sqrt() + 1e-8)

    edit_tensors(checkpoint(run), apply_again)
    seal(checkpoint(run), optimizer_step=STEPS)
    counts = check(run, recorded.truth)
    assert counts.steps_applied_twice == 0
    assert counts.mismatches >= len(recorded.truth.tensors["weight"]) // 2


def test_standstill(recorded: Recorded, tmp_path: Path) -> None:
    """Catches a checker that takes an hour without a commit for training."""
    run = recorded.copy(tmp_path)

    def wait(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row | {"time_s": row["time_s"] + 3600 * (row["step"] >= STEPS - 2)} for row in rows]

    edit_steps(run, wait)
    assert check(run, recorded.truth).hangs == 1


def test_mismatch_that_nobody_injected(recorded: Recorded, tmp_path: Path) -> None:
    """Catches a checker that passes over a digest that differed, or takes a bit flipped later or elsewhere for it."""
    run = recorded.copy(tmp_path)
    path = run / "events.jsonl"
    text = path.read_text()
    incident = next(json.loads(line) for line in text.splitlines() if '"incident"' in line)
    found = json.dumps(incident | {"device": "0:1 1:1", "cause": "digest of mlp 3 differs"}) + "\n"
    flip = {"event": "corrupt", "device": "1:1", "step": 3, "target": "moment"}
    flips = [json.dumps(flip | {"device": device}) + "\n" for device in ("1:1", "0:0")]

    def counted(lines: str) -> tuple[int, int, int]:
        path.write_text(text + lines)
        counts = check(run, recorded.truth)
        return counts.mismatches_injected, counts.mismatches_found, counts.mismatches

    assert counted(found) == (0, 0, 1)
    assert counted(flips[0] + found) == (1, 1, 0)
    assert counted(flips[0] + found + found) == (1, 1, 1)
    assert counted(found + flips[0]) == (1, 0, 1)
    assert counted(flips[1] + found) == (1, 0, 1)
    assert counted(flips[1]) == (1, 0, 0)
