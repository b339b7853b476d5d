"""Feeding a newcomer under training: real AdamW steps, real sockets, emulated links on clocks that the test moves."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from runflat.check.clock import ManualClock
from runflat.check.small import proof_config
from runflat.elastic.feed import Feeder, Link, LiveState
from runflat.elastic.frames import FeedError, FeedLimits, Hello
from runflat.elastic.receive import Receiver, Target
from runflat.parallel.move import TENSORS, Slab, read_state, replicated_slabs, unit_slabs
from runflat.parallel.optimizer import OptimizerSettings, build_optimizer, learning_rate
from runflat.parallel.shard import cut
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.plan import Plan
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.transfers import transfers
from runflat.plan.units import ModelSpec, param_ranges

Params = Mapping[str, nn.Parameter]
NEWCOMER = "1:2"
TOKEN = "sesame"
WAIT_S = 20.0
SETTINGS = OptimizerSettings(lr=1e-2, total_steps=100)
SMALL_PIECES = FeedLimits(piece_bytes=20_000, timeout_s=WAIT_S)


def drive(clock: ManualClock, time_s: float, feeder: Feeder) -> None:
    """Lets a feeder send what its link carries until `time_s`."""
    clock.run_until(time_s, lambda: feeder.caught_up or feeder.error is not None)


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


def make_job(dtype: torch.dtype = torch.float32) -> Job:
    """Returns a job with a fused, grouped, tied-to-nothing model whose sizes divide by nothing."""
    config = proof_config("phi3", intermediate_size=77, vocab_size=503, num_hidden_layers=1)
    spec = read_rules(build_meta_model(config, torch.float32), 4).spec
    old = build_plan(spec, live_devices(4, 2, ((1, 2),)), 4, 8, 16)
    new = build_plan(spec, live_devices(4, 2, ()), 4, 8, 16, old, 1)
    return Job(spec, old, new, dtype, torch.Generator().manual_seed(0))


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


Listen = Callable[..., Receiver]


def flush(job: Job, receiver: Receiver) -> None:
    """Ends at a boundary: nothing is committed until everything is there."""
    for feeder in job.feeders.values():
        feeder.flush(job.committed, WAIT_S)
    receiver.wait_for(job.committed, WAIT_S)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_before", [0, 3])
def test_training_goes_on(listen: Listen, dtype: torch.dtype, num_before: int) -> None:
    """Catches torn pieces, a gradient lost or used twice, another rate, decay or step count, a skipped step."""
    job = make_job(dtype)
    assert len(job.slabs) > 1
    for _ in range(num_before):
        job.step()
    fed: list[int] = []
    receiver = listen(job, fed.append)
    clocks = {device: ManualClock() for device in job.slabs}
    for device, clock in clocks.items():
        # A copy at the boundary would take two steps; the feed needs a few more, as gradients share the link with it.
        rate = job.num_bytes[device] / 1.9
        job.feed(device, receiver, Link(rate, clock.clock, clock.sleep))
    for step in range(1, 12):
        for device, clock in clocks.items():
            drive(clock, float(step), job.feeders[device])
        if step == 2:
            assert not fed
            assert all(0 < f.progress.num_claimed < f.progress.num_pieces for f in job.feeders.values())
        job.step(skipped=step in (3, 9))
    assert all(f.progress.num_given_up == 0 and not f.progress.behind for f in job.feeders.values())
    for clock in clocks.values():
        clock.open()
    flush(job, receiver)
    assert all(feeder.caught_up for feeder in job.feeders.values())
    assert fed == sorted(set(fed))
    assert fed[0] < job.committed == fed[-1] == receiver.fed
    assert receiver.received_bytes > sum(job.num_bytes.values())
    job.assert_right(receiver)


def test_link_slower_than_gradients(listen: Listen, log: list[str]) -> None:
    """Catches a backlog that grows without end, silence about it, and pieces given up that never become right."""
    job = make_job()
    receiver = listen(job)
    clocks = {device: ManualClock() for device in job.slabs}
    for device, clock in clocks.items():
        link = Link(job.num_bytes[device] / 9.0, clock.clock, clock.sleep)
        cap = job.num_bytes[device] // 6
        job.feed(device, receiver, link, limits=FeedLimits(piece_bytes=20_000, backlog_bytes=cap), log=log.append)
    behind: set[str] = set()
    for step in range(1, 30):
        for device, feeder in job.feeders.items():
            drive(clocks[device], float(step), feeder)
            behind |= {device} if feeder.progress.behind else set()
        job.step(skipped=step == 12)
        assert all(f.progress.backlog_bytes <= job.num_bytes[d] // 6 for d, f in job.feeders.items())
    assert behind == set(job.feeders)
    assert receiver.fed is None
    for clock in clocks.values():
        clock.open()
    flush(job, receiver)
    assert sum("cannot keep up" in line for line in log) == len(job.feeders)
    assert all(f.progress.num_given_up > 0 for f in job.feeders.values())
    assert not any(f.progress.behind for f in job.feeders.values())
    job.assert_right(receiver)
    job.step()
    flush(job, receiver)
    job.assert_right(receiver)


def test_behind_is_told_before_the_backlog_is_full(listen: Listen) -> None:
    """Catches a caller who waits for ever for a feed whose backlog grows too slowly to be given up."""
    job = make_job()
    receiver = listen(job)
    device = next(iter(job.slabs))
    clock = ManualClock()
    link = Link(job.num_bytes[device] / 4.0, clock.clock, clock.sleep)
    feeder = job.feed(device, receiver, link, limits=FeedLimits(piece_bytes=20_000, backlog_bytes=1 << 40, patience=4))
    for step in range(1, 60):
        drive(clock, float(step), feeder)
        job.step()
        if feeder.progress.behind:
            break
    assert feeder.progress.behind
    assert feeder.progress.num_given_up == 0
    clock.open()


def test_full_speed(listen: Listen) -> None:
    """Catches a race between commits and claims that a slow link hides: steps follow each other without a pause."""
    job = make_job()
    receiver = listen(job)
    for device in job.slabs:
        job.feed(device, receiver)
    for _ in range(30):
        job.step()
    flush(job, receiver)
    job.assert_right(receiver)


def test_wrong_token(listen: Listen, log: list[str]) -> None:
    """Catches a receiver that lets anybody in, or that a stranger puts out of action."""
    job = make_job()
    receiver = listen(job)
    device = next(iter(job.slabs))
    state = job.states[device]
    stranger = Feeder(state, job.slabs[device], Hello(source=device, token="guess"), receiver.address, 0, 0)
    with pytest.raises(FeedError, match="does not know the token"):
        stranger.flush(0, WAIT_S)
    stranger.close()
    for device in job.slabs:
        job.feed(device, receiver)
    flush(job, receiver)
    job.assert_right(receiver)
    assert [line for line in log if "refused a stranger" in line and "token" in line]


def test_dead_newcomer(listen: Listen) -> None:
    """Catches a training thread that learns of a newcomer's death by an error or a wait."""
    job = make_job()
    receiver = listen(job)
    device = next(iter(job.slabs))
    feeder = job.feed(device, receiver)
    feeder.flush(0, WAIT_S)
    receiver.close()
    for _ in range(100):
        job.step()
        if feeder.error:
            break
    with pytest.raises(FeedError, match=r"feed to 127\.0\.0\.1:\d+ has failed"):
        feeder.flush(job.committed, WAIT_S)
    assert feeder.error
    assert not feeder.caught_up
    late = job.feed(device, receiver)
    with pytest.raises(FeedError, match="no connection"):
        late.flush(job.committed, WAIT_S)
    job.step()
    feeder.close()


