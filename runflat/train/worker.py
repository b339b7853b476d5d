"""The life of one device under one plan: build its shard, train, evaluate, save; in messages to its parent."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError
from torch import nn
from torch.distributed import Store
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from runflat.config import TrainSection
from runflat.parallel.comms import Comms, Network
from runflat.parallel.grad_sync import GradSync
from runflat.parallel.loss import num_targets
from runflat.parallel.optimizer import OptimizerSettings, build_optimizer
from runflat.parallel.shard import WeightSource, initial_weights, safetensors_weights, shard_model
from runflat.parallel.tp_plan import ShardingRules, build_meta_model, read_rules
from runflat.plan.batch import micro_batches
from runflat.plan.plan import Place, Plan, plan_from_json
from runflat.plan.sync_groups import sync_layout
from runflat.plan.units import param_ranges
from runflat.train.checkpoint import Progress, check_model, open_checkpoint, shard_to_json
from runflat.train.data import Corpus
from runflat.train.shards import checkpoint_tensors, load_optimizer_state, write_shard
from runflat.train.step import StepResult, Trainer, train_step

DTYPES = {"float32": torch.float32, "float64": torch.float64}
HOST = "127.0.0.1"


class Job(BaseModel):
    """All that a worker is told, as JSON: model, plan, data, settings, and where its weights come from."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    hf_config: dict[str, Any]
    attention: str | None
    plan: str
    corpus: dict[str, Any]
    train: TrainSection
    run: str
    from_dir: str | None = None
    checkpoint: str | None = None


class Link(Protocol):
    """A worker's way to its parent."""

    def send(self, message: Mapping[str, Any]) -> None:
        """Deliver one JSON-ready message."""


def hf_config(fields: Mapping[str, Any]) -> PreTrainedConfig:
    """The transformers configuration with the given fields, `model_type` among them."""
    rest = {key: value for key, value in fields.items() if key != "model_type"}
    config: PreTrainedConfig = AutoConfig.for_model(fields["model_type"], **rest)
    return config


def optimizer_settings(train: TrainSection) -> OptimizerSettings:
    """Optimizer settings of a configuration; a `clip_norm` of 0 does not clip."""
    return OptimizerSettings(
        lr=train.lr,
        min_lr_ratio=train.min_lr_ratio,
        schedule=train.schedule,
        warmup_steps=train.warmup_steps,
        total_steps=train.steps,
        decay_steps=train.decay_steps,
        weight_decay=train.weight_decay,
        beta1=train.beta1,
        beta2=train.beta2,
        eps=train.eps,
        clip_norm=train.clip_norm or None,
    )


@dataclass
class _State:
    """Where this device stands."""

    step: int
    optimizer_step: int
    num_samples: int
    sample_hash: str


