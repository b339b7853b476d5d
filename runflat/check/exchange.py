"""The exchange of gradients as the trainer does it, its backward replaced by declared seconds: what is sent, and when.

Parameters, hooks, buckets and collectives are the real ones, of `parallel.grad_sync`; no model is run. The backward of
a parameter takes the time of its two matrix products on the most loaded device of the replica, as tensor parallelism
has all of them wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from runflat.check.in_memory import InMemoryNetwork
from runflat.check.ranks import run_ranks
from runflat.check.timeline import Key, Launch, Links, RecordingNetwork, Timeline, Trace, only, replay, without_compute
from runflat.parallel.comms import Comms, Network
from runflat.parallel.grad_sync import GradSync
from runflat.plan.plan import Place, Plan, ReplicaPlan
from runflat.plan.sync_groups import SyncLayout
from runflat.plan.units import ModelSpec, shard_shape

FORWARD_SHARE = 0.5
"""Seconds of a forward per second of backward."""


@dataclass(frozen=True)
class Recorded:
    """One step of every device under a plan, its computation declared."""

    plan: Plan
    trace: Trace

    def sent_bytes(self, place: Place) -> float:
        """Bytes that `place` sends for the gradients of what is split, as counted at its calls."""
        launches = (act for act in self.trace.acts[place] if isinstance(act, Launch))
        return sum(launch.sent for launch in launches if _use(launch.key) != "world")

    def phases_s(self, links: Links) -> tuple[float, float, float]:
        """Seconds of the exchange with nothing under anything else: moves inside replicas, sums, moves back."""
        keys = {act.key for acts in self.trace.acts.values() for act in acts if isinstance(act, Launch)}
        there = {name: sum(key[0] == name for key in keys) // 2 for name, _ in keys}
        chosen: tuple[Callable[[Key], bool], ...] = (
            lambda key: _use(key) == "reshard" and key[1] <= there[key[0]],
            lambda key: _use(key) in ("sync", "world"),
            lambda key: _use(key) == "reshard" and key[1] > there[key[0]],
        )
        before, summed, after = (replay(only(self.trace, phase), links).total_s for phase in chosen)
        return before, summed, after

    def alone_s(self, links: Links) -> float:
        """Seconds of the exchange as it is launched, all gradients there at once."""
        return replay(without_compute(self.trace), links).total_s

    def timeline(self, links: Links) -> Timeline:
        """The step."""
        return replay(self.trace, links)

    def hidden(self, links: Links) -> float:
        """Part of the exchange that adds nothing to the step: 1 - (step - computation) / exchange alone."""
        timeline = self.timeline(links)
        exposed_s = timeline.total_s - max(timeline.computed_s.values())
        return 1 - exposed_s / self.alone_s(links)


def _use(key: Key) -> str:
    """What a group is for: world, tp, reshard or sync."""
    return key[0].rpartition("/")[2].rstrip("0123456789")


def record(spec: ModelSpec, plan: Plan, layout: SyncLayout, backward_s: float) -> Recorded:
    """One step in micro-batches of one sequence; the backward of one takes `backward_s` on a replica of full degree."""
    trace, memory = Trace({place: [] for place in plan.places}, {}), InMemoryNetwork()
    products = {replica.replica: _products(spec, replica) for replica in plan.replicas}
    scale = backward_s / min(sum(found.values()) for found in products.values())

    def work(place: Place, comms: Comms) -> None:
        replica = plan.replica(place[0])
        held = replica.held(spec.kinds, place[1])
        params = {p.name: nn.Parameter(torch.zeros(shard_shape(spec, p, held))) for p in spec.params}
        sync = GradSync(spec, plan, layout, place, comms, params)
        seconds = {name: scale * found for name, found in products[place[0]].items()}
        last_s = sum(seconds.values())
        trace.compute(place, ((1 + FORWARD_SHARE) * replica.num_sequences - 1) * last_s)
        value = torch.zeros(1, requires_grad=True)
        for param in sorted(spec.params, key=lambda p: p.order):
            name = param.name
            value = _Declared.apply(value, params[name], lambda name=name: trace.compute(place, seconds[name]))
        sync.zero()
        sync.arm()
        value.sum().backward()
        sync.finish()
        sync.close()

    run_ranks(plan, layout, work, lambda place: Network(backend=RecordingNetwork(memory, trace, place).backend))
    return Recorded(plan, trace)


def _products(spec: ModelSpec, replica: ReplicaPlan) -> dict[str, float]:
    """Multiply-adds of each parameter, per token, on the device of the replica that has most to do."""
    found: Counter[str] = Counter()
    shares = [replica.held(spec.kinds, slot) for slot in replica.live_slots]
    slowest = max(shares, key=lambda held: sum(p.matmuls * prod(shard_shape(spec, p, held)) for p in spec.params))
    for param in spec.params:
        found[param.name] = param.matmuls * prod(shard_shape(spec, param, slowest))
    return dict(found)


class _Declared(torch.autograd.Function):
    """A layer that computes nothing: its backward says so to `compute`, and gives its parameter a gradient of ones."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, param: torch.Tensor, compute: Callable[[], None]) -> torch.Tensor:
        ctx.shape, ctx.compute = param.shape, compute
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        ctx.compute()
        return grads[0], torch.ones(ctx.shape), None
