"""Keeps the books of a run: what workers report becomes steps.jsonl, published checkpoints and summary.json.

Only this process publishes checkpoints, and it checks that every sample of every step was used exactly once.
"""

from __future__ import annotations

import json
import signal
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from runflat.elastic.launch_local import LocalWorkers
from runflat.errors import ConfigError, RunError, UserError
from runflat.plan.plan import Plan
from runflat.plan.units import ModelSpec
from runflat.train.checkpoint import Progress, ShardFile, discard, publish, save_failed, shard_from_json
from runflat.train.data import Corpus

START_TIMEOUT_S = 300.0
"""Longest wait for all workers to be ready."""
GRACE_S = 2.0
"""After a first error: how long to listen for the one that caused it."""


class View(Protocol):
    """Who watches the run: a progress line, or nobody."""

    def step(self, record: Mapping[str, Any]) -> None:
        """A step is complete; `record` is its line of steps.jsonl."""

    def say(self, text: str) -> None:
        """Something worth a line happened."""


@dataclass
class Books:
    """What has been reported so far."""

    sample_hash: str
    num_samples: int
    reports: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    shards: dict[int, dict[str, ShardFile]] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    holdout: dict[int, float] = field(default_factory=dict)
    checkpoint: Path | None = None
    step: int = 0


