"""One worker is killed: how long until training goes on, and how fast it goes on, for runflat, torchft and torchrun.

    python benchmarks/peers/run.py [--kills 10] [--torchft-python .venv-torchft/bin/python]

The three train the same model from the same weights on the same samples, 2 replicas x TP 2, all on this machine. The
declared compute time of a sequence is slept in all three loops, as workers that share cores run faster when others
die. A worker is killed (SIGKILL, another one each time) in the middle of a step; a new one may start at once in its
place. The systems take turns. Times are those at which an observer sees the commits, polled every 10 ms.

torchft goes into an environment of its own, beside runflat: `python -m venv .venv-torchft` and
`.venv-torchft/bin/pip install -c constraints.txt -e . torchft-nightly==2026.10.26`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Settings
from jobs import Job, runflat, torchft, torchrun
from timings import HEADER, Timing, losses, table, timing
from transformers import AutoModelForCausalLM

from runflat.check.bench import arguments, report
from runflat.commands.models import model_config
from runflat.commands.prepare import prepare
from runflat.commands.train import parse
from runflat.errors import RunError
from runflat.plan.cost import sequence_flops
from runflat.plan.plan import plan_from_json

HERE = Path(__file__).parent
REPLICAS, TP, SEQUENCES, SEQ_LEN = 2, 2, 12, 64
SEQUENCE_S = 0.1
"""Declared time of a sequence on a whole replica: a healthy step takes 0.6 s."""
LR = 3e-3
CHECKPOINT_EVERY = 5
VICTIMS = ("1:1", "0:1", "1:0", "0:0")
README_LIGHTHOUSE = ("--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000")
"""As torchft's README starts it; a group that is silent is waited for 5 s."""
LIGHTHOUSE = (*README_LIGHTHOUSE, "--heartbeat_timeout_ms", "1000")
README_KILLS = 2
"""Most kills of `torchft, README`, which is there to show what the time-out costs."""
TORCHFT_PYTHON = Path(".venv-torchft/bin/python")
NAMES = ("runflat", "torchft", "torchft, README", "torchrun")
MODEL_FLAGS = (
    f"--layout.tp {TP} --layout.replicas {REPLICAS} --train.global-batch {SEQUENCES} --data.seq-len {SEQ_LEN} "
    f"--train.steps 100000 --train.lr {LR} --train.schedule constant --train.weight-decay 0 --train.clip-norm 0"
)
NOTES = """2 replicas x TP 2, runflat's `tiny` preset, {sequences} sequences of {seq_len} tokens a step, {sequence_s} s
declared for a sequence on a whole replica. A new worker may start at once in the place of the dead one.

`torchft`: the lighthouse waits 1 s for a group that is silent; `torchft, README`: 5 s, as its README starts it. A
worker's death takes its group out (the group's torchrun ends, and is started again at once); the other group goes on
alone with its own sequences, so that the batch is half as large until the group is back. Its newest release, 0.2.0, did
not get through: the workers of the other group ended too, with "torchft/ddp.py, line 76, in _comm_hook: assert
fut._fut: AssertionError" (the same command, with 0.2.0 in the environment), so a nightly build stands here.

`torchrun` stops all workers and starts all of them again from the newest checkpoint, one every {every} steps. Steps
that are done again do not count as committed. It goes on with all workers or not at all, so that its rate afterwards
is the full one. It runs with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`: without it, torch 2.13.0's workers could not meet
again after a restart ("Gloo connectFullMesh failed with ... timed out connecting: SO_ERROR: Connection refused").

`runflat` goes on with three of four workers and the whole batch.

*Training lost*: seconds of training at full speed that are missing when all four workers train again."""


