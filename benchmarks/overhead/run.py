"""What supervision costs while nothing fails: the demo model on unpaced workers.

    python benchmarks/overhead/run.py [--pairs 20]

Pairs of runs, supervised and plain, one after the other: plain workers run the same steps over the same groups, but
with no controller, no heartbeat, no channel, no copies in memory. And, in one longer supervised run, the CPU time by
thread: that of the heartbeat and order threads and of the controller, against that of all workers. Copies in memory are
told apart: `train.memory_every` says how many there are.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from runflat.check.bench import arguments, report, spread
from runflat.check.live import Command, Watch, cpu_s, until
from runflat.commands.prepare import Prepared, prepare, run_folder
from runflat.commands.train import parse
from runflat.parallel.comms import Comms, Network
from runflat.plan.plan import Place, Plan, plan_from_json
from runflat.train.engine import Engine
from runflat.train.job import Job, worker_device

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FLAGS = "--model.preset demo --layout.tp 4 --layout.replicas 2 --train.global-batch 14 --data.seq-len 64"
WARM_UP = 3
"""Steps at the start that are not counted."""
SIDE_THREADS = ("heartbeat", "orders", "copies")


def plain_worker(job: str, plan_text: str, place: Place, port: int, steps: int, answers: Any) -> None:
    """One device of a job that nobody supervises; sends the seconds of its steps."""
    torch.set_num_threads(1)
    parsed, plan = Job.model_validate_json(job), plan_from_json(plan_text)
    engine = Engine(parsed, worker_device(0), lambda name: None)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
    comms = Comms(store, plan, engine.layout(plan), place, Network())
    engine.build(plan, place, None)
    engine.join(comms)
    engine.enter(plan, place, comms)
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        engine.samples()
        engine.compute()
        engine.finish()
        engine.commit(engine.barrier(stop=False, switch=False))
        seconds.append(time.perf_counter() - started)
    answers.put((place, seconds))
    comms.world.all_reduce(torch.ones(1))  # nobody leaves while another still works


def plain(prepared: Prepared, steps: int) -> float:
    """Median step of unsupervised workers, in seconds."""
    plan: Plan = prepared.plan
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["runflat.train.engine", "transformers.models.llama.modeling_llama"])
    answers = context.Queue()
    workers = [
        context.Process(
            target=plain_worker,
            args=(prepared.job.model_dump_json(), plan.to_json(), place, port, steps, answers),
            daemon=True,
        )
        for place in plan.places
    ]
    for worker in workers:
        worker.start()
    found = dict(answers.get(timeout=300) for _ in workers)
    for worker in workers:
        worker.join(60)
    del store
    return statistics.median(found[plan.places[0]][WARM_UP:])


def supervised(folder: Path, steps: int, name: str = "supervised") -> tuple[float, dict[str, float]]:
    """Median step of supervised workers in seconds, and the CPU seconds of everybody after the warm-up."""
    run = folder / name
    watch = Watch(run)
    command = ["train", "--run", str(run), *FLAGS.split(), "--train.steps", str(steps)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with Command(command, folder / f"{name}.log", environment) as started:
        watch.reached(WARM_UP, 300)
        workers = [watch.pid(device) for device in watch.devices()]
        before = _used(workers, started.process.pid)
        watch.reached(steps - 2, 60 + 10 * steps)
        after = _used(workers, started.process.pid)
        until("the end", lambda: started.process.poll() is not None, 120)
        if started.process.returncode:
            sys.exit(f"the run ended with code {started.process.returncode}:\n{started.output()}")
    step_s = statistics.median(row["step_s"] for row in watch.steps()[WARM_UP:])
    return step_s, {who: after[who] - before[who] for who in after}


def _used(workers: list[int], controller: int) -> dict[str, float]:
    used = {"workers": 0.0, "controller": sum(cpu_s(controller).values()), **dict.fromkeys(SIDE_THREADS, 0.0)}
    for pid in workers:
        for thread, seconds in cpu_s(pid).items():
            used["workers"] += seconds
            for side in SIDE_THREADS:
                used[side] += seconds if thread.startswith(side) else 0.0
    return used


def main() -> None:
    """Measures, writes result.json and README.md."""
    parser = arguments(__doc__, HERE)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=30, help="of each run of a pair")
    parser.add_argument("--cpu-steps", type=int, default=100, help="of the run whose CPU time is counted")
    args = parser.parse_args()
    num_pairs = 2 if args.quick else args.pairs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = f"--run {folder / 'plain'} {FLAGS} --train.steps {args.steps}"
        config = parse(flags.split())
        prepared = prepare(config, run_folder(config), print)
        ratios, pairs = [], []
        for number in range(num_pairs):
            order = [True, False] if number % 2 else [False, True]
            seconds = {
                with_it: supervised(folder, args.steps, f"supervised-{number}")[0]
                if with_it
                else plain(prepared, args.steps)
                for with_it in order
            }
            pairs.append({"supervised_s": seconds[True], "plain_s": seconds[False]})
            ratios.append(seconds[True] / seconds[False])
        _, used = supervised(folder, args.cpu_steps, "cpu")
    side_s = used["controller"] + used["heartbeat"] + used["orders"]
    share = side_s / used["workers"]
    rows = [
        (
            f"step time with supervision / without, median of {num_pairs} pairs",
            f"{statistics.median(ratios):.3f}",
            "<= 1.05",
        ),
        ("CPU time of controller, heartbeat and order threads / of workers", f"{share:.2%}", "<= 2 %"),
        ("CPU time of the threads that copy to memory / of workers", f"{used['copies'] / used['workers']:.2%}", ""),
    ]
    data = {"pairs": pairs, "ratio": spread(ratios), "cpu_s": used, "cpu_share": share, "cpu_steps": args.cpu_steps}
    report(args.out, "Overhead while nothing fails", __doc__.partition("\n\n")[0], rows, data)


if __name__ == "__main__":
    main()
