"""What the proof must notice: each mistake is put into the real code, and `verify` must fail by far.

A forward mistake must show in the loss, a mistake of the norm in the norm: comparing the mutated weights in a mutated
order would find something in any case, and prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from runflat.check import verify as verify_module
from runflat.check.small import proof_config, small_batch
from runflat.check.verify import TOLERANCE, Case, Errors
from runflat.parallel import buckets, grad_sync, layers, loss, shard, tokens
from runflat.parallel.comms import Group
from runflat.parallel.tp_plan import ShardingRules
from runflat.plan.units import ModelSpec, ParamSpec, Range, param_ranges
from runflat.train import updater

Check = Callable[..., Errors]
Patch = pytest.MonkeyPatch

CASE = Case(tp=4, num_sequences=3, dead=((0, 1),), in_memory=True)
SPLIT = replace(CASE, sequence_parallel=True)
FAR = 1000 * TOLERANCE


def reverse_rows(patch: Patch) -> None:
    """The units of a row-parallel weight are stored in another order than those of the column weights."""

    def mutated(spec: ModelSpec, param: ParamSpec, held: Mapping[str, tuple[int, ...]]) -> tuple[Range, ...]:
        ranges = param_ranges(spec, param, held)
        return ranges[::-1] if param.dim == 1 else ranges

    patch.setattr(shard, "param_ranges", mutated)


def swap_gate_and_up(patch: Patch) -> None:
    """The two halves of a fused gate_up weight change places."""

    def mutated(spec: ModelSpec, param: ParamSpec, held: Mapping[str, tuple[int, ...]]) -> tuple[Range, ...]:
        ranges = param_ranges(spec, param, held)
        if "gate_up" not in param.name:
            return ranges
        half = param.segments[1].offset
        return (*(r for r in ranges if r[0] >= half), *(r for r in ranges if r[0] < half))

    patch.setattr(shard, "param_ranges", mutated)


def copy_kv_without_sum(patch: Patch) -> None:
    """Of several holders of a KV head in one replica only the first contributes its gradient; all get the result."""
    real = buckets.LocalBucket.launch

    def mutated(self: buckets.LocalBucket) -> None:
        me = self.members[self.rank]
        if self.copies and any(place < me for place in self.members if place[0] == me[0]):
            for copy in self.copies:
                copy.grad.zero_()
        real(self)

    patch.setattr(buckets.LocalBucket, "launch", mutated)


def count_replicated_twice(patch: Patch) -> None:
    """Replicated parameters enter the squared norm twice."""
    real = grad_sync.GradSync.squared_norm

    def mutated(self: grad_sync.GradSync) -> torch.Tensor:
        flat, size = self._replicated.flat, len(self._replicated.members)
        return real(self) + flat.double().norm() ** 2 / size

    patch.setattr(grad_sync.GradSync, "squared_norm", mutated)


def average_per_replica(patch: Patch) -> None:
    """Each replica's mean loss counts the same, however many target tokens it has."""
    real = loss.VocabParallelLoss.__call__
    config = proof_config("llama-gqa4")
    batch = small_batch(config.vocab_size, config.pad_token_id, CASE.num_sequences, CASE.seq_len, 1)
    share = loss.num_targets(batch.labels) / CASE.num_replicas

    def mutated(self: Any, logits: torch.Tensor, labels: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return real(self, logits, labels) * (share / loss.num_targets(labels))

    patch.setattr(loss.VocabParallelLoss, "__call__", mutated)


def _indexed_attention(patch: Patch, change: Callable[[list[Any], dict[str, Any]], None]) -> None:
    """Let the indexed attention function lose something on its way to the model's own."""

    def register() -> None:
        for base, name in layers.INDEXED.items():
            real = layers._indexed(base)

            def attention(*args: Any, _real: Any = real, **kwargs: Any) -> Any:
                positional = list(args)
                change(positional, kwargs)
                return _real(*positional, **kwargs)

            AttentionInterface.register(name, attention)

    # The next model that is sharded registers the real functions again.
    patch.setattr(shard, "register_indexed_attention", lambda: (layers.register_indexed_attention(), register()))


def drop_mask(patch: Patch) -> None:
    """The indexed attention function gets no mask."""

    def change(positional: list[Any], keywords: dict[str, Any]) -> None:
        assert positional[4] is not None
        positional[4] = None

    _indexed_attention(patch, change)


def drop_soft_cap(patch: Patch) -> None:
    """The indexed attention function drops the soft-cap of the attention scores."""

    def change(positional: list[Any], keywords: dict[str, Any]) -> None:
        assert keywords.pop("softcap") is not None

    _indexed_attention(patch, change)


def decay_twice_once(patch: Patch) -> None:
    """One device decays its matrices twice as much as the others."""
    real = updater.build_optimizer
    seen: list[None] = []

    def mutated(*args: Any) -> torch.optim.AdamW:
        optimizer = real(*args)
        if not seen:
            optimizer.param_groups[0]["weight_decay"] *= 2
        seen.append(None)
        return optimizer

    patch.setattr(updater, "build_optimizer", mutated)


def decay_twice_everywhere(patch: Patch) -> None:
    """All devices decay twice: no two copies differ, only the truth does."""
    real = updater.build_optimizer

    def mutated(*args: Any) -> torch.optim.AdamW:
        optimizer = real(*args)
        optimizer.param_groups[0]["weight_decay"] *= 2
        return optimizer

    patch.setattr(updater, "build_optimizer", mutated)


def add_row_bias_everywhere(patch: Patch) -> None:
    """Every device adds the bias of a row-parallel layer before the sum."""

    def mutated(self: layers.RowLinear, hidden: torch.Tensor) -> torch.Tensor:
        return layers.from_tensor_parallel(torch.nn.functional.linear(hidden, self.weight, self.bias), self._tp.group)

    patch.setattr(layers.RowLinear, "forward", mutated)


def keep_input_gradient_partial(patch: Patch) -> None:
    """The gradient of a block's input is not summed over the devices of the replica."""
    patch.setattr(layers, "to_tensor_parallel", lambda hidden, group: hidden)


def let_all_contribute(patch: Patch) -> None:
    """Parameters whose gradient is equal on all devices of a replica are summed over them."""
    patch.setattr(grad_sync.GradSync, "_mute_equal", lambda self: None)


def count_one_slot(patch: Patch) -> None:
    """Where tokens are split, a norm's gradient is taken from one device of a replica, as if it were the whole one."""
    real = verify_module.read_rules

    def mutated(*args: Any, **kwargs: Any) -> ShardingRules:
        rules = real(*args, **kwargs)
        params = tuple(replace(param, rule="equal") if param.dim is None else param for param in rules.spec.params)
        return replace(rules, spec=replace(rules.spec, params=params))

    patch.setattr(verify_module, "read_rules", mutated)


def take_up_one_further(patch: Patch) -> None:
    """A device takes up the tokens that begin one after its own."""
    real = tokens.own_tokens
    patch.setattr(shard, "own_tokens", lambda whole, group: real(whole.roll(-1, dims=1), group))


def gather_one_further(patch: Patch) -> None:
    """Gathered tokens lie one place after their own."""
    real = tokens._all_gather

    def mutated(own: torch.Tensor, shares: tuple[int, ...], group: Group) -> torch.Tensor:
        return real(own, shares, group).roll(1, dims=0)

    patch.setattr(tokens, "_all_gather", mutated)


@dataclass(frozen=True)
class Mutation:
    """A mistake, the model that has what it breaks, and the number that must be wrong."""

    inject: Callable[[Patch], None]
    shows_in: Callable[[Errors], float]
    model: str = "llama-gqa4"
    changes: tuple[tuple[str, Any], ...] = ()
    case: Case = CASE


def in_loss(errors: Errors) -> float:
    """Returns the loss's error."""
    return errors.loss


def in_grads(kind: str) -> Callable[[Errors], float]:
    """Returns a function that gives the error of one kind of parameter's gradient."""
    return lambda errors: errors.grads[kind]


MUTATIONS = {
    "unit order in a row-parallel weight": Mutation(reverse_rows, in_loss),
    "gate and up swapped": Mutation(swap_gate_and_up, in_loss, "phi3"),
    "KV head copied but not summed": Mutation(copy_kv_without_sum, in_grads("self_attn.k_proj.weight")),
    "replicated parameter twice in the norm": Mutation(count_replicated_twice, lambda errors: errors.grad_norm),
    "loss averaged per replica": Mutation(average_per_replica, lambda errors: errors.grad_norm),
    "attention mask not applied": Mutation(drop_mask, in_loss),
    "soft-cap dropped": Mutation(drop_soft_cap, in_loss, "gemma2"),
    "one holder decayed twice": Mutation(decay_twice_once, lambda errors: max(errors.weights.values())),
    "all holders decayed twice": Mutation(decay_twice_everywhere, lambda errors: max(errors.weights.values())),
    "row bias added by every device": Mutation(add_row_bias_everywhere, in_loss, changes=(("mlp_bias", True),)),
    "input gradient not summed": Mutation(keep_input_gradient_partial, in_grads("input_layernorm.weight")),
    "equal gradients summed": Mutation(let_all_contribute, in_grads("norm.weight")),
    "norm counted from one slot": Mutation(count_one_slot, in_grads("input_layernorm.weight"), case=SPLIT),
    "norm counted from one slot, zero1": Mutation(
        count_one_slot, in_grads("input_layernorm.weight"), case=replace(SPLIT, optimizer="zero1")
    ),
    "tokens taken up one further": Mutation(take_up_one_further, in_loss, case=SPLIT),
    "tokens gathered one further": Mutation(gather_one_further, in_loss, case=SPLIT),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name: str, check: Check, monkeypatch: Patch) -> None:
    """Catches a proof that would pass whatever the code did."""
    mutation = MUTATIONS[name]
    mutation.inject(monkeypatch)
    assert mutation.shows_in(check(mutation.model, mutation.case, **dict(mutation.changes))) > FAR


@pytest.mark.parametrize("model", sorted({mutation.model for mutation in MUTATIONS.values()}))
def test_unmutated_code_passes(model: str, check: Check) -> None:
    """Catches a case that fails without any mutation, which would make the test above worthless."""
    assert check(model, CASE).largest < TOLERANCE
    assert check(model, SPLIT).largest < TOLERANCE
    assert check(model, replace(SPLIT, optimizer="zero1")).largest < TOLERANCE
    assert check(model, CASE, tie_word_embeddings=True).largest < TOLERANCE
