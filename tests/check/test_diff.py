"""Two checkpoints compared: the numbers are those of the full tensors, whatever layouts wrote them."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from runflat.check.diff import compare, find_checkpoint
from runflat.errors import CheckpointError
from runflat.parallel.optimizer import OptimizerSettings, build_optimizer
from runflat.parallel.shard import cut
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.plan import Place
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.units import TENSORS, param_ranges
from runflat.train.checkpoint import Progress
from runflat.train.publishing import publish
from runflat.train.shards import copy_shard, write_shard

Full = dict[str, dict[str, torch.Tensor]]
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.norm.weight"


def config(**changes: Any) -> LlamaConfig:
    sizes = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    return LlamaConfig(**sizes | changes)


def save(
    run: Path,
    change: Callable[[Full], object] = lambda full: None,
    layout: tuple[int, int, tuple[Place, ...]] = (1, 1, ()),
    step: int = 3,
    **sizes: Any,
) -> Path:
    """Save a fixed random state, changed, as the devices of a layout would; returns the run's folder."""
    tp, replicas, dead = layout
    spec = read_rules(build_meta_model(config(**sizes), torch.float32), tp).spec
    generator = torch.Generator().manual_seed(0)
    full = {kind: {p.name: torch.randn(p.shape, generator=generator) for p in spec.params} for kind in TENSORS}
    change(full)
    plan = build_plan(spec, live_devices(tp, replicas, dead), tp, 8, 16)
    shards = []
    for place in plan.places:
        held = plan.replica(place[0]).held(spec.kinds, place[1])
        parts = {
            kind: {p.name: cut(values[p.name], p, param_ranges(spec, p, held)) for p in spec.params}
            for kind, values in full.items()
        }
        params = {name: nn.Parameter(value) for name, value in parts["weight"].items()}
        optimizer = build_optimizer(spec, params, OptimizerSettings())
        for name, param in params.items():
            optimizer.state[param] = {kind: parts[kind][name] for kind in TENSORS[1:]}
        shards.append(write_shard(run, spec, copy_shard(spec, plan, place, step, params, optimizer)))
    publish(run, spec, plan, Progress(step, step, 8 * step, "ab"), shards)
    return run


def never(text: str) -> None:
    raise AssertionError(f"unexpected warning: {text}")


def test_layouts_do_not_count(tmp_path: Path) -> None:
    """Catches a tensor put together in the order of the layout that wrote it."""
    one = save(tmp_path / "one", layout=(4, 2, ((1, 2),)))
    other = save(tmp_path / "other", layout=(3, 1, ()))
    comparison = compare(*(find_checkpoint(run, None, never) for run in (one, other)))
    assert comparison.largest == 0.0
    assert {kind: comparison.whole(kind) for kind in TENSORS} == dict.fromkeys(TENSORS, 0.0)


def test_errors_are_those_of_the_full_tensors(tmp_path: Path) -> None:
    """Catches an error relative to the wrong side, of shards instead of tensors, or put down to another tensor."""
    before: Full = {}

    def change(full: Full) -> None:
        before.update({kind: dict(values) for kind, values in full.items()})
        full["weight"][Q_PROJ] = full["weight"][Q_PROJ] * 3
        full["exp_avg"][NORM] = full["exp_avg"][NORM] + 1

    one = save(tmp_path / "one")
    other = save(tmp_path / "other", change, layout=(4, 2, ((0, 0), (1, 3))))
    comparison = compare(*(find_checkpoint(run, None, never) for run in (one, other)))
    norm = before["exp_avg"][NORM].double().norm()
    assert comparison.tensors["weight"][Q_PROJ].error == pytest.approx(2.0, rel=1e-6)
    assert comparison.tensors["exp_avg"][NORM].error == pytest.approx(4.0 / float(norm), rel=1e-6)
    others = [error for error, _, name in comparison.ranked if name not in (Q_PROJ, NORM)]
    assert max(others) == 0.0
    assert comparison.by_kind("weight")["self_attn.q_proj.weight"] == comparison.tensors["weight"][Q_PROJ].error
    assert set(comparison.by_kind("exp_avg_sq").values()) == {0.0}
    whole = torch.cat([value.flatten() for value in before["weight"].values()]).double()
    assert comparison.whole("weight") == pytest.approx(
        2 * float(before["weight"][Q_PROJ].norm() / whole.norm()), rel=1e-6
    )
    assert [entry[1:] for entry in comparison.ranked[:2]] == sorted(
        [("weight", Q_PROJ), ("exp_avg", NORM)], key=lambda entry: -comparison.tensors[entry[0]][entry[1]].error
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_infinitely_far(value: float, tmp_path: Path) -> None:
    """Catches NaN, which every comparison with a tolerance lets pass."""
    one, other = save(tmp_path / "one"), save(tmp_path / "other", lambda full: full["exp_avg"][NORM][:1].fill_(value))
    for sides in ((one, other), (other, one)):
        comparison = compare(*(find_checkpoint(run, None, never) for run in sides))
        assert comparison.ranked[0] == (math.inf, "exp_avg", NORM)
        assert comparison.whole("exp_avg") == math.inf
        assert comparison.whole("weight") == 0.0


def test_zeros(tmp_path: Path) -> None:
    """Catches a division by zero: moments are zero before the first update."""
    zero = [save(tmp_path / name, lambda full: full["exp_avg"][NORM].zero_()) for name in ("a", "b")]
    assert compare(*(find_checkpoint(run, None, never) for run in zero)).largest == 0.0
    other = find_checkpoint(save(tmp_path / "c"), None, never)
    assert compare(find_checkpoint(zero[0], None, never), other).largest == math.inf


def test_a_checkpoint_is_found_by_run_step_or_folder(tmp_path: Path) -> None:
    """Catches a comparison of other checkpoints than those that were named."""
    run = save(save(tmp_path / "run", step=2), step=4)
    folder = run / "checkpoints" / "step-00000002"
    assert find_checkpoint(run, None, never).progress.step == 4
    assert find_checkpoint(run, 2, never).folder == folder
    assert find_checkpoint(folder, None, never).progress.step == 2
    assert find_checkpoint(folder, 2, never).progress.step == 2
    with pytest.raises(CheckpointError, match="of step 2, not 4"):
        find_checkpoint(folder, 4, never)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3: .* 2, 4\."):
        find_checkpoint(run, 3, never)
    os.truncate(folder / "shard-0-0.safetensors", 500)
    with pytest.raises(CheckpointError, match="500 bytes"):
        find_checkpoint(folder, None, never)


def test_other_models_are_refused(tmp_path: Path) -> None:
    """Catches a comparison of the parameters that two models happen to share."""
    one = find_checkpoint(save(tmp_path / "one"), None, never)
    other = find_checkpoint(save(tmp_path / "other", intermediate_size=32), None, never)
    with pytest.raises(
        CheckpointError, match=r"different models: .*gate_proj.weight has shape \[48, 16\] there and \[32"
    ):
        compare(one, other)
