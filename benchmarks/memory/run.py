"""Resident memory of workers that train on a text of a gigabyte, and of the process that makes its tokens.

    python benchmarks/memory/run.py

The demo's llama, 2 replicas x TP 2, real worker processes, once on a text of a mebibyte and once on one of a gigabyte;
each byte is a token of two bytes, so that the file that workers map is twice the text. Then texts of 1, 3 and 10
gigabytes become tokens, without training; and two shorter ones with a tokenizer that is learnt from them. Texts are
synthetic: 20,000 words, drawn with the frequencies of a language.
"""

from __future__ import annotations

import multiprocessing
import random
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runflat.check.bench import arguments, report
from runflat.check.resident import Peaks, peaks_of_run, resident
from runflat.commands.prepare import prepare as prepare_run
from runflat.commands.train import parse
from runflat.plan.cost import device_memory
from runflat.train.data import prepare
from runflat.train.formats import Reading
from runflat.train.sources import find_text_files
from runflat.train.tokenizer import train_tokenizer

HERE = Path(__file__).parent
MIB, GB = 1 << 20, 10**9
BLOCK_BYTES = MIB
NUM_BLOCKS, NUM_WORDS = 16, 20_000
FLAGS = "--model.preset demo --layout.tp 2 --layout.replicas 2 --train.global-batch 64 --train.steps 20"
NUM_IDS = 4096
TRAINED = {"a small text": MIB, "1 GB": GB}
TOKENISED = (GB, 3 * GB, 10 * GB)
LEARNT = (16 * MIB, 64 * MIB)
QUICK_TRAINED = {"a small text": MIB, "50 MB": GB // 20}
QUICK_TOKENISED, QUICK_LEARNT = (GB // 100, GB // 20), (MIB, 4 * MIB)
WANTED_OVER_NEED, WANTED_TOKENISING = 300e6, 1e9
TIMEOUT_S = 3600.0


def write_text(path: Path, num_bytes: int) -> None:
    """A text of `num_bytes` bytes: numbered blocks of a mebibyte, lines of words that are drawn like a language's."""
    drawn = random.Random(0)
    words = ["".join(drawn.choices("etaoinshrdlu", k=drawn.randint(2, 9))) for _ in range(NUM_WORDS)]
    weights = [1 / (rank + 3) for rank in range(NUM_WORDS)]
    blocks = []
    for _ in range(min(NUM_BLOCKS, -(-num_bytes // BLOCK_BYTES))):
        text = " ".join(drawn.choices(words, weights, k=BLOCK_BYTES // 3))
        blocks.append(re.sub(r"(.{60,90}) ", r"\1\n", text[:BLOCK_BYTES]).encode())
    with path.open("wb") as file:
        left, number = num_bytes, 0
        while left:
            left -= file.write((f"\n{number}\n".encode() + blocks[number % len(blocks)])[: min(BLOCK_BYTES, left)])
            number += 1


@dataclass(frozen=True)
class Tokenised:
    """One text that became tokens: sizes, peaks of resident memory (all pages), seconds."""

    text_bytes: int
    num_ids: int
    num_tokens: int
    start_bytes: int
    learnt_bytes: int
    peak_bytes: int
    seconds: float


def tokenise(folder: Path, text_bytes: int, num_ids: int) -> Tokenised:
    """Make the tokens of a text as `runflat train` does, with bytes as tokens where `num_ids` is 0."""
    text, tokenizer = folder / "text.txt", folder / "tokenizer" if num_ids else None
    started, start_bytes = time.perf_counter(), resident().resident_bytes
    if tokenizer:
        train_tokenizer(find_text_files([str(text)]), Reading(), num_ids, tokenizer)
    learnt_bytes = resident().resident_bytes
    corpus = prepare([str(text)], cache_dir=folder / "tokens", seq_len=128, tokenizer=tokenizer)
    seconds, peak_bytes = time.perf_counter() - started, resident().resident_bytes
    num_tokens = 128 * corpus.num_sequences
    return Tokenised(text_bytes, num_ids, num_tokens, start_bytes, learnt_bytes, peak_bytes, seconds)


def tokenised_alone(text_bytes: int, num_ids: int) -> Tokenised:
    """`tokenise` in a process that has done nothing else; text and tokens are gone afterwards."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "text.txt", text_bytes)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(tokenise, folder, text_bytes, num_ids).result()


def trained(text_bytes: int) -> Peaks:
    """The peaks of a run of `runflat train` on a text of so many bytes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "text.txt", text_bytes)
        flags = [*FLAGS.split(), "--data.paths", str(folder / "text.txt")]
        return peaks_of_run(folder / "run", flags, TIMEOUT_S)


def planned_bytes() -> int:
    """What the plan counts for the device that needs most: weights, gradients, moments, activations."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "text.txt", MIB)
        flags = [*FLAGS.split(), "--data.paths", str(folder / "text.txt"), "--run", str(folder / "run")]
        config = parse(flags)
        (folder / "run").mkdir()
        prepared = prepare_run(config, folder / "run", print)
    needs = []
    for replica in prepared.plan.replicas:
        size = min(replica.num_sequences, config.train.micro_batch)
        for slot in replica.live_slots:
            needs.append(device_memory(prepared.spec, replica, slot, config.data.seq_len, size, 4).total_bytes)
    return max(needs)


def megabytes(num_bytes: float) -> str:
    """A cell of the table."""
    return f"{num_bytes / 1e6:,.0f} MB"


def training_rows(peaks: dict[str, Peaks], need_bytes: int) -> list[tuple[str, ...]]:
    """Lines of the page on workers: over the need, with each way to count what they share."""
    small, large = peaks.values()
    name = list(peaks)[-1]
    worker, growth = large.worker, large.worker.resident_bytes - small.worker.resident_bytes
    limit = f"<= {megabytes(WANTED_OVER_NEED)}"
    return [
        ("what the plan counts for a worker", megabytes(need_bytes), ""),
        (f"a worker on {name}: private pages, over that", megabytes(worker.private_bytes - need_bytes), limit),
        ("the same, pages that n processes share at 1/n", megabytes(worker.proportional_bytes - need_bytes), limit),
        ("all its pages, those of shared libraries too, over that", megabytes(worker.resident_bytes - need_bytes), ""),
        (f"all its pages, over those of a worker on {list(peaks)[0]}", megabytes(growth), limit),
    ]


def tokenising_rows(found: list[Tokenised]) -> list[tuple[str, ...]]:
    """Lines of the page on the process that makes tokens."""
    rows = []
    for one in found:
        how = f"a tokenizer of {one.num_ids:,} ids, learnt first" if one.num_ids else "bytes as tokens"
        what = f"tokens of {megabytes(one.text_bytes)}, {how}: all pages ({one.seconds:.0f} s)"
        rows.append((what, megabytes(one.peak_bytes), f"< {megabytes(WANTED_TOKENISING)}"))
    return rows


def main() -> None:
    """Measures, writes result.json and README.md; exit code 1 where a limit does not hold."""
    args = arguments(__doc__, HERE).parse_args()
    sizes = QUICK_TRAINED if args.quick else TRAINED
    need_bytes = planned_bytes()
    peaks = {name: trained(num_bytes) for name, num_bytes in sizes.items()}
    found = [tokenised_alone(num_bytes, 0) for num_bytes in (QUICK_TOKENISED if args.quick else TOKENISED)]
    found += [tokenised_alone(num_bytes, NUM_IDS) for num_bytes in (QUICK_LEARNT if args.quick else LEARNT)]
    data: dict[str, Any] = {
        "flags": FLAGS,
        "planned_bytes": need_bytes,
        "trained": {name: asdict(one) for name, one in peaks.items()},
        "tokenised": [asdict(one) for one in found],
    }
    rows = [*training_rows(peaks, need_bytes), *tokenising_rows(found)]
    report(args.out, "Memory on long texts", __doc__.partition("run.py\n\n")[2].strip(), rows, data)
    worker = list(peaks.values())[-1].worker
    if worker.private_bytes - need_bytes > WANTED_OVER_NEED or max(o.peak_bytes for o in found) > WANTED_TOKENISING:
        sys.exit("a limit of the table does not hold.")


if __name__ == "__main__":
    main()
