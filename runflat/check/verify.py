"""`runflat verify`: the same training steps unsharded and under a plan, compared parameter by parameter."""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from runflat.check.ranks import run_ranks
from runflat.check.reference import AdamW, Batch, Outcome, reference_model, reference_run
from runflat.errors import ModelError
from runflat.parallel.casts import LiftCasts, lift_forward, recompute_layers
from runflat.parallel.comms import Comms
from runflat.parallel.optimizer import OptimizerSettings
from runflat.parallel.shard import ShardedModel, tensor_weights
from runflat.parallel.tp_plan import ShardingRules, build_meta_model, read_rules
from runflat.plan.batch import micro_batches
from runflat.plan.plan import Place, Plan
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.sync_groups import Sync, SyncLayout, sync_layout
from runflat.plan.units import ModelSpec, ParamSpec, param_ranges
from runflat.plan.zero import OptimizerMode, Ownership, ownership
from runflat.train.step import Trainer, train_step
from runflat.train.updater import Updater

TOLERANCE = 1e-9
"""Largest relative error at which `verify` passes, float64 with the casts lifted."""
BUCKET_BYTES = 1 << 18
"""Small, so that small models have several buckets."""


@dataclass(frozen=True)
class Case:
    """What to verify: a layout with dead places, a batch, how many steps, and how the planned side computes.

    The reference computes in float64 with eager attention whatever `dtype` and `attention` are. `compute_dtype` is that
    of the layers (none: `dtype`), `recompute` has backward compute them again. `in_memory` replaces gloo by a network
    without sockets. `sync` is how replicas meet, `optimizer` who keeps the state of the optimizer. With
    `sequence_parallel` each device has a part of the tokens between the split layers.
    """

    tp: int = 8
    num_replicas: int = 2
    dead: tuple[Place, ...] = ()
    num_sequences: int = 5
    micro_batch: int = 2
    seq_len: int = 16
    num_steps: int = 3
    seed: int = 0
    attention: str = "eager"
    dtype: torch.dtype = torch.float64
    compute_dtype: torch.dtype | None = None
    recompute: bool = False
    in_memory: bool = False
    sync: Sync = "direct"
    optimizer: OptimizerMode = "replicated"
    sequence_parallel: bool = False


@dataclass(frozen=True)
class Truth:
    """The unsharded run: full weights before it, and its outcome. It depends on no plan."""

    before: Mapping[str, torch.Tensor]
    outcome: Outcome


@dataclass(frozen=True)
class Errors:
    """Largest relative error (norm of the difference over norm of the reference) per kind of parameter.

    An error is infinite where it is not a number, an element has no holder, or two holders differ in a bit.
    """

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
    """One rank's tensors by parameter name; gradients and moments of what it keeps only."""

    grads: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]
    first_moments: Mapping[str, torch.Tensor]
    second_moments: Mapping[str, torch.Tensor]
    grad_norms: tuple[float, ...]
    losses: tuple[float, ...]


def plan_case(rules: ShardingRules, case: Case) -> tuple[Plan, SyncLayout]:
    """The plan of `case`, and its sync layout."""
    devices = live_devices(case.tp, case.num_replicas, case.dead)
    plan = build_plan(rules.spec, devices, case.tp, case.num_sequences, case.seq_len)
    return plan, sync_layout(rules.spec, plan, BUCKET_BYTES, case.dtype.itemsize, case.sync)


def unsharded(config: PreTrainedConfig, case: Case, batch: Batch, lift_casts: bool = True) -> Truth:
    """The reference run of `case` on `batch`; of the case only seed and number of steps count.

    Raises:
        ModelError: the unmodified model does not run.
    """
    model = reference_model(copy.deepcopy(config), case.seed, torch.float64)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    try:
        with LiftCasts() if lift_casts else contextlib.nullcontext():
            return Truth(before, reference_run(model, batch, case.num_steps, AdamW()))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"the unmodified {type(model).__name__} does not run with these sizes ({reason}), so there is nothing to "
            "compare with; --full takes the model's own sizes."
        ) from error


def verify(
    config: PreTrainedConfig, case: Case, batch: Batch, lift_casts: bool = True, truth: Truth | None = None
) -> Errors:
    """Errors of a run under the plan of `case` against the unsharded reference, ranks as threads.

    Every replica's copy of every tensor is compared, and holders of one unit must agree to the bit. `truth` is
    `unsharded(config, case, batch, lift_casts)`, for callers that check several plans against it.
    """
    meta = build_meta_model(copy.deepcopy(config), case.compute_dtype or case.dtype, case.attention)
    rules = read_rules(meta, case.tp, sequence_parallel=case.sequence_parallel)
    plan, layout = plan_case(rules, case)
    expected = truth or unsharded(config, case, batch, lift_casts)
    models = {place: copy.deepcopy(meta) for place in plan.places}
    settings = _settings(AdamW(), case.num_steps)

    owned = ownership(rules.spec, plan, layout) if case.optimizer == "zero1" else None

    def rank(place: Place, comms: Comms) -> _Shard:
        replica = plan.replica(place[0])
        held = replica.held(rules.spec.kinds, place[1])
        model, source, cpu = models[place], tensor_weights(expected.before), torch.device("cpu")
        sharded = ShardedModel(model, rules, held, comms.tp, source, case.dtype, cpu, case.compute_dtype)
        params = sharded.params
        model.train()
        if lift_casts:
            lift_forward(model)
        if case.recompute:
            recompute_layers(model, lift_casts, sharded.tp.keep)
        reports = place[1] == replica.live_slots[0]
        updater = Updater(rules.spec, params, held, settings, owned.kept(place) if owned is not None else None)
        sync = updater.sync(plan, layout, owned, place, comms, sharded.sources)
        trainer = Trainer(model, params, sync, comms, updater.adamw, settings, reports, refresh=sharded.refresh)
        try:
            return _run_rank(trainer, updater, plan, place, case, batch)
        finally:
            sync.close()  # its hooks hang on the parameters, where Python's collector does not see the circle

    shards = run_ranks(plan, layout, rank, in_memory=case.in_memory)
    return _compare(rules, plan, owned, shards, expected.outcome)


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


