"""A job with real AdamW steps whose devices feed a newcomer over real sockets."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from runflat.check.small import proof_config
from runflat.elastic.feed import Feeder, Link, LiveState
from runflat.elastic.frames import FeedLimits, Hello
from runflat.elastic.receive import Receiver, Target
from runflat.parallel.move import Slab, read_state, replicated_slabs, unit_slabs
from runflat.parallel.optimizer import OptimizerSettings, build_optimizer, learning_rate
from runflat.parallel.shard import cut
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.plan import Plan
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.transfers import transfers
from runflat.plan.units import TENSORS, ModelSpec, param_ranges

Params = Mapping[str, nn.Parameter]
NEWCOMER = "1:2"
TOKEN = "sesame"
WAIT_S = 20.0
SETTINGS = OptimizerSettings(lr=1e-2, total_steps=100)
SMALL_PIECES = FeedLimits(piece_bytes=20_000, timeout_s=WAIT_S)


@dataclass
class Job:
    """Two replicas of TP 4 of which 1:2 is away, as the sources of its units, and the model in one piece."""

    spec: ModelSpec
    old: Plan
    new: Plan
    dtype: torch.dtype
    generator: torch.Generator
    whole: dict[str, nn.Parameter] = field(default_factory=dict)
    committed: int = 0
    applied: int = 0

    def __post_init__(self) -> None:
        self.optimizers: dict[str, torch.optim.AdamW] = {}
        self.states: dict[str, LiveState] = {}
        self.feeders: dict[str, Feeder] = {}
        self.slabs: dict[str, list[Slab]] = {}
        self.num_bytes: dict[str, int] = {}
        full = {p.name: torch.randn(p.shape, generator=self.generator).to(self.dtype) for p in self.spec.params}
        self.whole = {name: nn.Parameter(tensor) for name, tensor in full.items()}
        self.optimizer = build_optimizer(self.spec, self.whole, SETTINGS)
        per_element = len(TENSORS) * self.dtype.itemsize
        for move in transfers(self.spec, self.old, self.new, per_element):
            if move.target == NEWCOMER:
                first = [] if self.slabs else list(replicated_slabs(self.spec))
                self.num_bytes.setdefault(move.source, self.spec.replicated_numel * per_element if first else 0)
                self.num_bytes[move.source] += move.num_bytes
                self.slabs.setdefault(move.source, first).extend(
                    unit_slabs(self.spec, move.kind, move.start, move.stop)
                )
        for device in self.slabs:
            held = self.held(self.old, device)
            params = {name: nn.Parameter(tensor) for name, tensor in self.cut(full, held).items()}
            optimizer = build_optimizer(self.spec, params, SETTINGS)
            self.states[device] = LiveState(self.spec, held, params, optimizer, threading.Lock())

    def held(self, plan: Plan, device: str) -> dict[str, tuple[int, ...]]:
        place = plan.place(device)
        assert place is not None
        return plan.replica(place[0]).held(self.spec.kinds, place[1])

    def cut(self, full: Mapping[str, torch.Tensor], held: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        return {p.name: cut(full[p.name], p, param_ranges(self.spec, p, held)) for p in self.spec.params}

    def step(self, skipped: bool = False) -> None:
        """Commits a step with random gradients on all devices and on the whole model."""
        grads = {name: torch.randn(p.shape, generator=self.generator).to(self.dtype) for name, p in self.whole.items()}
        lr = learning_rate(SETTINGS, self.committed)
        self.committed += 1
        self.applied += not skipped
        if not skipped:
            update(self.whole, self.optimizer, grads, lr)
        for device, state in self.states.items():
            local = self.cut(grads, state.held)
            with state.lock:
                if not skipped:
                    update(state.params, state.optimizer, local, lr)
                if device in self.feeders:
                    self.feeders[device].after_commit(self.committed, self.applied, lr, skipped)
            for param in state.params.values():  # the next step's gradients overwrite these
                if param.grad is not None:
                    param.grad.fill_(torch.nan)

    def feed(self, device: str, receiver: Receiver, link: Link | None = None, **options: Any) -> Feeder:
        """Starts the feeder of a source."""
        hello = Hello(source=device, token=TOKEN)
        limits = options.pop("limits", SMALL_PIECES)
        state = self.states[device]
        with state.lock:
            feeder = Feeder(
                state,
                self.slabs[device],
                hello,
                receiver.address,
                self.committed,
                self.applied,
                link=link,
                limits=limits,
                **options,
            )
        self.feeders[device] = feeder
        return feeder

    def flush(self, receiver: Receiver) -> None:
        """Ends at a boundary: nothing is committed until everything is there."""
        for feeder in self.feeders.values():
            feeder.flush(self.committed, WAIT_S)
        receiver.wait_for(self.committed, WAIT_S)

    def assert_right(self, receiver: Receiver) -> None:
        """Checks the newcomer's state bit for bit against the model in one piece."""
        state, committed = receiver.state()
        assert (committed, state.optimizer_step) == (self.committed, self.applied)
        expected = read_state(self.whole, self.optimizer)
        assert state.optimizer_step == expected.optimizer_step
        for kind in TENSORS:
            wanted = self.cut(expected.tensors[kind], self.held(self.new, NEWCOMER))
            assert list(state.tensors[kind]) == list(wanted)
            for name, tensor in wanted.items():
                assert torch.equal(state.tensors[kind][name], tensor), (kind, name)


def update(params: Params, optimizer: torch.optim.Optimizer, grads: Mapping[str, torch.Tensor], lr: float) -> None:
    """Applies one step as training does."""
    for name, param in params.items():
        param.grad = grads[name].clone()
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


@pytest.fixture
def make_job() -> Callable[..., Job]:
    """Returns make_job(dtype): a job with fused weights, grouped heads and sizes that divide by nothing."""

    def make(dtype: torch.dtype = torch.float32) -> Job:
        config = proof_config("phi3", intermediate_size=77, vocab_size=503, num_hidden_layers=1)
        spec = read_rules(build_meta_model(config, torch.float32), 4).spec
        old = build_plan(spec, live_devices(4, 2, ((1, 2),)), 4, 8, 16)
        new = build_plan(spec, live_devices(4, 2, ()), 4, 8, 16, old, 1)
        return Job(spec, old, new, dtype, torch.Generator().manual_seed(0))

    return make


@pytest.fixture
def log() -> list[str]:
    """Returns the lines for people."""
    return []


@pytest.fixture
def listen(log: list[str]) -> Iterator[Callable[..., Receiver]]:
    """Returns listen(job, on_fed): a receiver for the newcomer. At the end no thread or descriptor may be left."""
    made: list[tuple[Job, Receiver]] = []
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))

    def start(job: Job, on_fed: Callable[[int], object] = lambda committed: None, **options: Any) -> Receiver:
        held = job.held(job.new, NEWCOMER)
        target = Target(job.spec, held, SETTINGS, job.dtype, torch.device("cpu"))
        limits = options.pop("limits", SMALL_PIECES)
        receiver = Receiver(target, TOKEN, on_fed, limits=limits, log=log.append)
        made.append((job, receiver))
        return receiver

    yield start
    for job, receiver in made:
        for feeder in job.feeders.values():
            feeder.close()
            feeder.close()
        receiver.close()
        receiver.close()
    assert set(threading.enumerate()) == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
