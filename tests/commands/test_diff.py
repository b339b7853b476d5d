"""`runflat diff` as it is typed: what it prints and how it ends."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from runflat.cli import run as runflat
from runflat.parallel.optimizer import OptimizerSettings, build_optimizer
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.planner import build_plan, live_devices
from runflat.train.checkpoint import Progress
from runflat.train.publishing import publish
from runflat.train.shards import copy_shard, write_shard

NORM = "model.norm.weight"


def save(run: Path, scale: float = 1.0, step: int = 1, hidden_size: int = 8, samples: str = "ab") -> None:
    """Save a model of ones whose last norm is `scale`, without moments."""
    config = LlamaConfig(
        vocab_size=12, hidden_size=hidden_size, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    spec = read_rules(build_meta_model(config, torch.float32), 1).spec
    params = {p.name: nn.Parameter(torch.ones(p.shape) * (scale if p.name == NORM else 1.0)) for p in spec.params}
    plan = build_plan(spec, live_devices(1, 1, ()), 1, 1, 4)
    shard = write_shard(
        run, spec, copy_shard(spec, plan, (0, 0), step, params, build_optimizer(spec, params, OptimizerSettings()))
    )
    publish(run, spec, plan, Progress(step, 0, step, samples), [shard])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the current folder, with runs `a`, `b` (0.25 away from `a` in one tensor) and `later`."""
    monkeypatch.chdir(tmp_path)
    save(Path("a"))
    save(Path("b"), scale=1.25)
    save(Path("later"), step=2, samples="cd")
    save(Path("later"), step=1, samples="cd")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["a", "a", "--tolerance", "0"], 0),
        (["a", "b"], 0),
        (["a", "b", "--tolerance", "0.25"], 0),
        (["a", "b", "--tolerance", "0.2499"], 1),
        (["a", "b", "--tolerance", "0.2499", "--json"], 1),
        (["a", "later", "--step", "1", "--tolerance", "0"], 0),
        (["a/checkpoints/step-00000001", "later", "--tolerance", "0"], 0),
    ],
)
def test_exit_code(arguments: list[str], code: int, folder: Path) -> None:
    """Catches a check in a script that passes although the tolerance was exceeded."""
    assert runflat(["diff", *arguments]) == code


def test_tables_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a report that does not say which tensor is off, by how much, or what was compared."""
    runflat(["diff", "a", "b", "--tolerance", "0.1"])
    shown = capsys.readouterr().out
    assert "A: a/checkpoints/step-00000001 (step 1)" in shown
    assert f"weight of {NORM} is 2.50e-01 apart, more than the tolerance of 1.00e-01" in shown
    assert len(shown.splitlines()) < 50
    runflat(["diff", "a", "a"])
    assert "equal to the bit" in capsys.readouterr().out
    runflat(["diff", "a", "later"])
    assert "the steps differ" in capsys.readouterr().out
    runflat(["diff", "a", "later", "--step", "1"])
    assert "different sequences" in capsys.readouterr().out


def test_json_for_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches output that a program cannot read: text around it, or Infinity, which is no JSON."""
    runflat(["diff", "a", "b", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["worst"] == {"tensor": "weight", "parameter": NORM, "error": 0.25}
    assert data["tensors"]["weight"][NORM] == 0.25
    assert data["whole"]["exp_avg"] == 0.0
    assert (data["within"], data["tolerance"]) == (True, None)
    assert [c["step"] for c in data["checkpoints"]] == [1, 1]
    save(Path("broken"), scale=float("nan"))
    assert runflat(["diff", "a", "broken", "--json", "--tolerance", "1"]) == 1
    data = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert data["worst"]["error"] is None


BAD = {
    "no such run": (["a", "nowhere"], "nowhere has no checkpoint: there is no such folder"),
    "a run that saved nothing": (["a", "empty"], "there is no folder step-N"),
    "no such step": (["a", "b", "--step", "7"], "no checkpoint of step 7: there are those of the steps 1"),
    "other model": (["a", "wide"], "different models"),
    "tolerance below 0": (["a", "b", "--tolerance", "-1"], "--tolerance is -1.0"),
    "tolerance no number": (["a", "b", "--tolerance", "nan"], "--tolerance is nan"),
    "cut off": (["a", "cut"], "no checkpoint of cut is whole"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback, or a comparison of something else than what was asked for."""
    Path("empty").mkdir()
    save(Path("wide"), hidden_size=16)
    save(Path("cut"))
    Path("cut/checkpoints/step-00000001/index.json").write_text("{")
    arguments, message = BAD[case]
    assert runflat(["diff", *arguments]) == 2
    shown = capsys.readouterr()
    assert message in " ".join(shown.err.split())
    assert shown.out == ""


def test_skipped_checkpoint_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a comparison that silently falls back to an older checkpoint."""
    Path("later/checkpoints/step-00000002/index.json").unlink()
    assert runflat(["diff", "a", "later", "--tolerance", "0"]) == 0
    assert "warning: skipping a broken checkpoint: later/checkpoints/step-00000002" in capsys.readouterr().err