def _run_rank(trainer: Trainer, updater: Updater, plan: Plan, place: Place, case: Case, batch: Batch) -> _Shard:
    own = replica_batches(plan, place, batch, case.micro_batch)
    grads: dict[str, torch.Tensor] = {}
    results = []
    for step in range(case.num_steps):
        results.append(train_step(trainer, [b.tokens for b in own], [b.labels for b in own], step))
        if step == 0:
            grads = {name: p.grad.clone() for name, p in trainer.params.items() if p.grad is not None}
    moments = updater.state(case.num_steps).tensors
    return _Shard(
        grads=updater.cut(grads),
        weights={name: param.detach() for name, param in trainer.params.items()},
        first_moments=moments["exp_avg"],
        second_moments=moments["exp_avg_sq"],
        grad_norms=tuple(result.grad_norm for result in results),
        losses=tuple(result.loss for result in results),
    )


def _compare(
    rules: ShardingRules, plan: Plan, owned: Ownership | None, shards: Mapping[Place, _Shard], expected: Outcome
) -> Errors:
    def table(field: str) -> dict[str, float]:
        parts = {place: getattr(shard, field) for place, shard in shards.items()}
        return parameter_errors(rules, plan, parts, getattr(expected, field), None if field == "weights" else owned)

    return Errors(
        grads=table("grads"),
        weights=table("weights"),
        first_moments=table("first_moments"),
        second_moments=table("second_moments"),
        grad_norm=max(_relative(shard.grad_norms, expected.grad_norms) for shard in shards.values()),
        loss=max(_relative(shard.losses, expected.losses) for shard in shards.values()),
    )


def _relative(values: Iterable[float], expected: Iterable[float]) -> float:
    """Largest relative error; infinite, never NaN, which any comparison with a tolerance would let pass."""
    errors = [abs(value - true) / abs(true) for value, true in zip(values, expected, strict=True)]
    return max(error if math.isfinite(error) else math.inf for error in errors)


def parameter_errors(
    rules: ShardingRules,
    plan: Plan,
    parts: Mapping[Place, Mapping[str, torch.Tensor]],
    reference: Mapping[str, torch.Tensor],
    owned: Ownership | None = None,
) -> dict[str, float]:
    """Relative error per kind of parameter (the largest over its layers) of the tensors assembled from `parts`.

    Infinite where two holders of one element differ in a bit, or an element has no holder in some replica (with
    `owned`, whose keepers alone have a part: no keeper at all).
    """
    errors: dict[str, float] = {}
    kinds = rules.spec.kinds
    kept = {place: owned.kept(place) for place in parts} if owned is not None else None
    for param in rules.spec.params:
        of_param = {place: held[param.name] for place, held in parts.items() if param.name in held}
        held_by = {
            place: kept[place][param.name] if kept is not None else plan.replica(place[0]).held(kinds, place[1])
            for place in of_param
        }
        groups = [[place for place in of_param if place[0] == replica.replica] for replica in plan.replicas]
        full = _assembled(rules.spec, groups if kept is None else [list(of_param)], held_by, of_param, param)
        true = reference[param.name].double()
        error = math.inf if full is None else _relative_norm(full.double(), true)
        kind = kind_of(param.name)
        errors[kind] = max(errors.get(kind, 0.0), error)
    return errors


def _relative_norm(value: torch.Tensor, true: torch.Tensor) -> float:
    difference, size = float((value - true).norm()), float(true.norm())
    if size == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / size if math.isfinite(difference) else math.inf


def _assembled(
    spec: ModelSpec,
    groups: Sequence[Sequence[Place]],
    held_by: Mapping[Place, Mapping[str, tuple[int, ...]]],
    parts: Mapping[Place, torch.Tensor],
    param: ParamSpec,
) -> torch.Tensor | None:
    """The full tensor from all holders' parts; None where two differ or one of the `groups` lacks an element."""
    if not parts:
        return None
    if param.dim is None:
        copies = list(parts.values())
        return copies[0] if all(torch.equal(other, copies[0]) for other in copies) else None
    first = next(iter(parts.values()))
    full = torch.empty(param.shape, dtype=first.dtype)
    known = torch.zeros(param.shape[param.dim], dtype=torch.bool)
    for group in groups:
        covered = torch.zeros_like(known)
        for place in group:
            index = torch.cat([torch.arange(*part) for part in param_ranges(spec, param, held_by[place])])
            local = parts[place]
            old = known[index]
            if not torch.equal(
                full.index_select(param.dim, index[old]), local.index_select(param.dim, old.nonzero()[:, 0])
            ):
                return None
            full.index_copy_(param.dim, index, local)
            known[index] = covered[index] = True
        if not bool(covered.all()):
            return None
    return full


def kind_of(name: str) -> str:
    """The name of a parameter without its layer number: what `verify` prints a row for."""
    return re.sub(r"^model\.(layers\.\d+\.)?", "", name)