class Worker:
    """One device. `run()` returns when training has ended or a stop was agreed on."""

    def __init__(self, job: Job, device_id: str, store: Store, link: Link, stop: threading.Event):
        """Build model, groups and optimizer; `stop` asks for an end after the step in flight."""
        self.job = job
        self.link = link
        self.stop = stop
        self.plan: Plan = plan_from_json(job.plan)
        place = self.plan.place(device_id)
        assert place is not None
        self.place: Place = place
        self.replica = self.plan.replica(place[0])
        self.reports = place[1] == self.replica.live_slots[0]
        self.corpus = Corpus.from_json(job.corpus)
        self.dtype = DTYPES[job.train.dtype]
        self.device = _device(self.plan.places.index(place))
        self.model: PreTrainedModel = build_meta_model(hf_config(job.hf_config), self.dtype, job.attention)
        self.rules: ShardingRules = read_rules(self.model, self.plan.tp_full)
        self.held = self.replica.held(self.rules.spec.kinds, place[1])
        bucket_bytes = int(job.train.bucket_mb * (1 << 20))
        self.layout = sync_layout(self.rules.spec, self.plan, bucket_bytes, self.dtype.itemsize)
        network = Network(HOST, job.train.timeout_s)
        self.comms = Comms(store, self.plan, self.layout, place, network, self.device.type == "cuda")
        self.trainer, self.state = self._build()

    def _build(self) -> tuple[Trainer, _State]:
        spec = self.rules.spec
        checkpoint = open_checkpoint(Path(self.job.checkpoint)) if self.job.checkpoint else None
        if checkpoint is not None:
            check_model(checkpoint, spec)
        params = shard_model(self.model, self.rules, self.held, self.comms.tp, self._source(), self.dtype, self.device)
        self.model.train()
        settings = optimizer_settings(self.job.train)
        optimizer = build_optimizer(spec, params, settings)
        state = _State(0, 0, 0, "")
        if checkpoint is not None:
            ranges = {param.name: param_ranges(spec, param, self.held) for param in spec.params}
            load_optimizer_state(optimizer, spec, params, ranges, checkpoint)
            progress = checkpoint.progress
            state = _State(**vars(progress))
        sync = GradSync(spec, self.plan, self.layout, self.place, self.comms, params)
        return Trainer(self.model, params, sync, self.comms, optimizer, settings, self.reports), state

    def _source(self) -> WeightSource:
        if self.job.checkpoint:
            return checkpoint_tensors(open_checkpoint(Path(self.job.checkpoint)), "weight")
        if self.job.from_dir:
            return safetensors_weights(Path(self.job.from_dir))
        return initial_weights(self.model, self.job.train.seed)

    def run(self) -> None:
        """Train to the last step, with held-out losses and checkpoints where they are due; then report `done`."""
        train = self.job.train
        self.link.send({"type": "ready", "step": self.state.step, "parameters": self.rules.spec.num_params})
        stopped = False
        while self.state.step < train.steps and not stopped:
            stopped = self._one_step()
            step = self.state.step
            last = stopped or step == train.steps
            if self.corpus.num_holdout and (last or (train.eval_every and step % train.eval_every == 0)):
                self._evaluate()
            if last or (train.checkpoint_every and step % train.checkpoint_every == 0):
                self._save()
        self.link.send({"type": "done", "step": self.state.step, "stopped": stopped})
        self.comms.close()

    def _one_step(self) -> bool:
        """Train one step and report it; returns whether the devices agreed to stop after it."""
        started = time.perf_counter()
        step, batch = self.state.step, self.plan.num_sequences
        first = self.state.num_samples + self._offset()
        count = self.replica.num_sequences
        batches = self._tensors(self.corpus.train_sequences(first, count))
        result = train_step(self.trainer, batches, batches, step, stop=self.stop.is_set())
        used = range(self.state.num_samples, self.state.num_samples + batch)
        self.state.sample_hash = self.corpus.sample_hash(self.state.sample_hash, step, used)
        self.state.num_samples += batch
        self.state.step += 1
        self.state.optimizer_step += not result.skipped
        if self.reports:
            self._report(step, first, count, result, time.perf_counter() - started)
        return result.stop

    def _offset(self) -> int:
        """Sequences of the global batch that replicas before this one take."""
        return sum(r.num_sequences for r in self.plan.replicas if r.replica < self.place[0])

    def _tensors(self, sequences: Any) -> list[torch.Tensor]:
        whole = torch.from_numpy(sequences)
        sizes = micro_batches(len(whole), self.job.train.micro_batch)
        return [part.to(self.device) for part in whole.split(list(sizes))]

    def _report(self, step: int, first: int, count: int, result: StepResult, step_s: float) -> None:
        self.link.send(
            {
                "type": "step",
                "step": step,
                "replica": self.place[0],
                "first_sample": first,
                "num_samples": count,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "lr": result.lr,
                "num_target_tokens": result.num_target_tokens,
                "skipped": result.skipped,
                "compute_s": result.compute_s,
                "sync_s": result.sync_s,
                "step_s": step_s,
            }
        )

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Report the held-out loss in nats per token; each replica computes an equal part of the held-out set."""
        count, index, size = self.corpus.num_holdout, self.plan.replicas.index(self.replica), len(self.plan.replicas)
        start, stop = index * count // size, (index + 1) * count // size
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.model.eval()
        if stop > start:
            for batch in self._tensors(self.corpus.holdout(start, stop - start)):
                loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
                total += torch.tensor([float(loss), num_targets(batch)], dtype=torch.float64, device=self.device)
        self.model.train()
        if not self.reports:
            total.zero_()
        self.comms.world.all_reduce(total)
        if self.reports:
            self.link.send({"type": "holdout", "step": self.state.step, "loss": float(total[0] / total[1])})

    def _save(self) -> None:
        """Write this device's shard and tell the parent, which alone publishes."""
        progress = Progress(**vars(self.state))
        message: dict[str, Any] = {"type": "shard", "progress": vars(progress)}
        params: Mapping[str, nn.Parameter] = self.trainer.params
        try:
            shard = write_shard(
                Path(self.job.run),
                self.rules.spec,
                self.plan,
                self.place,
                progress.step,
                params,
                self.trainer.optimizer,
            )
            message["shard"] = shard_to_json(shard)
        except (OSError, SafetensorError) as error:
            message["error"] = str(error)
        self.link.send(message)


def _device(rank: int) -> torch.device:
    """The GPU of this worker where there are GPUs, else the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")
