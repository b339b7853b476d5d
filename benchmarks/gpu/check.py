"""What only a GPU can show, in less than ten minutes.

    python benchmarks/gpu/check.py        (or: make gpu)

First the tests that are marked `gpu`: streams, copies through pinned memory, events, memory, bf16, gloo and NCCL with
one member, the abort of NCCL's communicators. Then trainings of a small model: on the CPU; on a GPU in each type; one
whose process is killed and started again; a larger one for speed and memory; and where there are several GPUs, one
that loses a device and takes it back. Losses are compared step by step with those of the CPU, or of the undisturbed
run.

Exit code 0: all passed; 1: something did not (it is named); 2: there is no GPU, and nothing was written.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from runflat.check.bench import report
from runflat.check.live import Command, Watch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NO_GPU = 2
DEADLINE_S = 570.0
"""After this nothing begins any more, and what runs is ended."""
TESTS_S = 240.0
TRAINING_S = 120.0
STEPS = 16
RETURN_STEPS = 3000
"""Enough for a process to start again meanwhile."""
SMALL = (
    "--model.preset tiny --model.hidden-size 96 --model.num-heads 12 --model.num-kv-heads 12 --model.head-dim 8 "
    "--model.vocab-size 264 --data.seq-len 32 --train.global-batch 8 --train.lr 1e-3"
)
VARIANTS = {
    "one lost": "",
    "one lost, resharded gradients": "--sync reshard",
    "one lost, split tokens": "--train.sequence-parallel",
}
"""Flags of runs that lose a device of a replica and do not take it back."""
LARGER = (
    "--model.preset tiny --model.num-layers 8 --model.hidden-size 1024 --model.num-heads 16 --model.num-kv-heads 16 "
    "--model.head-dim 64 --model.ffn-size 4096 --model.vocab-size 264 --data.seq-len 1024 --train.global-batch 16"
)
TEXT_LINES = 60_000


@dataclass(frozen=True)
class Training:
    """A run of `runflat train`: flags, faults, and whose losses its own are to equal within `bound`, relatively."""

    name: str
    flags: str
    on_cpu: bool = False
    events: tuple[dict[str, Any], ...] = ()
    like: str | None = None
    bound: float = 0.0


@dataclass(frozen=True)
class Test:
    """A test that ran: passed, failed or skipped, with the reason."""

    name: str
    outcome: str
    seconds: float
    reason: str = ""


Row = tuple[str, str, str]
RunTests = Callable[[float], list[Test]]
RunTraining = Callable[[Training, float], dict[str, Any]]


def trainings(num_gpus: int) -> list[Training]:
    """What is trained where there are `num_gpus`: each after the one that it is compared with."""
    small = f"{SMALL} --train.steps {STEPS}"
    kill = {"event": "kill", "device": "0:0", "step": 9, "phase": "backward"}
    found = [
        Training("CPU, float32", small, on_cpu=True),
        Training("float32", f"{small} --profile 2", like="CPU, float32", bound=1e-3),
        Training("float64", f"{small} --train.dtype float64", like="CPU, float32", bound=1e-3),
        Training("bfloat16", f"{small} --train.dtype bfloat16", like="CPU, float32", bound=0.02),
        Training(
            "process killed, a spare takes over",
            f"{small} --train.checkpoint-every 4 --spares 1 --on-failure spare",
            events=(kill,),
            like="float32",
            bound=1e-3,
        ),
        Training("larger, bfloat16", f"{LARGER} --train.dtype bfloat16 --train.steps 20"),
    ]
    tp = min(num_gpus // 2, 4)
    if tp:
        split = f"{small} --layout.replicas 2 --layout.tp {tp}"
        lost = f"1:{tp - 1}"
        events = (kill | {"device": lost}, {"event": "return", "device": lost, "step": 11})
        name = f"{2 * tp} GPUs"
        found += [
            Training(name, split, like="CPU, float32", bound=1e-3),
            *(
                Training(f"{name}, {what}", f"{split} {flags}", events=events[:1], like="CPU, float32", bound=1e-3)
                for what, flags in VARIANTS.items()
                if tp > 1
            ),
            Training(
                f"{name}, one lost and taken back",
                f"{split} --train.steps {RETURN_STEPS} --train.schedule constant --train.digest-every 10",
                events=events,
            ),
        ]
    return found


def check(
    out: Path,
    facts: dict[str, Any],
    run_tests: RunTests,
    run_training: RunTraining,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Run everything and write the result into `out`; returns what went wrong, empty where nothing did."""
    began = clock()

    def left_s() -> float:
        return DEADLINE_S - (clock() - began)

    tests = run_tests(min(TESTS_S, left_s()))
    problems = [f"test {test.name}: {test.outcome}. {test.reason}" for test in tests if test.outcome != "passed"]
    if not tests:
        problems.append("no test ran")
    num_passed = sum(test.outcome == "passed" for test in tests)
    rows: list[Row] = [("tests passed", f"{num_passed} of {len(tests)}", f"{len(tests)}")]
    results: dict[str, dict[str, Any]] = {}
    for training in trainings(facts["num_gpus"]):
        print(f"{training.name} ({left_s():.0f} s left)", file=sys.stderr, flush=True)
        result = (
            run_training(training, min(TRAINING_S, left_s()))
            if left_s() > 0
            else {"problem": "there was no time left for it"}
        )
        results[training.name] = result
        problem, own_rows = judge(training, result, results)
        rows += own_rows
        if problem:
            problems.append(f"training '{training.name}': {problem}")
    wall_s = clock() - began
    rows.append(("all of it, s", f"{wall_s:.0f}", "< 600"))
    report(
        out,
        "On a GPU",
        f"{__doc__.split(chr(10) * 2)[2].strip()}\n\n" + ", ".join(f"{key}: {facts[key]}" for key in facts),
        rows,
        {"gpu": facts, "problems": problems, "wall_s": wall_s}
        | {"tests": [vars(test) for test in tests], "trainings": results},
    )
    return problems


