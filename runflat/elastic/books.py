"""The books of a run: what workers report becomes steps.jsonl, published checkpoints and summary.json.

Only the books publish checkpoints, and they check that every sample of every committed step is used exactly once. A
step's report can be lost with the device that would have given it; its samples are then those that the plan names, and
its loss comes from the barrier's scalars, which every device has.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from runflat.elastic.messages import Commit, Holdout, Message, Shard, StepReport
from runflat.elastic.orders import Resume
from runflat.elastic.saves import Saves
from runflat.errors import RunError
from runflat.plan.cost import model_flops
from runflat.plan.plan import Plan
from runflat.plan.units import ModelSpec
from runflat.train.checkpoint import Progress, open_checkpoint, shard_from_json
from runflat.train.emulate import kept_up
from runflat.train.publishing import discard, keep_newest, publish, save_failed

REMEMBERED_STEPS = 4096
"""Steps whose place in the data is kept, for the case that the run goes back to one."""

SampleHash = Callable[[str, int, Sequence[int]], str]
"""(hash so far, step, samples of the step) -> hash."""


class View(Protocol):
    """Who watches the run: a progress line, or nobody."""

    def step(self, record: Mapping[str, Any]) -> None:
        """A step is complete; `record` is its line of steps.jsonl."""

    def say(self, text: str) -> None:
        """Something worth a line happened."""

    def waiting(self, text: str | None) -> None:
        """What has been waited for longer than a second; None when that is over."""


@dataclass(frozen=True)
class RunFacts:
    """What the books must know of the run: `learning_rate` of a step, `num_places` devices in health.

    `step_work` is the work of a step on the most loaded device of a plan, in any unit.
    """

    run: Path
    spec: ModelSpec
    seq_len: int
    num_places: int
    sample_hash: SampleHash
    learning_rate: Callable[[int], float]
    step_work: Callable[[Plan], float]
    power: Callable[[Plan], dict[str, Any]] | None = None
    """What a step's record says of power; None where nobody steers it."""
    peak_flops: float | None = None
    """FLOP/s of a device on its data sheet; None where nobody declares them."""
    keep_checkpoints: int = 0
    """Checkpoints that are kept, the newest ones; 0: all."""
    token: str = "token"
    """What a token is, in words that people read."""


