"""`runflat verify` as people and programs use it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runflat.check import verify as verify_module
from runflat.check.verify import Errors
from runflat.cli import run
from runflat.parallel import tokens

LLAMA = ["verify", "--model", "llama", "--tp", "2", "--dead", "1:0"]


def errors(value: float) -> Errors:
    """Returns errors of which one is `value`."""
    table = {"lm_head.weight": 1e-15}
    return Errors(table, {"lm_head.weight": value}, table, table, 1e-15, 1e-15)


def test_pass(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches output that leaves out a side, a kind of parameter, or what was lifted."""
    assert run(LLAMA) == 0
    output = capsys.readouterr().out
    for word in ("lifted", "as is", "float32", "down_proj.weight", "embed_tokens.weight", "clipped norm", "loss"):
        assert word in output
    last = output.strip().splitlines()[-1]
    assert last.startswith("PASS")
    assert "2 replicas at TP 2, dead 1:0" in last


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches JSON that is not one object, or in which the two sides are mixed up."""
    assert run([*LLAMA, "--json", "--replicas", "3", "--seed", "7", "--sync", "reshard"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert (found["tp"], found["replicas"], found["dead"], found["seed"]) == (2, 3, ["1:0"], 7)
    assert (found["sync"], found["sequence_parallel"]) == ("reshard", False)
    assert found["casts_lifted"]["largest"] < found["tolerance"] < found["as_is"]["largest"]
    assert found["casts_lifted"]["grads"].keys() == found["as_is"]["second_moments"].keys()


def test_sequence_parallel(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a flag that is parsed and forgotten: tokens must be gathered, and the output must say so."""
    gathered = []
    real = tokens._all_gather
    monkeypatch.setattr(tokens, "_all_gather", lambda *args: (gathered.append(args), real(*args))[1])
    assert run([*LLAMA, "--sequence-parallel", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sequence_parallel"]
    assert gathered
    monkeypatch.setattr(verify_module, "verify", lambda *_: errors(1e-15))
    assert run([*LLAMA, "--sequence-parallel"]) == 0
    assert capsys.readouterr().out.strip().endswith("dead 1:0, sequence parallel)")


@pytest.mark.parametrize("value", [1.1e-9, math.inf])
def test_fail(value: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a proof that fails with exit code 0, or without a last line that says so."""
    monkeypatch.setattr(verify_module, "verify", lambda *_: errors(value))
    assert run(LLAMA) == 1
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith(f"FAIL: largest relative error {value:.1e}")
    assert run([*LLAMA, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["passed"]
    assert found["as_is"]["weights"]["lm_head.weight"] == (value if math.isfinite(value) else None)


def test_full_takes_the_sizes_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches --full that builds the small model: a directory whose heads allow TP 3 but not TP 4 must show."""
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 48}
    config = {"model_type": "llama", **sizes, "vocab_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(["verify", "--model", str(tmp_path), "--full", "--tp", "3", "--dead", "0:1"]) == 0
    assert run(["verify", "--model", str(tmp_path), "--full", "--tp", "4"]) == 2
    assert run(["verify", "--model", str(tmp_path), "--tp", "4"]) == 0
    assert "3 units" in " ".join(capsys.readouterr().err.split())


BAD = {
    "slot does not exist": (["--model", "llama", "--dead", "0:9"], "0:9 does not exist"),
    "slot written wrong": (["--model", "llama", "--dead", "1-3"], "'1-3' is not a place"),
    "slot negative": (["--model", "llama", "--dead", "0:-1"], "'0:-1' is not a place"),
    "replica does not exist": (["--model", "llama", "--replicas", "1", "--dead", "1:0"], "1:0 does not exist"),
    "all slots dead": (["--model", "llama", "--tp", "2", "--dead", "0:0", "--dead", "0:1"], "all 2 slots of replica 0"),
    "degree 0": (["--model", "llama", "--tp", "0"], "--tp is 0"),
    "no replica": (["--model", "llama", "--replicas", "0"], "--replicas is 0"),
    "negative seed": (["--model", "llama", "--seed", "-1"], "--seed is -1"),
    "degree above the units": (["--model", "llama", "--tp", "600"], "TP 600 is more than"),
    "unknown model": (["--model", "nonsense"], "'nonsense'"),
    "no plan": (["--model", "stablelm"], "StableLm"),
    "mixture of experts": (["--model", "mixtral"], "model.layers.*.mlp.experts"),
    "dropout": (["--model", "gpt2"], "resid_pdrop is 0.1"),
    "no small model of it": (["--model", "xlnet"], "cannot be built small"),
    "small model does not run": (["--model", "gptj", "--tp", "2"], "does not run with these sizes"),
    "parameter without a gradient": (["--model", "hrm_text", "--tp", "2"], "does not use its parameter model.z_L_init"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback, or a message that does not name what was wrong."""
    flags, text = BAD[case]
    assert run(["verify", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert text in " ".join(captured.err.split())
    assert "\n\n" not in captured.err.strip()


def test_help_is_fast() -> None:
    """Catches torch or transformers loaded before anything is computed."""
    program = (
        "import sys\nfrom runflat.cli import run\ntry:\n    run(['verify', '--help'])\nexcept SystemExit:\n    pass\n"
    )
    program += "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "runflat verify --model llama --tp 4 --dead 0:2 --dead 1:1" in " ".join(done.stdout.split())