def judge(
    training: Training, result: dict[str, Any], results: dict[str, dict[str, Any]]
) -> tuple[str | None, list[Row]]:
    """What is wrong with a training, None if nothing is, and its rows of the table."""
    name = training.name
    if "problem" in result:
        return str(result["problem"]), [(name, "failed", "")]
    rows = [(f"{name}: tokens/s", f"{result['tokens_per_s']:.0f}", "")]
    if result["peak_bytes"]:
        rows.append((f"{name}: most memory, MB", f"{result['peak_bytes'] / 1e6:.0f}", ""))
    wrong = []
    killed, returned = ([e["device"] for e in training.events if e["event"] == kind] for kind in ("kill", "return"))
    if len(result["stopped_s"]) != len(killed):
        wrong.append(f"{len(result['stopped_s'])} incidents, {len(killed)} faults")
    if result["joined"] != returned:
        wrong.append(f"{result['joined']} came back, not {returned}")
    if "--profile" in training.flags and not result["device_spans"]:
        wrong.append("its profile has nothing of what the device did")
    rows += [(f"{name}: training stood, s", f"{seconds:.2f}", "") for seconds in result["stopped_s"]]
    if training.like is not None:
        other = results[training.like]
        if "problem" in other:
            return f"there is no run '{training.like}' to compare it with", rows
        error = difference(result["losses"], other["losses"])
        rows.append((f"{name}: losses against '{training.like}'", f"{error:.1e}", f"<= {training.bound:.0e}"))
        if error > training.bound:
            wrong.append(f"its losses differ by {error:.1e} from those of '{training.like}'")
    return "; ".join(wrong) or None, rows


def difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Largest relative difference of two runs' losses; infinite where one has more steps, none, or one of NaN."""
    if len(losses) != len(others) or not losses or not all(map(math.isfinite, losses)):
        return math.inf
    return max(abs(one - other) / abs(other) for one, other in zip(losses, others, strict=True))


