"""One device's model, optimizer and place in the data: built once, moved from plan to plan, stepped, saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runflat.parallel.casts import lift_forward, recompute_layers
from runflat.parallel.comms import Comms, Group, Network
from runflat.parallel.move import NOTHING, ShardState
from runflat.parallel.optimizer import build_optimizer
from runflat.parallel.shard import ShardedModel, WeightSource, cut, initial_weights, safetensors_weights
from runflat.parallel.tp_plan import ShardingRules, build_meta_model, read_rules
from runflat.plan.batch import micro_batches
from runflat.plan.plan import Place, Plan
from runflat.plan.sync_groups import SyncLayout
from runflat.plan.units import ModelSpec, param_ranges
from runflat.plan.zero import Ownership, ParamHeld
from runflat.train.checkpoint import Progress, check_model, open_checkpoint
from runflat.train.data import sample_hash
from runflat.train.emulate import Pace, step_seconds
from runflat.train.job import DTYPES, Job, hf_config, job_layout, job_ownership, optimizer_settings, state_dtype
from runflat.train.mixture import data_from_json
from runflat.train.shards import ShardCopy, checkpoint_tensors
from runflat.train.step import Scalars, StepResult, Trainer, accumulate, apply, backward, barrier
from runflat.train.timing import StepTimes, Timeline
from runflat.train.updater import Updater

Held = dict[str, tuple[int, ...]]
WARM_UP_TOKENS = 16


@dataclass
class Final:
    """Gradients of `step` that are final on this device but not yet applied, with what it brings to the barrier."""

    step: int
    loss_sum: float
    num_targets: int


class Engine:
    """The training state of one device.

    `progress` is where it stands; `final` is set between the end of gradient sync and the commit of a step. With
    `zero1` `gathered` is false between the commit and the arrival of the weights that other devices have updated.
    """

    def __init__(self, job: Job, device: torch.device, phase: Callable[[str], None], timeline: Timeline | None = None):
        """Read the model's rules; nothing of its size is allocated. `phase` is told each part of a step."""
        self.timeline = timeline
        self.times = StepTimes(phase, timeline)
        self.job = job
        self.device = device
        self.dtype = state_dtype(job.train.dtype)
        self._compute_dtype = DTYPES[job.train.dtype]
        self.corpus = data_from_json(job.corpus) if job.corpus else None
        self.settings = optimizer_settings(job.train)
        self.progress = Progress(0, 0, 0, "")
        self.final: Final | None = None
        self._computed: Final | None = None
        self._phase = self.times.enter
        self._meta = build_meta_model(hf_config(job.hf_config), self._compute_dtype, job.attention)
        self.rules: ShardingRules = read_rules(self._meta, job.tp_full, sequence_parallel=job.train.sequence_parallel)
        self.sharded: ShardedModel | None = None
        self.zero1 = job.train.optimizer == "zero1"
        self.gathered = True
        self._ownership: tuple[Plan, Ownership] | None = None
        self.plan: Plan | None = None
        self.place: Place | None = None
        self._comms: Comms | None = None
        self._entered = False
        self.pace = Pace(sleep=self._rest) if job.emulated else None
        self._slow = (1.0, 0.0)
        self._speed = 1.0
        self._begun = time.monotonic()

    @property
    def spec(self) -> ModelSpec:
        """The model, as planning sees it."""
        return self.rules.spec

    # ---- from plan to plan

    def layout(self, plan: Plan) -> SyncLayout:
        """Buckets and sync groups of `plan`."""
        return job_layout(self.job, self.spec, plan)

    def ownership(self, plan: Plan) -> Ownership:
        """Who keeps which optimizer state under `plan`, with `zero1`."""
        if self._ownership is None or self._ownership[0] != plan:
            self._ownership = plan, job_ownership(self.job, self.spec, plan)
        return self._ownership[1]

    def _owned(self) -> Ownership | None:
        assert self.plan is not None
        return self.ownership(self.plan) if self.zero1 else None

    @property
    def kept(self) -> ParamHeld:
        """With `zero1` the units of each parameter of which this device has moments."""
        return self._updater.kept or {}

    def state(self) -> ShardState:
        """What this device has: weights of all its units, moments of these or, with `zero1`, of the kept pieces only.

        The tensors are the live ones, not copies.
        """
        return self._updater.state(self.progress.optimizer_step)

    def kept_state(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """With `zero1` weights and moments of the kept pieces only, laid out alike; the weights are copies."""
        return self._updater.kept_state()

    def build(self, plan: Plan, place: Place, checkpoint: str | None) -> None:
        """Allocate the shard that `place` holds under `plan`, from `checkpoint`, a model directory, or the seed."""
        held = plan.replica(place[0]).held(self.spec.kinds, place[1])
        saved = open_checkpoint(Path(checkpoint)) if checkpoint else None
        if saved is not None:
            check_model(saved, self.spec)
        source = self._source(checkpoint)
        if self.sharded is None:
            self._materialize(held, source)
        else:
            self.sharded.hold(held, self._read(source, held))
        self._update(NOTHING, self.ownership(plan).kept(place) if self.zero1 else None)
        self.progress = Progress(0, 0, 0, "")
        if saved is not None:
            self._updater.load(saved)
            self.progress = saved.progress
        self.final = None

    def _materialize(self, held: Held, source: WeightSource) -> None:
        nobody = (0, 0)
        alone = Group(0, "alone", (nobody,), nobody, None, Network())
        self.sharded = ShardedModel(
            self._meta, self.rules, held, alone, source, self.dtype, self.device, self._compute_dtype
        )
        self.sharded.model.train()
        if self.job.train.lift_casts:
            lift_forward(self.sharded.model)
        if self.job.train.activation_checkpointing:
            recompute_layers(self.sharded.model, self.job.train.lift_casts, self.sharded.tp.keep)

    def warm_up(self) -> None:
        """Read one sequence, compute once on the first unit of each kind: a job's step must not pay for a first use."""
        if self.corpus is not None:
            self.corpus.train_sequences(0, 1)
        held: Held = {kind.name: (0,) for kind in self.spec.kinds}
        nothing = torch.zeros((), dtype=self.dtype)
        self._materialize(held, lambda param, ranges: cut(nothing.expand(param.shape), param, ranges).contiguous())
        assert self.sharded is not None
        tokens = torch.zeros((1, min(self.job.seq_len, WARM_UP_TOKENS)), dtype=torch.long, device=self.device)
        self.sharded.model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        build_optimizer(self.spec, self.params, self.settings).step()

    def _read(self, source: WeightSource, held: Held) -> dict[str, nn.Parameter]:
        return {
            param.name: nn.Parameter(
                source(param, param_ranges(self.spec, param, held)).to(self.device, self.dtype).contiguous()
            )
            for param in self.spec.params
        }

    def _source(self, checkpoint: str | None) -> WeightSource:
        if checkpoint:
            return checkpoint_tensors(open_checkpoint(Path(checkpoint)), "weight")
        if self.job.from_dir:
            return safetensors_weights(Path(self.job.from_dir))
        return initial_weights(self._meta, self.job.train.seed)

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """This device's shard, by full-model name."""
        assert self.sharded is not None
        return self.sharded.params

    @property
    def held(self) -> Held:
        """Units per kind that the shard consists of."""
        assert self.sharded is not None
        return self.sharded.held

    def adopt(self, held: Held, state: ShardState, kept: ParamHeld | None = None) -> None:
        """Take over a shard of other units (the first one, on a newcomer), with its optimizer state: that of `kept`."""
        weights = state.tensors["weight"]
        if self.sharded is None:
            self._materialize(held, lambda param, ranges: weights[param.name])
        else:
            self.sharded.hold(held, {name: nn.Parameter(tensor) for name, tensor in weights.items()})
        self._update(state, kept if self.zero1 else None)

    def _update(self, state: ShardState, kept: ParamHeld | None) -> None:
        self._updater = Updater(self.spec, self.params, self.held, self.settings, kept, state)
        self.optimizer = self._updater.adamw
        self.gathered = True

    def restore_settings(self) -> None:
        """Take learning rate and the like from the job again: a copy of them may have been damaged."""
        self.settings = optimizer_settings(self.job.train)

    @property
    def comms(self) -> Comms:
        """The groups in force."""
        assert self._comms is not None
        return self._comms

    def join(self, comms: Comms) -> None:
        """From now on `comms` are the groups in force, though no step is run over them yet."""
        self._comms = comms

    def enter(self, plan: Plan, place: Place, comms: Comms) -> None:
        """Work under `plan` from now on, over the groups of `comms`."""
        assert self.sharded is not None
        self.plan, self.place = plan, place
        self.sharded.tp.group = comms.tp
        self._comms = comms
        self._trainer = Trainer(
            self.sharded.model,
            self.params,
            self._updater.sync(plan, self.layout(plan), self._owned(), place, comms, self.sharded.sources),
            comms,
            self.optimizer,
            self.settings,
            self.reports,
            self._phase,
        )
        self._entered = True
        if self.pace is not None:
            self.pace.rebase(self._declared_step_s(plan, place))

    def _declared_step_s(self, plan: Plan, place: Place) -> float:
        assert self.job.emulated is not None
        layout, micro_batch = self.layout(plan), self.job.train.micro_batch
        model = replace(self.job.emulated, speed=self.job.emulated.speed * self._speed)
        owned = self.ownership(plan) if self.zero1 else None
        return step_seconds(model, self.spec, plan, layout, place, self.job.seq_len, micro_batch, owned)

    def run_at(self, speed: float) -> None:
        """From the next step on an emulated device is `speed` times as fast as in health: its power limit changed."""
        self._speed = speed
        if self.pace is not None and self._entered:
            assert self.plan is not None
            assert self.place is not None
            self.pace.step_s = self._declared_step_s(self.plan, self.place)

    def slow_down(self, factor: float, duration_s: float) -> None:
        """From now on, for `duration_s`, computation takes `factor` times as long."""
        self._slow = (factor, time.monotonic() + duration_s)

    def _drag(self) -> None:
        """The computation of a step has ended: take as long as an emulated or a slowed device would."""
        factor = self._slow[0] if time.monotonic() < self._slow[1] else 1.0
        if self.pace is not None:
            self.pace.computed(factor)
            self.pace.hold(self.comms.tp)
        elif factor > 1:
            self._rest((factor - 1) * (time.monotonic() - self._begun))

    def _rest(self, seconds: float) -> None:
        """Sleep in place of a computation; as that would, it ends when the generation is left."""
        self.comms.network.interrupt.rest(self.comms.generation, seconds)

    def leave(self) -> list[Any]:
        """Stop using the groups in force; returns them and what a collective in flight may still write to.

        The caller keeps these alive until the groups are dropped.
        """
        kept: list[Any] = [self._comms] if self._comms is not None else []
        if self._entered:
            self._trainer.sync.close()
            kept.append(self._trainer.sync)
        self._comms, self._entered = None, False
        return kept

    # ---- a step

    @property
    def reports(self) -> bool:
        """Whether this device speaks for its replica: its lowest live slot."""
        assert self.plan is not None
        assert self.place is not None
        return self.place[1] == self.plan.replica(self.place[0]).live_slots[0]

    def samples(self) -> tuple[int, int]:
        """(first sample, count) of this replica's share of the next step, which begins anew."""
        self.final = self._computed = None
        self._begun = time.monotonic()
        self.times.begin("data")
        assert self.plan is not None
        assert self.place is not None
        before = sum(r.num_sequences for r in self.plan.replicas if r.replica < self.place[0])
        return self.progress.num_samples + before, self.plan.replica(self.place[0]).num_sequences

    def compute(self) -> None:
        """Forward and backward of the next step on the corpus; the exchange is under way when it returns."""
        assert self.corpus is not None
        first, count = self.samples()
        parts = self.micro_batches(torch.from_numpy(self.corpus.train_sequences(first, count)))
        self._computed = Final(self.progress.step, *backward(self._trainer, parts, parts))
        self._drag()

    def backward(self, loss: torch.Tensor, num_targets: int, last: bool) -> None:
        """Gradients of one micro-batch's loss sum; the first clears older ones, the `last` starts the exchange."""
        before = self._computed or Final(self.progress.step, 0.0, 0)
        loss_sum = before.loss_sum + accumulate(self._trainer, loss, first=self._computed is None, last=last)
        self._computed = Final(before.step, loss_sum, before.num_targets + num_targets)
        if last:
            self._drag()

    def finish(self) -> None:
        """Wait for the exchange: gradients of the next step are final on this device afterwards."""
        self._phase("sync")
        self._trainer.sync.finish()
        self.final, self._computed = self._computed, None

    def barrier(self, stop: bool, switch: bool) -> Scalars:
        """The step's all-reduce: its result proves that all devices have final gradients."""
        assert self.final is not None
        self._phase("commit")
        if self.pace is not None:
            self.pace.meet(self.comms)
        return barrier(self._trainer, self.final.loss_sum, self.final.num_targets, stop, switch)

    def commit(self, scalars: Scalars) -> StepResult:
        """Apply the step whose gradients are final, with the barrier's `scalars` (a peer's, when rolling forward).

        With `zero1` only the kept pieces are updated: `gather` brings the rest.
        """
        assert self.final is not None
        assert self.plan is not None
        assert self.final.step == self.progress.step
        assert self.sharded is not None
        self._phase("update")
        step, batch = self.progress.step, self.plan.num_sequences
        result = apply(self.optimizer, self.settings, scalars, step)
        self.gathered = not self.zero1
        if self.gathered:
            self.sharded.refresh()
        used = range(self.progress.num_samples, self.progress.num_samples + batch)
        self.progress = Progress(
            step=step + 1,
            optimizer_step=self.progress.optimizer_step + (not result.skipped),
            num_samples=self.progress.num_samples + batch,
            sample_hash=self._sample_hash(step, used),
        )
        self.final = None
        return result

    def gather(self) -> None:
        """After a commit, with `zero1`: bring the weights up to date that other devices keep.

        Raises:
            CommsError: a member was lost; the weights of this device's kept pieces are those of the step, the rest not.
        """
        if not self.gathered:
            assert self.sharded is not None
            self._trainer.sync.gather()
            self.sharded.refresh()
            self.gathered = True

    def _sample_hash(self, step: int, used: range) -> str:
        if self.corpus is not None:
            return self.corpus.sample_hash(self.progress.sample_hash, step, used)
        return sample_hash(self.progress.sample_hash, step, [(number, number) for number in used])

    def micro_batches(self, sequences: torch.Tensor) -> list[torch.Tensor]:
        """`sequences` [B, T] in pieces of at most the configured micro-batch, on this worker's device."""
        sizes = micro_batches(len(sequences), self.job.train.micro_batch)
        return [part.to(self.device) for part in sequences.split(list(sizes))]

    # ---- beside training

    @property
    def num_holdout(self) -> int:
        """Held-out sequences; none where the loop brings its own data."""
        return self.corpus.num_holdout if self.corpus else 0

    def shard_copy(self) -> ShardCopy:
        """A copy of this device's part of a checkpoint of the state as of `progress`."""
        assert self.plan is not None
        assert self.place is not None
        return self._updater.copy(self.plan, self.place, self.progress.step, self._owned())


def progress_json(progress: Progress) -> dict[str, Any]:
    """JSON form of where a run stands."""
    return asdict(progress)
