"""`runflat verify`: the same training steps unsharded and under a plan, compared parameter by parameter."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from runflat.check.casts import LiftCasts
from runflat.check.ranks import run_ranks
from runflat.check.reference import AdamW, Batch, Outcome, reference_model, reference_run
from runflat.parallel.comms import Comms
from runflat.parallel.grad_sync import GradSync
from runflat.parallel.optimizer import OptimizerSettings, build_optimizer
from runflat.parallel.shard import shard_model, tensor_weights
from runflat.parallel.tp_plan import ShardingRules, build_meta_model, read_rules
from runflat.plan.batch import micro_batches
from runflat.plan.plan import Place, Plan
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.sync_groups import SyncLayout, sync_layout
from runflat.plan.units import Range, param_ranges
from runflat.train.step import Trainer, train_step

TOLERANCE = 1e-9
"""Largest relative error at which `verify` passes, float64 with the casts lifted."""
BUCKET_BYTES = 1 << 18
"""Small, so that small models have several buckets."""


@dataclass(frozen=True)
class Case:
    """What to verify: a layout with dead places, a batch, and how many steps."""

    tp: int = 8
    num_replicas: int = 2
    dead: tuple[Place, ...] = ()
    num_sequences: int = 5
    micro_batch: int = 2
    seq_len: int = 16
    num_steps: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Errors:
    """Largest relative error (norm of the difference over norm of the reference) per kind of parameter."""

    grads: Mapping[str, float]
    weights: Mapping[str, float]
    first_moments: Mapping[str, float]
    second_moments: Mapping[str, float]
    grad_norm: float
    loss: float

    @property
    def largest(self) -> float:
        """The largest error of all."""
        tables = (self.grads, self.weights, self.first_moments, self.second_moments)
        return max(self.grad_norm, self.loss, *(value for table in tables for value in table.values()))


@dataclass(frozen=True)
class _Shard:
    """One rank's tensors by parameter name."""

    grads: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]
    first_moments: Mapping[str, torch.Tensor]
    second_moments: Mapping[str, torch.Tensor]
    grad_norms: tuple[float, ...]
    losses: tuple[float, ...]


def plan_case(rules: ShardingRules, case: Case) -> tuple[Plan, SyncLayout]:
    """The plan of `case` for a float64 model, and its sync layout."""
    devices = live_devices(case.tp, case.num_replicas, case.dead)
    plan = build_plan(rules.spec, devices, case.tp, case.num_sequences, case.seq_len)
    return plan, sync_layout(rules.spec, plan, BUCKET_BYTES, 8)


def verify(config: PreTrainedConfig, case: Case, batch: Batch, lift_casts: bool = True) -> Errors:
    """Errors of a run under the plan of `case` against the unsharded reference, float64, ranks as threads.

    Every replica's copy of every tensor is compared, and holders of one unit must agree to the bit.
    """
    settings = AdamW()
    reference = reference_model(config, case.seed, torch.float64)
    tensors = {name: param.detach().clone() for name, param in reference.named_parameters()}
    with _casts(lift_casts):
        expected = reference_run(reference, batch, case.num_steps, settings)
    meta = build_meta_model(copy.deepcopy(config), torch.float64, "eager")
    rules = read_rules(meta, case.tp)
    plan, layout = plan_case(rules, case)
    models = {place: copy.deepcopy(meta) for place in plan.places}

    def rank(place: Place, comms: Comms) -> _Shard:
        held = plan.replica(place[0]).held(rules.spec.kinds, place[1])
        params = shard_model(
            models[place], rules, held, comms.tp, tensor_weights(tensors), torch.float64, torch.device("cpu")
        )
        models[place].train()
        sync = GradSync(rules.spec, plan, layout, place, comms, params)
        optimizer = build_optimizer(rules.spec, params, _settings(settings, case.num_steps))
        trainer = Trainer(
            models[place],
            params,
            sync,
            comms,
            optimizer,
            _settings(settings, case.num_steps),
            place[1] == plan.replica(place[0]).live_slots[0],
        )
        with _casts(lift_casts):
            return _run_rank(trainer, plan, place, case, batch)

    return _compare(rules, plan, run_ranks(plan, layout, rank), expected)


def _casts(lift: bool) -> contextlib.AbstractContextManager[object]:
    return LiftCasts() if lift else contextlib.nullcontext()


