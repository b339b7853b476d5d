"""`runflat chaos`: train a tiny model while devices are killed, stopped, cut off and drained; count what is lost."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from runflat.check.chaos import DIGEST_EVERY
from runflat.errors import ConfigError
from runflat.plan.zero import OptimizerMode

if TYPE_CHECKING:
    from runflat.check.chaos_run import Outcome
    from runflat.check.checker import Counts

DESCRIPTION = """Train a tiny model on eight workers and strike them at random: kills, stops, cut links, drains, some
two at a time, in every phase of a step, of a recovery and of a return. Then count what was lost.

The counts come from a checker of its own, which reads the run's files and trains the same model again, unsharded and
without a failure. Exit code 0: nothing was lost, doubled or different, nothing hung, nothing leaked.

Example: runflat chaos --faults 30 --seed 1
"""
LAYOUTS = ((2, 4), (4, 2))
"""Replicas x TP degree, by turns with the seed."""
MODEL = (
    "--model.preset tiny --model.num-layers 1 --model.hidden-size 32 --model.num-heads 8 --model.num-kv-heads 4 "
    "--model.head-dim 4 --model.ffn-size 64 --model.vocab-size 257 --data.seq-len 16 --data.holdout-fraction 0"
)
TRAIN = (
    "--train.global-batch 8 --train.steps 10000000 --train.schedule constant --train.lr 1e-5 --train.dtype float64 "
    f"--train.lift-casts --train.checkpoint-every 40 --train.digest-every {DIGEST_EVERY} --train.timeout-s 20"
)
"""A learning rate so low that rounding does not grow over thousands of steps: any step done wrongly stays visible."""
TEXT_LINES = 4000


@dataclass(frozen=True)
class ChaosArgs:
    """How many faults, and which."""

    faults: int = 200
    """Faults to inject; returns are not counted."""
    seed: int = 0
    """Seed of the faults, and of weights and data; even seeds train 2 replicas of TP 4, odd ones 4 of TP 2."""
    on_failure: str = "ntp,drop"
    """What to do when devices are lost, as for `runflat train`."""
    optimizer: OptimizerMode = "replicated"
    """Who keeps AdamW's moments, as for `runflat train`: each holder of a unit, or (zero1) one owner and one mirror."""
    run: Path | None = None
    """Folder for the run, its log chaos.jsonl and chaos.json; none: a new one under runs/, named by the time."""
    replay: Path | None = None
    """chaos.jsonl of an earlier run (same seed): its faults again, at the same steps."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the counts as JSON on the standard output; progress goes to the standard error output."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code: 1 if anything was lost, hung or leaked."""
    args = tyro.cli(ChaosArgs, args=argv, prog="runflat chaos", description=DESCRIPTION)
    if args.faults < 1:
        raise ConfigError(f"--faults is {args.faults}; at least one fault is needed to find anything out.")
    run = args.run or Path("runs") / time.strftime("chaos-%Y%m%d-%H%M%S")
    if (run / "steps.jsonl").exists():
        raise ConfigError(f"{run} holds a run already: give another folder with --run.")

    def say(text: str) -> None:
        print(text, file=sys.stderr if args.json else sys.stdout, flush=True)

    result = chaos(args, run, say)
    (run / "chaos.json").write_text(json.dumps(result, indent=2) + "\n")
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        _tell(result)
    return 0 if result["clean"] else 1


def chaos(args: ChaosArgs, run: Path, say: Callable[[str], object]) -> dict[str, Any]:
    """The whole of it: run, strike, check; returns what `--json` prints."""
    from runflat.check.chaos import Random, Replay
    from runflat.check.chaos_run import ChaosRun
    from runflat.check.flat import memory_windows
    from runflat.cluster.events import read_events

    replicas, tp = LAYOUTS[args.seed % len(LAYOUTS)]
    run.mkdir(parents=True, exist_ok=True)
    text = run / "text.txt"
    text.write_text("".join(f"{n} + {n} = {2 * n}\n" for n in range(TEXT_LINES)), encoding="utf-8")
    flags = [*MODEL.split(), *TRAIN.split(), "--data.paths", str(text), "--on-failure", args.on_failure]
    own = {"layout.replicas": replicas, "layout.tp": tp, "train.seed": args.seed, "train.optimizer": args.optimizer}
    for name, value in own.items():
        flags += [f"--{name}", str(value)]
    events = read_events(args.replay) if args.replay else ()
    source = Replay(events) if args.replay else Random(args.seed)
    num_faults = sum(event.event != "return" for event in events) if args.replay else args.faults
    say(f"{replicas} replicas of TP {tp}, {num_faults} faults; log: {run / 'chaos.jsonl'}")
    outcome = ChaosRun(run, flags, source, num_faults, say).go()
    counts = _count(run, args.seed, outcome, say)
    leaks = _leaks(outcome)
    windows = memory_windows(outcome.samples)
    problems = [*outcome.problems, *counts.problems, *leaks]
    layout = f"{replicas}x{tp}"
    rest = {"seed": args.seed, "layout": layout, "on_failure": args.on_failure, "optimizer": args.optimizer}
    found = {**outcome.to_json(), **counts.to_json(), "hangs": outcome.hangs + counts.hangs}
    flat = {"flat": not leaks, "memory_windows_bytes": windows}
    return {**rest, **found, **flat, "problems": problems, "clean": not problems}


