"""The proof on the whole grid: every model of the proof set, every degree, each one, two and three dead slots of eight.

    python benchmarks/proof/run.py

What `runflat verify` does, case by case: three steps of the unmodified transformers model in one process against the
same steps under the plan, one thread per device, float64, roundings to float32 lifted on both sides. Errors are
relative (norm of the difference over norm of the reference, per tensor): the largest of gradients, clipped norm, loss,
and of weights and both moments after the last step. A replica at full TP 8 stands beside the hurt one, which is the
first by turns with the second. Exit code 1 if an error is above the tolerance.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from runflat.check.bench import arguments, report
from runflat.check.small import PROOF_SET, proof_config, small_batch
from runflat.check.verify import TOLERANCE, Case, unsharded, verify

TP = 8
SLOTS = range(TP)
QUICK = ("llama-gqa4",)
"""Models of --quick, which takes two layouts of each sort."""


def sorts() -> dict[str, list[tuple[int, ...]]]:
    """Sets of dead slots by what they are meant to cover."""
    seeded = [tuple(sorted(random.Random(degree).sample(SLOTS, TP - degree))) for degree in range(TP - 1, 0, -1)]
    return {
        "degrees 7 to 1": seeded,
        "single slots": list(itertools.combinations(SLOTS, 1)),
        "pairs": list(itertools.combinations(SLOTS, 2)),
        "triples": list(itertools.combinations(SLOTS, 3)),
    }


def errors(model: str, cases: list[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], float]]:
    """Dead slots, and the largest error under them."""
    config = proof_config(model)
    plain = Case(tp=TP, in_memory=True)
    batch = small_batch(config.vocab_size, config.pad_token_id, plain.num_sequences, plain.seq_len, 1)
    truth = unsharded(config, plain, batch)
    for number, slots in enumerate(cases):
        case = Case(tp=TP, dead=tuple((number % 2, slot) for slot in slots), in_memory=True)
        yield slots, verify(config, case, batch, truth=truth).largest


def main() -> int:
    """Run the grid; returns the exit code."""
    args = arguments(__doc__ or "", Path(__file__).parent).parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    data: dict[str, dict[str, Any]] = {}
    for model in QUICK if args.quick else PROOF_SET:
        data[model] = {}
        for sort, cases in sorts().items():
            found = list(errors(model, cases[:2] if args.quick else cases))
            slots, worst = max(found, key=lambda pair: pair[1])
            data[model][sort] = {"num": len(found), "largest_error": worst, "at_dead_slots": slots}
            print(f"{model}, {sort}: {len(found)} layouts, largest error {worst:.1e}", file=sys.stderr, flush=True)
    largest = max(row["largest_error"] for rows in data.values() for row in rows.values())
    num = sum(row["num"] for rows in data.values() for row in rows.values())
    report(
        args.out,
        "The proof on the whole grid",
        (__doc__ or "").split("\n\n")[2].strip(),
        [
            *(
                (m, *(f"{row['largest_error']:.1e} ({row['num']})" for row in rows.values()))
                for m, rows in data.items()
            ),
            ("largest", f"{largest:.1e} ({num})", f"<= {TOLERANCE:.0e}", "", ""),
        ],
        {"tolerance": TOLERANCE, "tp": TP, "largest_error": largest, "num_layouts": num, "models": data}
        | {"wall_s": time.monotonic() - began},
        header=("largest relative error (layouts)", *sorts()),
    )
    return int(largest > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