def _settings(settings: AdamW, num_steps: int) -> OptimizerSettings:
    return OptimizerSettings(
        lr=settings.lr,
        schedule="constant",
        total_steps=num_steps,
        weight_decay=settings.weight_decay,
        beta1=settings.beta1,
        beta2=settings.beta2,
        eps=settings.eps,
        clip_norm=settings.clip_norm,
    )


def replica_batches(plan: Plan, place: Place, batch: Batch, micro_batch: int) -> list[Batch]:
    """The micro-batches of the replica at `place`: consecutive sequences of the global batch, replica by replica."""
    first = 0
    for replica in plan.replicas:
        if replica.replica == place[0]:
            break
        first += replica.num_sequences
    batches = []
    for size in micro_batches(plan.replica(place[0]).num_sequences, micro_batch):
        batches.append(Batch(batch.tokens[first : first + size], batch.labels[first : first + size]))
        first += size
    return batches


def _run_rank(trainer: Trainer, plan: Plan, place: Place, case: Case, batch: Batch) -> _Shard:
    own = replica_batches(plan, place, batch, case.micro_batch)
    grads: dict[str, torch.Tensor] = {}
    results = []
    for step in range(case.num_steps):
        results.append(train_step(trainer, [b.tokens for b in own], [b.labels for b in own], step))
        if step == 0:
            grads = {name: p.grad.clone() for name, p in trainer.params.items() if p.grad is not None}
    state = trainer.optimizer.state
    return _Shard(
        grads=grads,
        weights={name: param.detach() for name, param in trainer.params.items()},
        first_moments={name: state[param]["exp_avg"] for name, param in trainer.params.items()},
        second_moments={name: state[param]["exp_avg_sq"] for name, param in trainer.params.items()},
        grad_norms=tuple(result.grad_norm for result in results),
        losses=tuple(result.loss for result in results),
    )


def _compare(rules: ShardingRules, plan: Plan, shards: Mapping[Place, _Shard], expected: Outcome) -> Errors:
    def table(field: str) -> dict[str, float]:
        reference: Mapping[str, torch.Tensor] = getattr(expected, field)
        parts = {place: getattr(shard, field) for place, shard in shards.items()}
        return parameter_errors(rules, plan, parts, reference)

    norms = [_relative(s.grad_norms, expected.grad_norms) for s in shards.values()]
    losses = [_relative(s.losses, expected.losses) for s in shards.values()]
    return Errors(
        grads=table("grads"),
        weights=table("weights"),
        first_moments=table("first_moments"),
        second_moments=table("second_moments"),
        grad_norm=max(norms),
        loss=max(losses),
    )


def _relative(values: Iterable[float], expected: Iterable[float]) -> float:
    return max(abs(value - true) / abs(true) for value, true in zip(values, expected, strict=True))


def parameter_errors(
    rules: ShardingRules,
    plan: Plan,
    parts: Mapping[Place, Mapping[str, torch.Tensor]],
    reference: Mapping[str, torch.Tensor],
) -> dict[str, float]:
    """Largest relative error per kind of parameter over all replicas' assembled tensors.

    Infinite where two holders of one element differ in a bit, or an element has no holder.
    """
    errors: dict[str, float] = {}
    for param in rules.spec.params:
        true = reference[param.name]
        pieces: list[torch.Tensor] = []
        for replica in plan.replicas:
            full = torch.full_like(true, torch.nan)
            for slot in replica.live_slots:
                local = parts[(replica.replica, slot)][param.name]
                ranges: tuple[Range, ...] = ((0, true.shape[0]),)
                dim = 0
                if param.dim is not None:
                    ranges, dim = param_ranges(rules.spec, param, replica.held(rules.spec.kinds, slot)), param.dim
                position = 0
                for start, stop in ranges:
                    target = full.narrow(dim, start, stop - start)
                    source = local.narrow(dim, position, stop - start)
                    if not torch.equal(torch.where(target.isnan(), source, target), source):
                        errors[kind_of(param.name)] = torch.inf
                    target.copy_(source)
                    position += stop - start
            pieces.append(full)
        agree = all(torch.equal(piece, pieces[0]) for piece in pieces)
        error = float((pieces[0] - true).norm() / true.norm()) if agree else torch.inf
        error = torch.inf if error != error else error
        kind = kind_of(param.name)
        errors[kind] = max(errors.get(kind, 0.0), error)
    return errors


def kind_of(name: str) -> str:
    """The name of a parameter without its layer number: what `verify` prints a row for."""
    return re.sub(r"^model\.(layers\.\d+\.)?", "", name)