def save_model(folder: Path) -> None:
    """The model of runflat's tiny preset with random weights, as a directory that all three start from."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(model_config("tiny"), dtype=torch.float32).save_pretrained(folder)


def prepared_settings(folder: Path) -> tuple[Settings, list[str]]:
    """What the peers' loops are told, and runflat's flags for the same."""
    model = folder / "model"
    save_model(model)
    source = Path(json.__file__).parent.as_posix()
    flags = ["--model.from-dir", str(model), "--data.paths", source, *MODEL_FLAGS.split()]
    data = folder / "data"
    data.mkdir()
    ready = prepare(parse(["--run", str(data), *flags]), data, print)
    assert ready.corpus is not None
    plan = plan_from_json(ready.plan.to_json())
    slowest = max(sequence_flops(ready.spec, plan.replica(0), slot, SEQ_LEN) for slot in range(TP))
    flags += ["--devices", "emulated", "--device.rate-tflops", repr(slowest / SEQUENCE_S / 1e12)]
    corpus = ready.corpus.to_json()
    settings = Settings(str(model), corpus, "", REPLICAS, TP, SEQUENCES, SEQUENCE_S, LR, CHECKPOINT_EVERY)
    return settings, flags


def measure(name: str, start: Callable[[Path], Job], folder: Path, victims: list[str]) -> dict[str, Any]:
    """One job, and a kill for each of `victims`; what was measured, and what the job said if it could not go on."""
    for sub in ("commits", "pids"):
        (folder / sub).mkdir(parents=True)
    timings: list[Timing] = []
    said, job = None, start(folder)
    try:
        with job:
            job.until("all workers to train", job.healthy)
            for victim in victims:
                timings.append(timing(job.commits, job.kill(victim)))
                print(f"{name}: {victim} killed, next commit after {timings[-1].recover_s:.2f} s", flush=True)
    except RunError as error:
        said = str(error)
        print(said, flush=True)
    return {"timings": timings, "said": said, "first_losses": losses(job.commits, 3)}


def torchft_version(python: Path) -> tuple[str | None, str]:
    """(name and version of torchft under `python`, ""), or (None, what the import said)."""
    code = "import torchft; from importlib.metadata import packages_distributions as found, version; "
    code += "name = found()['torchft'][0]; print(name, version(name))"
    command = [str(python), "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except OSError as error:
        return None, str(error)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return (lines[-1], "") if done.returncode == 0 else (None, lines[-1] if lines else "nothing")


def main() -> None:
    """Measures, writes result.json and README.md."""
    parser = arguments(__doc__ or "", HERE)
    parser.add_argument("--torchft-python", type=Path, default=TORCHFT_PYTHON, help="Python that has torchft")
    parser.add_argument("--kills", type=int, default=10, help="of each system")
    parser.add_argument("--rounds", type=int, default=2, help="in which the systems take turns")
    parser.add_argument("--systems", nargs="+", default=list(NAMES), choices=list(NAMES))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # ends the jobs too
    num_kills, num_rounds = (1, 1) if args.quick else (args.kills, args.rounds)
    version, said = torchft_version(args.torchft_python)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in args.systems}
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        settings, flags = prepared_settings(base)
        tokens = SEQUENCES * SEQ_LEN
        for number in range(num_rounds):
            for name in args.systems if number % 2 == 0 else args.systems[::-1]:
                kills = min(num_kills, README_KILLS) if name == "torchft, README" else num_kills
                victims = [VICTIMS[kill % len(VICTIMS)] for kill in range(number, kills, num_rounds)]
                folder = base / f"{name.replace(', ', '-')}-{number}"
                folder.mkdir()
                own = Settings(**{**asdict(settings), "folder": str(folder)})
                own.write(folder / "settings.json")
                starts: dict[str, Callable[[Path], Job]] = {
                    "runflat": partial(runflat, flags, num_tokens=tokens, num_devices=REPLICAS * TP),
                    "torchrun": partial(torchrun, own, num_tokens=tokens),
                }
                for key, lighthouse in (("torchft", LIGHTHOUSE), ("torchft, README", README_LIGHTHOUSE)):
                    python = args.torchft_python
                    starts[key] = partial(torchft, own, num_tokens=tokens, python=python, lighthouse=lighthouse)
                if name.startswith("torchft") and version is None:
                    found[name].append({"timings": [], "said": said, "first_losses": []})
                else:
                    found[name].append(measure(name, starts[name], folder, victims))
    write(args.out, found, version)


def write(out: Path, found: dict[str, list[dict[str, Any]]], version: str | None) -> None:
    """The table, what could not be done, and all numbers."""
    timings = {name: [one for part in parts for one in part["timings"]] for name, parts in found.items()}
    rows = table({name: values for name, values in timings.items() if values})
    failed = [f"`{name}` said: {part['said']}" for name, parts in found.items() for part in parts if part["said"]]
    notes = NOTES.format(sequences=SEQUENCES, seq_len=SEQ_LEN, sequence_s=SEQUENCE_S, every=CHECKPOINT_EVERY)
    text = "\n\n".join([(__doc__ or "").partition("\n\n")[0], notes, *failed])
    data = {
        "torchft": version,
        "lighthouse": {"torchft": LIGHTHOUSE, "torchft, README": README_LIGHTHOUSE},
        "sequence_s": SEQUENCE_S,
        "checkpoint_every": CHECKPOINT_EVERY,
        "kills": {name: [asdict(one) for one in values] for name, values in timings.items()},
        "first_losses": {name: [part["first_losses"] for part in parts] for name, parts in found.items()},
        "said": failed,
    }
    extra = {} if version is None else dict([version.split()])
    report(out, "Peers: one worker is killed", text, rows, data, header=HEADER, versions=extra)


if __name__ == "__main__":
    main()