class Controller:
    """One run of workers under one plan."""

    def __init__(
        self, run: Path, spec: ModelSpec, plan: Plan, corpus: Corpus, view: View, start: Progress, timeout_s: float
    ):
        """`start` is where the run begins: step 0, or the checkpoint that it resumes."""
        self.run = run
        self.spec = spec
        self.plan = plan
        self.corpus = corpus
        self.view = view
        self.timeout_s = timeout_s
        self.books = Books(start.sample_hash, start.num_samples, step=start.step)
        self.started = time.monotonic()
        self.stopped = False
        self._interrupts = 0
        self._done: set[str] = set()
        self._ready: set[str] = set()
        self._error: Exception | None = None

    def supervise(self, workers: LocalWorkers) -> None:
        """Listen to `workers` until all have ended; a first Ctrl-C stops after the step in flight, a second at once.

        Raises:
            UserError: a worker found the input unusable, or a checkpoint could not be written.
            RunError: a worker failed or died; the message carries the first cause.
        """
        previous = signal.signal(signal.SIGINT, self._on_interrupt(workers))
        try:
            with (self.run / "steps.jsonl").open("a") as steps:
                self._listen(workers, steps.write)
        finally:
            signal.signal(signal.SIGINT, previous)
            workers.kill()

    def _on_interrupt(self, workers: LocalWorkers) -> Callable[[int, FrameType | None], None]:
        def interrupted(_: int, __: FrameType | None) -> None:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
            self.view.say("stopping after this step and saving a checkpoint; press Ctrl-C again to stop at once")
            workers.stop()

        return interrupted

    def _listen(self, workers: LocalWorkers, write: Callable[[str], Any]) -> None:
        devices = {self.plan.device(place) for place in self.plan.places}
        heard = time.monotonic()
        while self._done != devices:
            patience = START_TIMEOUT_S if self._ready != devices else 3 * self.timeout_s
            for device, message in workers.messages(1.0):
                heard = time.monotonic()
                if message["type"] in ("error", "exit") and device not in self._done:
                    raise self._first_cause(workers, device, message)
                self._take(device, message, write)
                if self._error is not None:
                    raise self._error
            if time.monotonic() - heard > patience:
                missing = ", ".join(sorted(devices - (self._ready if self._ready != devices else self._done)))
                raise RunError(f"no word from the workers for {patience:.0f} s; still waiting for {missing}.")

    def _take(self, device: str, message: dict[str, Any], write: Callable[[str], Any]) -> None:
        kind = message["type"]
        if kind == "ready":
            self._ready.add(device)
        elif kind == "step":
            self._take_step(message, write)
        elif kind == "shard":
            self._take_shard(device, message)
        elif kind == "holdout" and message["step"] not in self.books.holdout:
            self.books.holdout[message["step"]] = message["loss"]
            self.view.say(f"step {message['step']}: held-out loss {message['loss']:.4f} nats per token")
        elif kind == "done":
            self._done.add(device)
            self.stopped = self.stopped or message["stopped"]

    def _take_step(self, message: dict[str, Any], write: Callable[[str], Any]) -> None:
        """Join the replicas' reports of a step; when all are in, check the samples and write the record."""
        step = message["step"]
        reports = self.books.reports.setdefault(step, {})
        reports[message["replica"]] = message
        if len(reports) < len(self.plan.replicas):
            return
        del self.books.reports[step]
        self._count_samples(step, reports)
        step_s = max(report["step_s"] for report in reports.values())
        shared = ("step", "loss", "grad_norm", "lr", "num_target_tokens", "skipped")
        record = {key: message[key] for key in shared} | {
            "generation": self.plan.generation,
            "step_s": step_s,
            "tokens_per_s": self.plan.num_sequences * self.corpus.seq_len / step_s,
            "time_s": time.monotonic() - self.started,
            "replicas": [
                {key: reports[number][key] for key in ("replica", "num_samples", "compute_s", "sync_s")}
                for number in sorted(reports)
            ],
        }
        write(json.dumps(record) + "\n")
        self.books.step_seconds.append(step_s)
        self.books.last = record
        self.books.step = step + 1
        self.view.step(record)

    def _count_samples(self, step: int, reports: Mapping[int, Mapping[str, Any]]) -> None:
        used = [
            sample
            for report in reports.values()
            for sample in range(report["first_sample"], report["first_sample"] + report["num_samples"])
        ]
        due = list(range(self.books.num_samples, self.books.num_samples + self.plan.num_sequences))
        if sorted(used) != due:
            self._error = RunError(f"step {step} used samples {sorted(used)} where {due[0]}..{due[-1]} were due.")
            return
        self.books.sample_hash = self.corpus.sample_hash(self.books.sample_hash, step, used)
        self.books.num_samples += len(due)

    def _take_shard(self, device: str, message: dict[str, Any]) -> None:
        progress = Progress(**message["progress"])
        if "error" in message:
            discard(self.run, progress.step, self.plan.generation)
            self._error = save_failed(self.run, progress.step, message["error"])
            return
        shards = self.books.shards.setdefault(progress.step, {})
        shards[device] = shard_from_json(message["shard"])
        if len(shards) == len(self.plan.places):
            del self.books.shards[progress.step]
            ordered = [shards[name] for name in sorted(shards)]
            self.books.checkpoint = publish(self.run, self.spec, self.plan, progress, ordered)
            self.view.say(f"step {progress.step}: checkpoint {self.books.checkpoint}")

    def _first_cause(self, workers: LocalWorkers, device: str, message: dict[str, Any]) -> Exception:
        """The error behind the first failure: peers of a failed worker fail too, and may be heard first."""
        failures = [(device, message)]
        until = time.monotonic() + GRACE_S
        while (left := until - time.monotonic()) > 0 and not _is_cause(failures[-1][1]):
            failures += [pair for pair in workers.messages(left) if pair[1]["type"] in ("error", "exit")]
        causes = [pair for pair in failures if _is_cause(pair[1])]
        device, message = (causes or failures)[0]
        if message["type"] == "exit":
            return RunError(
                f"worker {device} ended with code {message['code']} after step {self.books.step}. This version does "
                f"not go on without it: use runflat train --resume {self.run}."
            )
        if message["cause"] == "user":
            return _user_error(message)
        (self.run / "error.txt").write_text(f"worker {device}\n{message['traceback']}")
        return RunError(f"worker {device} failed: {message['text']} (its traceback is in {self.run / 'error.txt'}).")

    def summary(self) -> dict[str, Any]:
        """What summary.json says of the run."""
        books = self.books
        median = statistics.median(books.step_seconds) if books.step_seconds else None
        return {
            "step": books.step,
            "stopped": self.stopped,
            "loss": books.last.get("loss"),
            "holdout_loss": books.holdout.get(books.step),
            "sample_hash": books.sample_hash,
            "num_samples": books.num_samples,
            "median_step_s": median,
            "tokens_per_s": self.plan.num_sequences * self.corpus.seq_len / median if median else None,
            "wall_s": time.monotonic() - self.started,
            "num_params": self.spec.num_params,
            "replicas": [{"replica": r.replica, "tp": r.tp, "sequences": r.num_sequences} for r in self.plan.replicas],
            "checkpoint": str(books.checkpoint) if books.checkpoint else None,
        }


def _is_cause(message: Mapping[str, Any]) -> bool:
    """Whether a failure explains itself; a collective's error only says that somebody else is gone."""
    if message["type"] == "error":
        return bool(message["cause"] != "comms")
    return bool(message["code"] not in (0, 1))


def _user_error(message: Mapping[str, Any]) -> UserError:
    """The worker's UserError, of the same class where it is one of ours."""
    known = {cls.__name__: cls for cls in UserError.__subclasses__()}
    return known.get(message["class"], ConfigError)(message["text"])
