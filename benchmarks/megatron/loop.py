"""A loop of one's own under runflat that also does the same training by hand and with DTensor, step by step in turn.

All three run in the same worker processes, so that whatever else the machine does meets them alike.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent))  # workers import this file by its path
from dtensor import DTensorTrainer
from plain import Llama, Optimizer, PlainTrainer, Shape

from runflat.api import Worker
from runflat.parallel.shard import initial_weights
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.train.job import Job, hf_config

System = Callable[[list[torch.Tensor]], float]
"""A step on a replica's micro-batches; returns its mean loss."""
SYSTEMS = ("runflat", "by hand", "DTensor")


@dataclass
class Recorded:
    """What one worker has measured: seconds and mean loss of each step, by system."""

    seconds: dict[str, list[float]]
    losses: dict[str, list[float]]


def tokens_of(sample: int, vocab_size: int, seq_len: int) -> torch.Tensor:
    """The tokens of a sample: few distinct sequences, so that there is something to learn."""
    generator = torch.Generator().manual_seed(sample % 16)
    return torch.randint(0, vocab_size, (seq_len,), generator=generator)


def loop(worker: Worker) -> None:
    """Train three times over, in turn; leaves its measurements in the run's folder."""
    job, device = worker.job, worker.device_id
    replica, slot = (int(part) for part in device.split(":"))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # read by torch when groups form
    rank, size = replica * job.tp_full + slot, job.replicas * job.tp_full
    store = dist.FileStore(str(Path(job.run) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    rivals = _rivals(job, slot)
    mine = Recorded({name: [] for name in SYSTEMS}, {name: [] for name in SYSTEMS})
    steps = worker.steps()
    systems: dict[str, System] = {"runflat": lambda batches: _own_step(steps, batches), **rivals}
    for step in range(job.train.steps):
        share = job.train.global_batch // job.replicas
        first = step * job.train.global_batch + replica * share
        sequences = torch.stack(
            [tokens_of(sample, job.hf_config["vocab_size"], job.seq_len) for sample in range(first, first + share)]
        )
        batches = list(sequences.split(job.train.micro_batch))
        turn = step % len(SYSTEMS)
        for name in (*SYSTEMS[turn:], *SYSTEMS[:turn]):
            dist.barrier()
            began = time.perf_counter()
            loss = systems[name](batches)
            mine.seconds[name].append(time.perf_counter() - began)
            mine.losses[name].append(loss)
    for _ in steps:
        pass
    (Path(job.run) / f"measured-{replica}-{slot}.json").write_text(json.dumps(asdict(mine)))


def _own_step(steps: Iterator[Any], batches: list[torch.Tensor]) -> float:
    """A step under runflat, with all that it does between two steps; returns its mean loss."""
    with next(steps) as step:
        for index, batch in enumerate(batches):
            loss = step.model(input_ids=batch, labels=batch, use_cache=False).loss
            step.backward(loss, batch[:, 1:].numel(), last=index == len(batches) - 1)
    assert step.scalars is not None
    return float(step.scalars.loss_sum / step.scalars.num_targets)


def _rivals(job: Job, slot: int) -> dict[str, System]:
    """The steps of the other systems, from runflat's own first weights."""
    config = hf_config(job.hf_config)
    meta = build_meta_model(config, torch.float32, "sdpa")
    source = initial_weights(meta, job.train.seed)
    params = read_rules(meta, job.tp_full).spec.params
    weights = {param.name: source(param, ((0, param.shape[param.dim or 0]),)) for param in params}
    mesh = init_device_mesh("cpu", (job.replicas, job.tp_full), mesh_dim_names=("dp", "tp"))
    settings = Optimizer(job.train.lr, job.train.weight_decay, job.train.clip_norm)
    shape = Shape(
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"],
        tp=job.tp_full,
        slot=slot,
        dp=job.replicas,
    )
    num_tokens, bucket_bytes = job.train.global_batch * (job.seq_len - 1), int(job.train.bucket_mb * (1 << 20))
    llama = Llama(shape, weights, mesh["tp"].get_group())
    by_hand = PlainTrainer(llama, bucket_bytes, settings, mesh["dp"].get_group(), num_tokens)
    dtensor = DTensorTrainer(config, weights, mesh, bucket_bytes, settings, num_tokens)
    return {"by hand": by_hand.step, "DTensor": dtensor.step}