def run_tests(out: Path, limit_s: float) -> list[Test]:
    """Run the tests that are marked `gpu`; their output goes to tests.txt in `out`."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "tests.xml"
        flags = ["-m", "gpu", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", f"--junitxml={xml}"]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *flags, "tests/gpu"],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired as error:
            text = error.stdout or b""
            keep(out, text if isinstance(text, str) else text.decode(errors="replace"))
            return [Test("all of them", "failed", limit_s, f"they did not end within {limit_s:.0f} s")]
        keep(out, done.stdout)
        return parse_tests(xml.read_text()) if xml.exists() else []


def keep(out: Path, text: str) -> None:
    """Write the tests' output into `out`, without the folders of this machine."""
    for folder, name in ((str(ROOT), "."), (sys.prefix, "PYTHON"), (tempfile.gettempdir(), "TMP")):
        text = text.replace(folder, name)
    out.mkdir(parents=True, exist_ok=True)
    (out / "tests.txt").write_text(text)


def parse_tests(xml: str) -> list[Test]:
    """The tests of a report in JUnit's format."""
    found = []
    for case in ElementTree.fromstring(xml).iter("testcase"):
        marks = {child.tag: child.get("message", "") for child in case}
        bad = next((tag for tag in ("failure", "error") if tag in marks), None)
        outcome = "failed" if bad else "skipped" if "skipped" in marks else "passed"
        reason = marks.get(bad or "skipped", "").partition("\n")[0]
        found.append(Test(str(case.get("name")), outcome, float(case.get("time", 0)), reason))
    return found


def run_training(folder: Path, training: Training, limit_s: float) -> dict[str, Any]:
    """Losses of steps, speed, memory, lost and returned devices of a run in `folder`, or its `problem`."""
    run = folder / training.name.replace(" ", "-").replace(",", "")
    command = ["train", "--run", str(run), "--data.paths", str(folder / "text.txt"), *training.flags.split()]
    if training.events:
        events = folder / f"{run.name}.json"
        events.write_text(json.dumps(training.events))
        command += ["--inject", str(events)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if training.on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with Command(command, folder / f"{run.name}.log", environment) as started:
        try:
            code = started.finish(limit_s)
        except subprocess.TimeoutExpired:
            return {"problem": f"it did not end within {limit_s:.0f} s:\n{started.output()[-2000:]}"}
        if code:
            return {"problem": f"it ended with code {code}:\n{started.output()[-2000:]}"}
    steps = Watch(run).steps()
    summary = Watch(run).summary()
    last = steps[-1]
    return {
        "losses": [step["loss"] for step in steps],
        "tokens_per_s": last["tokens_per_s"],
        "mfu": last.get("mfu"),
        "peak_bytes": None if training.on_cpu else last.get("peak_bytes"),
        "stopped_s": [incident["stopped_s"] for incident in summary["incidents"]],
        "device_spans": device_spans(run / "profile" / "trace.json"),
        "joined": [device for change in summary["changes"] for device in change["joined"]],
        "wall_s": summary["wall_s"],
    }


def device_spans(trace: Path) -> int | None:
    """Spans of what the device did in a profile; None where there is no profile."""
    if not trace.exists():
        return None
    return sum(event.get("cat") == "device" for event in json.loads(trace.read_text())["traceEvents"])


def gpu_facts() -> dict[str, Any]:
    """What GPUs there are, and under which driver and libraries."""
    properties = torch.cuda.get_device_properties(0)
    driver = Path("/proc/driver/nvidia/version")
    return {
        "gpu": properties.name,
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "num_gpus": torch.cuda.device_count(),
        "driver": driver.read_text().splitlines()[0] if driver.exists() else "unknown",
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="folder of result.json, README.md and tests.txt")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        print(
            f"torch {torch.__version__} ({built}) sees no CUDA device here. This check needs one: run it on a machine "
            "with an NVIDIA GPU, its driver, and torch for CUDA. Nothing was run and nothing was written.",
            file=sys.stderr,
        )
        return NO_GPU
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("".join(f"{n} + {n} = {2 * n}\n" for n in range(TEXT_LINES)))
        problems = check(
            args.out,
            gpu_facts(),
            lambda limit_s: run_tests(args.out, limit_s),
            lambda training, limit_s: run_training(folder, training, limit_s),
        )
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