class Books:
    """Everything that has been reported, in order of steps. Times are seconds since the start of the run."""

    def __init__(self, facts: RunFacts, start: Progress, view: View):
        """`start` is where the run begins: step 0, or the checkpoint that it resumes."""
        self.facts = facts
        self.view = view
        self.step = start.step
        self.num_samples = start.num_samples
        self.sample_hash = start.sample_hash
        self.first_sample = start.num_samples
        self.last: dict[str, Any] = {}
        self.holdout: dict[int, float] = {}
        self.checkpoint: Path | None = None
        self.plans: dict[int, Plan] = {}
        self.waited_s: dict[int, float] = {}
        """Of the last step: seconds that each replica waited for the slowest."""
        self._step_s: list[float] = []
        self._healthy_s: list[float] = []
        self._per_work_s: list[float] = []
        """Seconds of each step by the work that its plan gave the most loaded device."""
        self._work: dict[int, float] = {}
        self._billed_s = 0.0
        self._late_s = 0.0
        self._pending: dict[int, dict[int, StepReport]] = {}
        self._commits: dict[int, tuple[int, tuple[float, ...]]] = {}
        self._saves = Saves()
        self._before: OrderedDict[int, tuple[int, str]] = OrderedDict(
            {start.step: (start.num_samples, start.sample_hash)}
        )
        self._path = facts.run / "steps.jsonl"
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """No more steps are written."""
        self._file.close()

    def catch_up(self, plan: Plan) -> None:
        """Write lines for the steps that an earlier life's workers finished under `plan` after its controller's death.

        What the plan says of them is known; loss and times are null. `time_s` is when they came into the books.
        """
        lines = self._path.read_text(encoding="utf-8").splitlines()
        end = self.step
        for self.step in range(json.loads(lines[-1])["step"] + 1 if lines else end, end):
            self._file.write(json.dumps(self._record(plan, {}, 0.0)) + "\n")
        self._file.flush()
        self.step = end

    def adopt(self, plan: Plan) -> None:
        """Remember a plan, under whose generation reports will come."""
        self.plans[plan.generation] = plan
        self._work[plan.generation] = self.facts.step_work(plan)

    def take(self, device: str, message: Message, now: float) -> tuple[int, str] | None:
        """Enter what a worker says. Returns (step, folder) when that completed a checkpoint.

        Raises:
            CheckpointError: a shard or the index could not be written.
            RunError: samples were used twice, or left out.
        """
        if isinstance(message, StepReport):
            if message.step >= self.step:
                self._pending.setdefault(message.step, {})[message.replica] = message
                self._write_complete(now)
        elif isinstance(message, Commit):
            self._commits[message.step] = (message.generation, message.scalars)
        elif isinstance(message, Holdout):
            if message.step not in self.holdout:
                self.holdout[message.step] = message.loss
                self.view.say(f"step {message.step}: held-out loss {message.loss:.4f} nats per {self.facts.token}")
        elif isinstance(message, Shard):
            return self._take_shard(device, message)
        return None

    def _write_complete(self, now: float) -> None:
        while (reports := self._pending.get(self.step)) is not None:
            generation = next(iter(reports.values())).generation
            plan = self.plans[generation]
            if len(reports) < len(plan.replicas):
                return
            self._enter(plan, reports, now)

    def settle(self, committed: int, scalars: Sequence[float] | None, generation: int, now: float) -> None:
        """Enter every step before `committed` with what is known of it: no more reports will come.

        `scalars` are those of step `committed - 1`, done under `generation`.
        """
        if scalars is not None:
            self._commits.setdefault(committed - 1, (generation, tuple(scalars)))
        while self.step < committed:
            reports = self._pending.get(self.step, {})
            known = self._commits.get(self.step)
            number = next((r.generation for r in reports.values()), known[0] if known else generation)
            self._enter(self.plans[number], reports, now)
        self._pending.clear()

    def go_back(self, resume: Resume, generation: int) -> None:
        """The steps from `resume.committed` on are not committed any more: `generation` will do them again."""
        step = resume.committed
        self._saves.go_back(step, generation)
        if step >= self.step:
            return
        if step in self._before:
            self.num_samples, self.sample_hash = self._before[step]
        else:
            assert resume.checkpoint is not None
            progress = open_checkpoint(Path(resume.checkpoint)).progress
            self.num_samples, self.sample_hash = progress.num_samples, progress.sample_hash
        for later in [number for number in self._before if number > step]:
            del self._before[later]
        self.holdout = {number: loss for number, loss in self.holdout.items() if number <= step}
        self._commits = {number: commit for number, commit in self._commits.items() if number < step}
        self.step = step
        lines = self._path.read_text(encoding="utf-8").splitlines()
        self._file.close()
        self._path.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] < step))
        self._file = self._path.open("a", encoding="utf-8")

    def _enter(self, plan: Plan, reports: Mapping[int, StepReport], now: float) -> None:
        """Write the record of the next step; check its samples."""
        step = self.step
        self._pending.pop(step, None)
        used = self._samples(plan, reports)
        self.sample_hash = self.facts.sample_hash(self.sample_hash, step, used)
        record = self._record(plan, reports, now)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self.num_samples += len(used)
        self.step += 1
        self._before[self.step] = (self.num_samples, self.sample_hash)
        if len(self._before) > REMEMBERED_STEPS:
            self._before.popitem(last=False)
        self._commits.pop(step, None)
        self.last = record
        if record["step_s"] is not None:
            self._step_s.append(record["step_s"])
            self._per_work_s.append(record["step_s"] / self._work[plan.generation])
            if len(plan.places) == self.facts.num_places:
                self._healthy_s.append(record["step_s"])
        self._billed_s += record.get("billed_s", 0.0)
        self._late_s += record.get("late_s", 0.0)
        slowest = max((report.compute_s for report in reports.values()), default=0.0)
        self.waited_s = {number: slowest - report.compute_s for number, report in reports.items()}
        self.view.step(record)

    def _samples(self, plan: Plan, reports: Mapping[int, StepReport]) -> list[int]:
        """The samples that the step used, in order."""
        used: list[int] = []
        first = self.num_samples
        for replica in plan.replicas:
            report = reports.get(replica.replica)
            start, count = (report.first_sample, report.num_samples) if report else (first, replica.num_sequences)
            used += range(start, start + count)
            first += replica.num_sequences
        due = list(range(self.num_samples, self.num_samples + plan.num_sequences))
        if sorted(used) != due:
            raise RunError(f"step {self.step} used samples {sorted(used)} where {due[0]}..{due[-1]} were due.")
        return due

    def _record(self, plan: Plan, reports: Mapping[int, StepReport], now: float) -> dict[str, Any]:
        """The line of steps.jsonl; what nobody reported is null."""
        step_s = max((report.step_s for report in reports.values()), default=None)
        replicas = []
        for replica in plan.replicas:
            report = reports.get(replica.replica)
            times = (report.compute_s, report.sync_s) if report else (None, None)
            first = report.first_sample if report else None
            row = {"replica": replica.replica, "first_sample": first, "num_samples": replica.num_sequences}
            own: dict[str, Any] = {"own_s": report.own_s} if report and report.own_s else {}
            own |= {"parts_s": report.parts_s} if report else {}
            replicas.append({**row, "compute_s": times[0], "sync_s": times[1], **own})
        record = {
            "step": self.step,
            **self._results(reports),
            "generation": plan.generation,
            "step_s": step_s,
            **self._rates(plan, step_s),
            "peak_bytes": max((report.peak_bytes for report in reports.values()), default=None),
            "time_s": now,
            "sample_hash": self.sample_hash,
            "replicas": replicas,
        }
        if self.facts.power is not None:
            record["power"] = self.facts.power(plan)
        if any(report.billed_s for report in reports.values()):
            record |= {
                name: max(getattr(report, name) for report in reports.values()) for name in ("billed_s", "late_s")
            }
        return record

    def _rates(self, plan: Plan, step_s: float | None) -> dict[str, float | None]:
        """Tokens per second, in all and per device, and the part of the devices' declared peak that the model used."""
        facts, devices = self.facts, len(plan.places)
        if not step_s or not devices:
            return dict.fromkeys(("tokens_per_s", "tokens_per_s_per_device", "mfu"))
        tokens_per_s = plan.num_sequences * facts.seq_len / step_s
        flops = plan.num_sequences * model_flops(facts.spec, facts.seq_len)
        mfu = flops / (step_s * devices * facts.peak_flops) if facts.peak_flops else None
        return {"tokens_per_s": tokens_per_s, "tokens_per_s_per_device": tokens_per_s / devices, "mfu": mfu}

    def _results(self, reports: Mapping[int, StepReport]) -> dict[str, Any]:
        for report in reports.values():
            shared = ("loss", "grad_norm", "lr", "num_target_tokens", "skipped")
            return {key: getattr(report, key) for key in shared}
        lr = self.facts.learning_rate(self.step)
        known = self._commits.get(self.step)
        if known is None:
            return {"loss": None, "grad_norm": None, "lr": lr, "num_target_tokens": None, "skipped": False}
        _, loss_sum, num_targets, squared_norm, non_finite = known[1][:5]
        return {
            "loss": loss_sum / num_targets,
            "grad_norm": math.sqrt(squared_norm) / num_targets,
            "lr": lr,
            "num_target_tokens": int(num_targets),
            "skipped": non_finite > 0,
        }

    def _take_shard(self, device: str, message: Shard) -> tuple[int, str] | None:
        progress = Progress(**message.progress)
        if message.error is not None or message.shard is None:
            discard(self.facts.run, progress.step, message.generation)
            raise save_failed(self.facts.run, progress.step, message.error or "no shard was written")
        plan = self.plans.get(message.generation)
        if plan is None:
            return None  # of a run that has ended
        shard = shard_from_json(message.shard)
        shards = self._saves.add(device, progress.step, message.generation, shard, len(plan.places))
        if not shards:
            return None
        self.checkpoint = publish(self.facts.run, self.facts.spec, plan, progress, shards)
        keep_newest(self.facts.run, progress.step, self.facts.keep_checkpoints)
        self.view.say(f"step {progress.step}: checkpoint {self.checkpoint}")
        return progress.step, str(self.checkpoint)

    @property
    def healthy_step_s(self) -> float | None:
        """Median step under the full plan of this run; None if there was none."""
        return statistics.median(self._healthy_s) if self._healthy_s else None

    def estimated_step_s(self, plan: Plan) -> float | None:
        """Seconds that a step under `plan` would take, from this run's steps and the work that plans give."""
        return statistics.median(self._per_work_s) * self.facts.step_work(plan) if self._per_work_s else None

    def _emulated(self) -> dict[str, Any] | None:
        """How well the clock of emulated devices was kept; None for real ones."""
        if not self._billed_s:
            return None
        valid = kept_up(self._late_s, self._billed_s)
        return {"billed_s": self._billed_s, "late_s": self._late_s, "valid": valid}

    def summary(self) -> dict[str, Any]:
        """What summary.json says of steps and samples."""
        median = statistics.median(self._step_s) if self._step_s else None
        batch = self.last.get("replicas", [])
        tokens = sum(entry["num_samples"] for entry in batch) * self.facts.seq_len
        return {
            "step": self.step,
            "loss": self.last.get("loss"),
            "holdout_loss": self.holdout.get(self.step),
            "sample_hash": self.sample_hash,
            "num_samples": self.num_samples,
            "median_step_s": median,
            "tokens_per_s": tokens / median if median else None,
            "num_params": self.facts.spec.num_params,
            "tokens_per_s_per_device": self.last.get("tokens_per_s_per_device"),
            "mfu": self.last.get("mfu"),
            "peak_bytes": self.last.get("peak_bytes"),
            "emulated": self._emulated(),
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
        }