def _count(run: Path, seed: int, outcome: Outcome, say: Callable[[str], object]) -> Counts:
    """What the checker says of the run; of one that did not end in order, only what its books say."""
    from runflat.check.checker import Counts, check_books, read_books
    from runflat.check.reference import AdamW
    from runflat.check.unsharded import Settings, check_run
    from runflat.commands.models import section_config
    from runflat.config import TrainConfig
    from runflat.errors import RunError

    try:
        books = read_books(run)
    except RunError as error:
        return Counts(problems=[] if outcome.problems else [str(error)])
    counts = check_books(books)
    config = TrainConfig.model_validate_json((run / "config.json").read_text())
    train = config.train
    adamw = AdamW(train.lr, train.weight_decay, train.beta1, train.beta2, train.eps, train.clip_norm)
    settings = Settings(seed, config.data.seq_len, adamw)
    total = books.progress["step"]
    say(f"the run is over after {outcome.wall_s:.0f} s; training its {total} steps again, unsharded")

    def report(step: int) -> None:
        if (step + 1) % 1000 == 0:
            say(f"unsharded step {step + 1}/{total}")

    check_run(run, books, counts, section_config(config.model), settings, report)
    return counts


def _leaks(outcome: Outcome) -> list[str]:
    """In words what the run occupies more of after all faults than before the first."""
    from runflat.check.flat import leaks

    before, after = outcome.before, outcome.after
    return [] if before is None or after is None else leaks(before, after, outcome.samples)


def _tell(result: dict[str, Any]) -> None:
    """The result for people."""
    recovery = ", ".join(f"{name} {value:.2f} s" for name, value in result["recovery_s"].items() if value is not None)
    rows: Sequence[tuple[str, object]] = (
        ("faults", f"{result['num_faults']} ({_more(result)})"),
        *((name.replace("_", " "), result[name]) for name in COUNTS),
        ("recovery", recovery or "there was none"),
        *((name, _occupied(result, key)) for name, key in OCCUPIED),
        ("memory, by halves", _halves(result["memory_windows_bytes"])),
    )
    for name, value in rows:
        print(f"  {name:<24} {value}")
    for problem in result["problems"]:
        print(f"PROBLEM: {problem}")
    print("clean: nothing was lost, doubled or different" if result["clean"] else "NOT clean")


COUNTS = (
    *("hangs", "committed_steps_lost", "steps_applied_twice", "steps_gone_back"),
    *("sequences_lost", "sequences_doubled", "mismatches", "mismatches_injected", "mismatches_found"),
)
OCCUPIED = (
    *(("processes", "num_processes"), ("descriptors", "num_descriptors"), ("threads", "num_threads")),
    *(("sockets", "num_sockets"), ("ports", "num_ports"), ("memory, bytes", "resident_bytes")),
)


def _more(result: dict[str, Any]) -> str:
    text = f"{result['num_missed']} more found nothing to strike"
    return text + (f", {result['num_left_out']} of the log were left out" if result["num_left_out"] else "")


def _halves(windows: tuple[int, int] | None) -> str:
    if windows is None:
        return "too few looks to judge"
    return f"{windows[0] / 1e6:.0f} MB, then {windows[1] / 1e6:.0f} MB (medians, after a quarter of the faults)"


def _occupied(result: dict[str, Any], key: str) -> str:
    parts = [f"{result[when][key]} {when}" for when in ("before", "after") if result[when]]
    return ", ".join(parts) or "not measured"
