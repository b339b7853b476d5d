"""Ranks as threads under a plan, with everything that a test may want to look at."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from runflat.check.in_memory import InMemoryNetwork
from runflat.check.ranks import run_ranks
from runflat.check.small import small_batch
from runflat.check.verify import BUCKET_BYTES, replica_batches
from runflat.parallel.casts import recompute_layers
from runflat.parallel.comms import Comms, Group, Network
from runflat.parallel.optimizer import OptimizerSettings
from runflat.parallel.shard import ShardedModel, initial_weights
from runflat.parallel.tp_plan import ShardingRules, build_meta_model, read_rules
from runflat.plan.plan import Place, Plan
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.sync_groups import Sync, SyncLayout, sync_layout
from runflat.plan.zero import OptimizerMode, Ownership, ownership
from runflat.train.step import Trainer, train_step
from runflat.train.timing import StepTimes, Timeline
from runflat.train.updater import Updater

Collective = tuple[str, int, int]


@dataclass(frozen=True)
class Job:
    """What to run: `num_steps` of the model under a layout; tokens are seeded."""

    config: PreTrainedConfig
    tp: int = 4
    num_replicas: int = 2
    dead: tuple[Place, ...] = ()
    num_sequences: int = 5
    micro_batch: int = 2
    seq_len: int = 16
    num_steps: int = 1
    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype | None = None
    recompute: bool = False
    bucket_bytes: int = BUCKET_BYTES
    in_memory: bool = True
    sync: Sync = "direct"
    sequence_parallel: bool = False
    optimizer: OptimizerMode = "replicated"


@dataclass
class RankState:
    """One device after the run: its collectives (operation, payload bytes, members), parameters and moments.

    Moments are those of all that it holds or, with zero1, of what it keeps.
    """

    collectives: list[Collective] = field(default_factory=list)
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    inside: Any = None


@dataclass(frozen=True)
class Ran:
    """A finished job."""

    rules: ShardingRules
    plan: Plan
    layout: SyncLayout
    ranks: Mapping[Place, RankState]
    owned: Ownership | None


Around = Callable[[PreTrainedModel, Callable[[], None]], Any]


def run_job(job: Job, around: Around | None = None, timelines: Mapping[Place, Timeline] | None = None) -> Ran:
    """Returns the job's end; `around(model, steps)` may run the steps in its own way on each device."""
    torch.set_num_threads(1)
    meta = build_meta_model(copy.deepcopy(job.config), job.compute_dtype or job.dtype, "eager")
    rules = read_rules(meta, job.tp, sequence_parallel=job.sequence_parallel)
    devices = live_devices(job.tp, job.num_replicas, job.dead)
    plan = build_plan(rules.spec, devices, job.tp, job.num_sequences, job.seq_len)
    layout = sync_layout(rules.spec, plan, job.bucket_bytes, job.dtype.itemsize, job.sync)
    batch = small_batch(job.config.vocab_size, job.config.pad_token_id, job.num_sequences, job.seq_len, 1)
    settings = OptimizerSettings(lr=1e-2, schedule="constant", total_steps=job.num_steps)
    owned = ownership(rules.spec, plan, layout) if job.optimizer == "zero1" else None
    states = {place: RankState() for place in plan.places}

    def work(place: Place, comms: Comms) -> None:
        replica = plan.replica(place[0])
        held = replica.held(rules.spec.kinds, place[1])
        model = copy.deepcopy(meta)
        source = initial_weights(model, seed=0)
        cpu = torch.device("cpu")
        sharded = ShardedModel(model, rules, held, comms.tp, source, job.dtype, cpu, job.compute_dtype)
        params = sharded.params
        model.train()
        if job.recompute:
            recompute_layers(model, keep=sharded.tp.keep)
        updater = Updater(rules.spec, params, held, settings, owned.kept(place) if owned else None)
        reports = place[1] == replica.live_slots[0]
        sync = updater.sync(plan, layout, owned, place, comms, sharded.sources)
        trainer = Trainer(model, params, sync, comms, updater.adamw, settings, reports, refresh=sharded.refresh)
        times = StepTimes(lambda name: None, timelines[place] if timelines else None)
        trainer = replace(trainer, phase=times.enter)
        own = replica_batches(plan, place, batch, job.micro_batch)

        def steps() -> None:
            for step in range(job.num_steps):
                if timelines:
                    timelines[place].step()
                times.begin("data")
                train_step(trainer, [b.tokens for b in own], [b.labels for b in own], step)
                times.end()

        states[place].inside = around(model, steps) if around else steps()
        tensors = updater.state(job.num_steps).tensors
        states[place].tensors = {"weights" if kind == "weight" else kind: dict(of) for kind, of in tensors.items()}

    def network_of(place: Place) -> Network:
        launched = timelines[place].launched if timelines else None
        return Network(recorder=lambda *collective: states[place].collectives.append(collective), launched=launched)

    run_ranks(plan, layout, work, network_of, in_memory=job.in_memory)
    return Ran(rules, plan, layout, states, owned)


def run_group(size: int, work: Callable[[int, Group], Any]) -> list[Any]:
    """Returns what `work(rank, group)` returned on each of `size` threads that form one in-memory group."""
    network = InMemoryNetwork()
    members = tuple((0, slot) for slot in range(size))
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def rank(index: int) -> None:
        try:
            group = Group(0, "tp", members, members[index], None, Network(backend=network.backend))
            results[index] = work(index, group)
        except BaseException as error:  # whatever it is, it must reach the test
            errors.append(error)
            network.fail("another rank has failed")

    threads = [threading.Thread(target=rank, args=(index,), daemon=True) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@pytest.fixture(scope="session")
def jobs() -> tuple[type[Job], Callable[..., Ran]]:
    """Returns (Job, run_job)."""
    return Job, run_job


@pytest.fixture(scope="session")
def in_group() -> Callable[[int, Callable[[int, Group], Any]], list[Any]]:
    """Returns `run_group`."""
    return run_group
