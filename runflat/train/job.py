"""What a worker is told at its start, and what follows from it: configuration, optimizer settings, device."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from transformers import AutoConfig, PreTrainedConfig

from runflat.config import TrainSection
from runflat.errors import ConfigError
from runflat.parallel.optimizer import OptimizerSettings
from runflat.plan.plan import Plan
from runflat.plan.sync_groups import SyncLayout, sync_layout
from runflat.plan.units import ModelSpec
from runflat.plan.zero import Ownership, ownership
from runflat.train.device_clock import DeviceClock
from runflat.train.emulate import DeviceModel
from runflat.train.timing import FOLDER, Timeline

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
"""What layers compute in, by `train.dtype`."""


def state_dtype(name: str) -> torch.dtype:
    """Type of weights, gradients and optimizer state where layers compute in `name`: never below float32."""
    return torch.float64 if name == "float64" else torch.float32


class Job(BaseModel):
    """All that a worker is told at its start, as JSON: model, data, settings, and where its weights come from."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    hf_config: dict[str, Any]
    attention: str | None
    tp_full: int
    replicas: int = 1
    seq_len: int
    corpus: dict[str, Any] | None
    train: TrainSection
    run: str
    from_dir: str | None = None
    emulated: DeviceModel | None = None
    memory_bytes: int | None = None
    inject: list[dict[str, Any]] = []
    loop: str | None = None

    def with_fault(self, event: Mapping[str, Any]) -> Job:
        """The job of workers that are to suffer one more fault."""
        return self.model_copy(update={"inject": [*self.inject, dict(event)]})

    def without_fault(self, event: Mapping[str, Any]) -> Job:
        """The job of workers after a fault has struck."""
        return self.model_copy(update={"inject": [row for row in self.inject if row != dict(event)]})


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


def job_layout(job: Job, spec: ModelSpec, plan: Plan) -> SyncLayout:
    """Buckets and sync groups of `plan`."""
    bucket_bytes = int(job.train.bucket_mb * (1 << 20))
    return sync_layout(spec, plan, bucket_bytes, state_dtype(job.train.dtype).itemsize, job.train.sync)


def job_ownership(job: Job, spec: ModelSpec, plan: Plan) -> Ownership:
    """Who keeps which optimizer state under `plan`; the same on every device."""
    return ownership(spec, plan, job_layout(job, spec, plan))


def timeline_of(job: Job, device_id: str, device: torch.device) -> Timeline | None:
    """What records steps of `device_id`, if the job asks for that."""
    if not job.train.profile:
        return None
    path = Path(job.run) / FOLDER / f"{device_id.replace(':', '-')}.json"
    mark = DeviceClock(time.monotonic).mark if device.type == "cuda" else None
    return Timeline(path, device_id, job.train.profile, mark=mark)


def worker_device(index: int, emulated: bool = False) -> torch.device:
    """The GPU of the worker with this number on its machine, where there are GPUs; else, or if `emulated`, the CPU.

    Raises:
        ConfigError: there is no such GPU.
    """
    if emulated or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", gpu_number(index, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def gpu_number(index: int, num_gpus: int) -> int:
    """Which of `num_gpus` that a process sees is that of the machine's worker `index`.

    Where it sees one, that is its own: Slurm and Kubernetes show each process no other.

    Raises:
        ConfigError: there are several, but fewer than workers.
    """
    if index >= num_gpus > 1:
        raise ConfigError(
            f"worker {index} of this machine has no GPU: torch sees {num_gpus}. Start at most {num_gpus} workers here "
            f"(--layout.tp, --layout.replicas), or have each see its own one (CUDA_VISIBLE_DEVICES)."
        )
    return index if index < num_gpus else 0


def peak_bytes(device: torch.device) -> int:
    """Most memory used so far: of a GPU by tensors, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
