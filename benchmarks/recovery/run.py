"""How long a lost worker holds training up, and how long its return does.

    python benchmarks/recovery/run.py [--kills 50]

One long run per setting: a worker is killed in the middle of a step, training goes on without it for ten steps, it
returns, and so on, another worker each time. Recovery is the time from SIGKILL to the first commit of the next
generation, less the median step of the next ten. `demo` runs the demo model with both cores full, `emulated` emulated
devices, `slow link` emulated devices whose link makes the transfer of a return last about five steps.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from runflat.check.bench import arguments, report, spread
from runflat.check.live import Command, Watch, until

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PHASES = ("forward", "backward", "sync", "commit", "update")
AFTER = 10
"""Steps without the device, whose median is taken off."""
BETWEEN = {"demo": 20, "emulated": 20, "slow link": 60}
"""Steps between two kills: enough for a process to start and to be fed."""
TINY = (
    "--model.preset tiny --model.hidden-size 96 --model.num-heads 12 --model.num-kv-heads 12 --model.head-dim 8 "
    "--model.vocab-size 264 --data.seq-len 8"
)
EMULATED = "--devices emulated --device.rate-tflops"
SETTINGS = {
    "demo": "--model.preset demo --data.seq-len 64 --layout.tp 4 --layout.replicas 2 --train.global-batch 14",
    "emulated": f"{TINY} {EMULATED} 1.2e-4 --layout.tp 4 --layout.replicas 2 --train.global-batch 28",
    "slow link": f"{TINY} {EMULATED} 1.35e-4 --device.domain-link-gbps 0.0185 --layout.tp 2 --layout.replicas 2 "
    "--train.global-batch 8",
}


def events(num_kills: int, tp: int, between: int) -> list[dict[str, Any]]:
    """Kills and returns, of another device each time."""
    rows: list[dict[str, Any]] = []
    for number in range(num_kills):
        device, step = f"{number % 2}:{number % tp}", 5 + number * between
        rows.append({"event": "kill", "device": device, "step": step, "phase": PHASES[number % len(PHASES)]})
        rows.append({"event": "return", "device": device, "step": step + AFTER + 1})
    return rows


def measure(name: str, flags: str, num_kills: int, folder: Path) -> dict[str, Any]:
    """Runs one setting; returns seconds of each recovery and return."""
    run, injected = folder / name.replace(" ", "-"), folder / "events.json"
    injected.write_text(json.dumps(events(num_kills, 2 if name == "slow link" else 4, BETWEEN[name])))
    steps = 5 + num_kills * BETWEEN[name]
    watch = Watch(run)
    command = ["train", "--run", str(run), *flags.split(), "--inject", str(injected)]
    command += ["--train.steps", str(steps), "--train.memory-every", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with Command(command, folder / f"{run.name}.log", environment) as started:
        until(f"the end of {name}", lambda: started.process.poll() is not None, 60 + 60 * num_kills)
        if started.process.returncode:
            sys.exit(f"{name} ended with code {started.process.returncode}:\n{started.output()}")
    return seconds(watch)


def seconds(watch: Watch) -> dict[str, Any]:
    """What a run that has ended says of its incidents and changes."""
    commits = {row["step"]: (row["generation"], row["time_s"]) for row in watch.steps()}
    recovery, phases, pauses, transfers = [], [], [], []
    for incident in watch.records("incident"):
        generation = incident["generation"]
        times = sorted(time_s for number, time_s in commits.values() if number == generation)[: AFTER + 1]
        if len(times) < AFTER // 2:
            continue  # its plan was replaced at once, so that there is no step time to take off
        median_s = statistics.median(later - earlier for earlier, later in pairwise(times))
        recovery.append(times[0] - incident["started_s"] - median_s)
        phases.append(incident["phases_s"])
    healthy_s = watch.summary()["healthy_step_s"]
    for change in (row for row in watch.records("change") if row["joined"]):
        pauses.append(change["stopped_s"])
        transfers.append(change["stages_s"]["feed"] / healthy_s)
    medians = {
        phase: statistics.median(row.get(phase, 0.0) for row in phases)
        for phase in dict.fromkeys(key for row in phases for key in row)
    }
    return {
        "recovery_s": spread(recovery),
        "phases_s": medians,
        "return_pause_s": spread(pauses),
        "transfer_steps": spread(transfers),
        "healthy_step_s": healthy_s,
        "emulated": watch.summary()["emulated"],
        "all_recovery_s": recovery,
        "all_return_pause_s": pauses,
    }


def main() -> None:
    """Measures, writes result.json and README.md."""
    parser = arguments(__doc__, HERE)
    parser.add_argument("--kills", type=int, default=50, help="of each setting; a fifth of them over the slow link")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    args = parser.parse_args()
    num_kills = 2 if args.quick else args.kills
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.settings:
            results[name] = measure(
                name, SETTINGS[name], -(-num_kills // 5) if name == "slow link" else num_kills, Path(folder)
            )
    rows = []
    for name, result in results.items():
        note = " (emulated)" if result["emulated"] else ""
        if result["emulated"] and not result["emulated"]["valid"]:
            note = " (emulated, NOT VALID: the machine was too slow for the declared durations)"
        limit_s = 0.5 if result["emulated"] else 1.0
        recovery, pause = result["recovery_s"], result["return_pause_s"]
        rows += [
            (f"{name}{note}: recovery, median of {recovery['num']}", f"{recovery['median']:.2f} s", f"<= {limit_s} s"),
            (f"{name}{note}: recovery, worst", f"{recovery['max']:.2f} s", "<= 3 s"),
            (f"{name}{note}: pause at a return, median", f"{pause['median']:.2f} s", "<= 0.3 s"),
            (f"{name}{note}: transfer of a return", f"{result['transfer_steps']['median']:.1f} steps", ""),
        ]
    report(
        args.out, "Recovery and return", __doc__.partition("\n\n")[0], rows, {"kills": num_kills, "settings": results}
    )


if __name__ == "__main__":
    main()