def test_dead_source(listen: Listen) -> None:
    """Catches a newcomer that waits for a source that is gone, does not say which, or takes none in its place."""
    job = make_job()
    whole_again = threading.Event()
    receiver = listen(job, lambda committed: whole_again.set() if committed == 1 else None)
    first, *others = job.slabs
    for device in job.slabs:
        job.feed(device, receiver)
    flush(job, receiver)
    job.feeders.pop(first).close()
    job.step()
    for device in others:
        job.feeders[device].flush(1, WAIT_S)
    with pytest.raises(FeedError, match=f"the feed of {first} has ended"):
        receiver.wait_for(1, WAIT_S)
    assert first in receiver.ended
    with pytest.raises(FeedError, match="not of one"):
        receiver.state()
    job.feed(first, receiver)
    assert whole_again.wait(WAIT_S)
    assert not receiver.ended
    job.assert_right(receiver)


def test_deadlines_are_named(listen: Listen) -> None:
    """Catches a wait without an end, or one that does not say for what."""
    job = make_job()
    receiver = listen(job)
    with pytest.raises(FeedError, match=r"step 5 are not all here after 0\.1 s: missing is every source"):
        receiver.wait_for(5, 0.1)
    device = next(iter(job.slabs))
    clock = ManualClock()
    feeder = job.feed(device, receiver, Link(1.0, clock.clock, clock.sleep))
    with pytest.raises(FeedError, match=r"not done with step 0 within 0\.1 s: it is at step 0, with \d+ of \d+ pieces"):
        feeder.flush(0, 0.1)
    with pytest.raises(FeedError, match=f"missing is {device}|missing is every source"):
        receiver.wait_for(0, 0.1)
    clock.open()
    feeder.flush(0, WAIT_S)
    with pytest.raises(FeedError, match="it is at step 0, with 0 of"):
        feeder.flush(1, 0.1)


def test_close_wakes_a_feeder_on_a_slow_link(listen: Listen) -> None:
    """Catches a feed that keeps its thread for as long as the link is busy."""
    job = make_job()
    receiver = listen(job)
    feeder = job.feed(next(iter(job.slabs)), receiver, Link(1e-3))
    feeder.close()
    assert feeder.error is None
    with pytest.raises(FeedError, match="closed"):
        feeder.flush(0, WAIT_S)
    job.step()


def test_a_quiet_source_stays(listen: Listen) -> None:
    """Catches a feed that is given up because a training step takes longer than the newcomer's patience."""
    job = make_job()
    receiver = listen(job, limits=FeedLimits(timeout_s=0.3))
    for device in job.slabs:
        job.feed(device, receiver, limits=FeedLimits(alive_s=0.02))
    flush(job, receiver)
    with pytest.raises(FeedError, match=r"after 1\.0 s"):
        receiver.wait_for(1, 1.0)
    assert not receiver.ended
    job.step()
    flush(job, receiver)
    job.assert_right(receiver)
