"""What a job loses under many faults at random: `runflat chaos`, its counts side by side, a column for each seed.

    python benchmarks/chaos/run.py [--faults 200] [--seeds 0 1 2]
    python benchmarks/chaos/run.py --runs runs/chaos-0 runs/chaos-1 runs/chaos-2

The second form reports runs of `runflat chaos --faults 200 --seed S --run DIR` that were made before. What is counted
(descriptors, threads, ports) is seen before the first fault and after the last one, once the groups that were left
have gone; memory whenever all devices are there. `zero1/` has a run of `runflat chaos --optimizer zero1`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runflat.check.bench import arguments, report
from runflat.check.live import Command

HERE = Path(__file__).parent
LIMIT_S = 3600.0
QUICK_FAULTS = 6
SHARED = (
    "Recovery is the time from a fault to the next committed step. Eight workers share this machine, which was "
    "busy with other work too: the seconds are no measure of speed (`benchmarks/recovery` is). A device that is "
    "stopped for good is noticed after 5 s without a heartbeat. Memory is the median of the first half of the "
    "faults after warm-up, then of the second."
)
ZERO = (
    *("hangs", "committed_steps_lost", "steps_applied_twice"),
    *("sequences_lost", "sequences_doubled", "mismatches"),
)
OCCUPIED = (
    *(("processes", "num_processes"), ("descriptors", "num_descriptors"), ("threads", "num_threads")),
    *(("sockets", "num_sockets"), ("listening ports", "num_ports")),
)
Result = dict[str, Any]


def chaos(num_faults: int, seed: int, run: Path) -> Result:
    """Runs one seed; returns what it counted."""
    flags = ["chaos", "--faults", str(num_faults), "--seed", str(seed), "--run", str(run)]
    with Command(flags, run.with_suffix(".log")) as started:
        started.finish(LIMIT_S)
        if not (run / "chaos.json").exists():
            sys.exit(f"chaos with seed {seed} did not come to its end:\n{started.output()}")
    return counted(run)


def counted(run: Path) -> Result:
    """What a run counted, without the single looks at what it occupied."""
    result: Result = json.loads((run / "chaos.json").read_text())
    del result["samples"]
    return result


def rows(results: list[Result]) -> list[tuple[str, ...]]:
    """The table: a column for each seed, and what is wanted."""

    def row(name: str, wanted: str, cell: Callable[[Result], object]) -> tuple[str, ...]:
        return (name, *(str(cell(result)) for result in results), wanted)

    def struck(result: Result, *kinds: str) -> int:
        return sum(number for name, number in result["struck"].items() if name.startswith(kinds))

    def times(name: str) -> tuple[str, ...]:
        return row(f"recovery, {name}", "", lambda result: f"{result['recovery_s'][name]:.2f} s")

    def then(key: str) -> Callable[[Result], str]:
        return lambda result: f"{result['before'][key]}, then {result['after'][key]}"

    def memory(result: Result) -> str:
        windows = result["memory_windows_bytes"]
        return f"{windows[0] / 1e6:.0f} MB, then {windows[1] / 1e6:.0f} MB" if windows else "too short to say"

    return [
        row("replicas x TP degree", "", lambda result: result["layout"]),
        row("optimizer state", "", lambda result: result.get("optimizer", "replicated")),
        row("faults", "", lambda result: result["num_faults"]),
        row("of them kills", "", lambda result: struck(result, "kill")),
        row("stops, slow devices", "", lambda result: struck(result, "stop", "slow")),
        row("cut links, drains", "", lambda result: struck(result, "flake", "drain")),
        *(row(name.replace("_", " "), "0", lambda result, name=name: result[name]) for name in ZERO),
        row("bits flipped on purpose", "", lambda result: result["mismatches_injected"]),
        row("of them found by a digest", "", lambda result: result["mismatches_found"]),
        *(times(name) for name in ("median", "p99", "max")),
        *(row(name, "equal", then(key)) for name, key in OCCUPIED),
        row("memory of all processes", "flat", memory),
        row("seconds in all", "", lambda result: f"{result['wall_s']:.0f}"),
    ]


def main() -> None:
    """Runs or reads, writes result.json and README.md; the exit code is 1 if a run was not clean."""
    parser = arguments(__doc__, HERE)
    parser.add_argument("--faults", type=int, default=200, help="of each seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, nargs="+", help="folders of runs of `runflat chaos` to report instead")
    args = parser.parse_args()
    if args.runs:
        results = [counted(run) for run in args.runs]
    else:
        faults, seeds = (QUICK_FAULTS, args.seeds[:1]) if args.quick else (args.faults, args.seeds)
        with tempfile.TemporaryDirectory() as folder:
            results = [chaos(faults, seed, Path(folder) / f"seed-{seed}") for seed in seeds]
    problems = [f"seed {result['seed']}: {problem}" for result in results for problem in result["problems"]]
    text = __doc__.partition("\n\n")[0] + f" {SHARED}" + "".join(f"\n\nPROBLEM: {problem}" for problem in problems)
    header = ("", *(f"seed {result['seed']}" for result in results), "wanted")
    data = {"seeds": results}
    report(args.out, "Chaos", text, rows(results), data, header=header)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
