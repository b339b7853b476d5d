"""The example of a loop that the user owns: it stays small, and learns what the plain loop learns, failure or not."""

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runflat.commands.train import parse
from runflat.errors import CheckpointError

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_loop"


def loop_lines(name: str) -> list[str]:
    """Returns the lines of the function `train` in one of the two files, without blank ones."""
    text = (EXAMPLE / name).read_text()
    body = text[text.index("def train(") :].partition("\n\n\nif __name__")[0]
    return [line for line in body.splitlines() if line.strip()]


def test_at_most_ten_added_lines() -> None:
    """Catches an API that needs more than ten new lines in a user's loop."""
    added = [line for line in difflib.ndiff(loop_lines("plain.py"), loop_lines("elastic.py")) if line.startswith("+ ")]
    assert 0 < len(added) <= 10


def run(*command: str, timeout_s: float = 150.0) -> str:
    """Returns what a command prints; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.process
@pytest.mark.timeout(200)
def test_same_losses_with_a_failure_as_the_plain_loop(tmp_path: Path) -> None:
    """Catches a library loop that computes anything else than the plain one, or loses a step with the killed worker.

    Both start from one model directory made by transformers; a worker is killed in step 5.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    failure = tmp_path / "failure.json"
    failure.write_text(json.dumps([{"event": "kill", "device": "0:1", "step": 5, "phase": "backward"}]))
    plain = run(str(EXAMPLE / "plain.py"), str(tmp_path / "model"))
    expected = [float(line.rpartition(" ")[2]) for line in plain.splitlines() if line.startswith("step")]
    run(str(EXAMPLE / "elastic.py"), str(tmp_path / "model"), str(tmp_path / "run"), str(failure))
    records = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(12))
    assert [record["generation"] for record in records][-1] > records[0]["generation"]
    # transformers rounds norms and softmax to float32, also in a float64 model.
    assert [record["loss"] for record in records] == pytest.approx(expected, rel=2e-5)
    with pytest.raises(CheckpointError, match="was trained by the loop"):
        parse(["--resume", str(tmp_path / "run")])  # it would go on with the text that runflat has
