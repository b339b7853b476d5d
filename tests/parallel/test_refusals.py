"""Models that cannot be sharded: each is refused with an error that names the module and the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from runflat.check.small import architecture, proof_config, small_config
from runflat.errors import ModelError
from runflat.parallel.tp_plan import build_meta_model, read_rules

Change = Callable[[Any], None]


def built(name: str, **overrides: Any) -> PreTrainedModel:
    """Returns the small model of a transformers type on the meta device."""
    return build_meta_model(small_config(architecture(name), 2, **overrides), torch.float32)


def layer(model: Any) -> Any:
    """Returns the first layer of a llama."""
    return model.model.layers[0]


def plan(**styles: str) -> Change:
    """Returns a change that sets styles of the plan; dots in module paths are written as two underscores."""

    def change(model: Any) -> None:
        model.tp_plan = {**model.tp_plan, **{name.replace("__", "."): style for name, style in styles.items()}}

    return change


def swap_gate(model: Any) -> None:
    class Quantized(nn.Linear):
        """Looks like a Linear, computes something else."""

    layer(model).mlp.gate_proj = Quantized(32, 1000, bias=False, device="meta")


def widen_one_layer(model: Any) -> None:
    model.model.layers[1].mlp.down_proj = nn.Linear(1001, 32, bias=False, device="meta")


def alien_head(model: Any) -> None:
    model.lm_head = nn.Sequential(model.lm_head)
    model.tp_plan = {pattern: style for pattern, style in model.tp_plan.items() if pattern != "lm_head"}


def alien_embedding(model: Any) -> None:
    class Hashed(nn.Embedding):
        """An embedding whose lookup nobody knows."""

    model.model.embed_tokens = Hashed(503, 32, device="meta")


def norm_over_all_heads(model: Any) -> None:
    layer(model).self_attn.q_norm = nn.RMSNorm(32, device="meta")


def matrix_outside(model: Any) -> None:
    layer(model).adapter = nn.Linear(32, 32, bias=False, device="meta")


def drop_module(model: Any) -> None:
    layer(model).extra = nn.Dropout(0.25)


def nothing(_: Any) -> None:
    pass


REFUSED: dict[str, tuple[str, dict[str, Any], Change, list[str]]] = {
    "mixture of experts": ("mixtral", {}, nothing, ["Mixtral", "model.layers.*.mlp.experts", "mixture-of-experts"]),
    "no plan": ("stablelm", {}, nothing, ["StableLmForCausalLM", "no tensor-parallel plan"]),
    "no plan, no dropout": (
        "gpt2",
        {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0},
        nothing,
        ["GPT2LMHeadModel", "no tensor-parallel plan"],
    ),
    "norm over the whole query width": ("olmo2", {}, nothing, ["model.layers.0.self_attn.q_proj", "norm"]),
    "attention dropout": ("llama", {"attention_dropout": 0.1}, nothing, ["attention_dropout is 0.1", "set it to 0"]),
    "residual dropout": ("phi3", {"resid_pdrop": 0.2}, nothing, ["resid_pdrop is 0.2"]),
    "dropout module": ("llama", {}, drop_module, ["model.layers.0.extra", "p=0.25"]),
    "unknown style": ("llama", {}, plan(model__norm="sequence_parallel"), ["'sequence_parallel'", "model.norm"]),
    "subclass of Linear": ("llama", {}, swap_gate, ["model.layers.0.mlp.gate_proj", "Quantized"]),
    "layers of different width": ("llama", {}, widen_one_layer, ["model.layers.1.mlp", "1001", "1000"]),
    "another head": ("llama", {}, alien_head, ["LM head Sequential"]),
    "another embedding": ("llama", {}, alien_embedding, ["input embedding Hashed"]),
    "norm that no plan names": ("llama", {}, norm_over_all_heads, ["model.layers.0.self_attn.q_norm.weight", "(32,)"]),
    "matrix in no plan": ("llama", {}, matrix_outside, ["model.layers.0.adapter.weight", "(32, 32)"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_names_module_and_reason(case: str) -> None:
    """Catches a model that is sharded although nobody knows how, or a message that does not say why it is not."""
    name, overrides, change, parts = REFUSED[case]
    model = built(name, **overrides)
    change(model)
    with pytest.raises(ModelError) as info:
        read_rules(model, 2)
    for part in parts:
        assert part in str(info.value)


@pytest.mark.parametrize("overrides", [{"num_key_value_heads": 3}])
def test_heads_that_do_not_divide(overrides: dict[str, Any]) -> None:
    """Catches KV heads that some query heads would share unevenly."""
    with pytest.raises(ModelError, match="4 query heads do not divide by 3 KV heads"):
        read_rules(built("llama", **overrides), 2)


def test_layers_in_no_list() -> None:
    """Catches tokens that are dealt out at a place that was guessed."""
    model: Any = built("llama", num_hidden_layers=1)
    model.model.only = model.model.layers[0]
    del model.model.layers
    model.tp_plan = {pattern.replace("layers.*", "only"): style for pattern, style in model.tp_plan.items()}
    assert read_rules(model, 2).first_layer is None
    with pytest.raises(
        ModelError, match=r"model\.only\.self_attn is in no list of layers.*without sequence parallelism"
    ):
        read_rules(model, 2, sequence_parallel=True)


def test_soft_caps_and_sdpa() -> None:
    """Catches an attention implementation that drops the soft-cap without a word."""
    with pytest.raises(ModelError, match="scaled_dot_product_attention"):
        build_meta_model(proof_config("gemma2"), torch.float32, "sdpa")


def test_what_is_refused_is_sharded_without_the_change() -> None:
    """Catches checks that refuse everything, which would make the tables above pass."""
    for name in ("llama", "phi3"):
        assert read_rules(built(name), 2).blocks
