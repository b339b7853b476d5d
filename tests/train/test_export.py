"""Model directories out of runs: what transformers loads from them is what the run holds."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from runflat.check.small import proof_config
from runflat.cli import run as runflat
from runflat.parallel.casts import lift_forward
from runflat.parallel.optimizer import OptimizerSettings, build_optimizer
from runflat.parallel.shard import cut
from runflat.parallel.tp_plan import build_meta_model, read_rules
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.units import param_ranges
from runflat.train import export as module
from runflat.train.checkpoint import Progress
from runflat.train.data import Corpus, prepare
from runflat.train.export import keep_model
from runflat.train.publishing import publish
from runflat.train.shards import copy_shard, write_shard

SMALL = {"num_hidden_layers": 1, "intermediate_size": 90, "vocab_size": 71}
MODELS: dict[str, Callable[[], Any]] = {
    "grouped": lambda: proof_config("llama-gqa", **SMALL),
    "tied": lambda: proof_config("llama-gqa4", tie_word_embeddings=True, **SMALL),
    "fused": lambda: proof_config("phi3", **SMALL),
    "biases": lambda: proof_config("qwen2", **SMALL),
}
STEPS, BATCH, SEQ_LEN, LR = 10, 4, 16, 0.01
TEXT = "".join(f"{n} plus {n} is {2 * n}, and {n} times {n} is {n * n}.\n" for n in range(400))


def tokenizer_in(folder: Path) -> Path:
    """A tokenizer of words as transformers saves it, with an end-of-document token."""
    words = sorted({"<eos>", "<unk>", *TEXT.split()})[:500]
    words = words if "<unk>" in words else [*words, "<unk>", "<eos>"]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    return folder


def save(run: Path, config: Any, tokenizer: Path | None = None) -> dict[str, torch.Tensor]:
    """A run with a checkpoint of random weights, written by the devices of TP 4 with a dead slot; returns them."""
    model = build_meta_model(config, torch.float32)
    spec = read_rules(model, 4).spec
    generator = torch.Generator().manual_seed(0)
    full = {param.name: torch.randn(param.shape, generator=generator) for param in spec.params}
    plan = build_plan(spec, live_devices(4, 2, [(1, 2)]), 4, 8, 16)
    shards = []
    for place in plan.places:
        held = plan.replica(place[0]).held(spec.kinds, place[1])
        params = {p.name: nn.Parameter(cut(full[p.name], p, param_ranges(spec, p, held))) for p in spec.params}
        optimizer = build_optimizer(spec, params, OptimizerSettings())
        shards.append(write_shard(run, spec, copy_shard(spec, plan, place, 3, params, optimizer)))
    publish(run, spec, plan, Progress(3, 3, 24, "ab"), shards)
    keep_model(run, json.loads(config.to_json_string(use_diff=False)), spec.name, tokenizer)
    return full


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("max_bytes", [10_000, 10**9], ids=["many files", "one file"])
def test_transformers_loads_what_was_saved(
    model: str, max_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a tensor that is put together in the wrong order, is missing, or lies under a name nobody knows."""
    monkeypatch.setattr(module, "MAX_FILE_BYTES", max_bytes)
    monkeypatch.chdir(tmp_path)
    full = save(Path("run"), MODELS[model]())
    assert runflat(["export", "run", "--to", "models/out"]) == 0
    assert (len(list(Path("models/out").glob("*.safetensors"))) > 1) == (max_bytes < 10**9)
    loaded, info = AutoModelForCausalLM.from_pretrained("models/out", output_loading_info=True)
    assert not any(info.values())
    assert type(loaded).__name__ in json.loads(Path("models/out/config.json").read_text())["architectures"]
    values = dict(loaded.named_parameters())
    assert values.keys() == full.keys()
    for name, value in full.items():
        assert torch.equal(values[name], value), name
    assert [path.name for path in Path("models").iterdir()] == ["out"]


def test_tokenizer_goes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a model that arrives without what makes its tokens; an export that needs more than the run's folder."""
    monkeypatch.chdir(tmp_path)
    source = tokenizer_in(tmp_path / "source")
    before = AutoTokenizer.from_pretrained(source)("1 plus 1 is 2,")["input_ids"]
    save(Path("run"), MODELS["grouped"](), source)
    shutil.rmtree(source)
    assert runflat(["export", "run", "--to", "out", "--dtype", "bfloat16"]) == 0
    after = AutoTokenizer.from_pretrained("out")
    assert after("1 plus 1 is 2,")["input_ids"] == before
    assert after.eos_token == "<eos>"
    assert AutoModelForCausalLM.from_pretrained("out").dtype == torch.bfloat16


def test_what_cannot_be_exported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an export over an older one, a half-written directory, and a traceback in place of a reason."""
    monkeypatch.chdir(tmp_path)
    save(Path("run"), MODELS["grouped"]())
    Path("out").mkdir()
    assert runflat(["export", "run", "--to", "out"]) == 2
    assert "out is there already" in capsys.readouterr().err
    assert runflat(["export", "run", "--to", "run/config/out", "--step", "9"]) == 2
    assert "no checkpoint of step 9" in capsys.readouterr().err
    next(Path("run/checkpoints/step-00000003").glob("*.safetensors")).write_bytes(b"")
    assert runflat(["export", "run", "--to", "other"]) == 2
    assert "no checkpoint of run is whole" in " ".join(capsys.readouterr().err.split())
    shutil.rmtree("run/model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def reference(model: Any, corpus: Corpus) -> None:
    """Plain training of an unsharded model on the samples of a run: summed loss over targets, AdamW, no clipping."""
    matrices = [param for param in model.parameters() if param.ndim > 1]
    vectors = [param for param in model.parameters() if param.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    for step in range(STEPS):
        batch = torch.from_numpy(corpus.train_sequences(step * BATCH, BATCH))
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()


@pytest.mark.process
@pytest.mark.timeout(180)
def test_continued_training_in_and_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches weights lost or changed on the way in or out, and another tokenizer than the model's own.

    A model of random weights with its tokenizer goes in, is trained on two devices of a replica, and comes out; the
    same training of the unsharded model gives the same logits. Casts to float32 are lifted: AdamW takes the sign of a
    gradient that is next to nothing, so that after ten steps their rounding is of any size.
    """
    monkeypatch.chdir(tmp_path)
    tokenizer = tokenizer_in(tmp_path / "model")
    Path("text.txt").write_text(TEXT)
    config = proof_config("llama-gqa", num_hidden_layers=2, vocab_size=512)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        start = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    start.save_pretrained("model")
    flags = f"--layout.tp 2 --train.global-batch {BATCH} --data.seq-len {SEQ_LEN} --train.steps {STEPS} --train.lr {LR}"
    settings = (
        "--train.schedule constant --train.clip-norm 0 --train.dtype float64 --train.lift-casts --data.paths text.txt"
    )
    assert runflat(["train", "--run", "run", "--from", "model", *flags.split(), *settings.split()]) == 0
    assert runflat(["export", "run", "--to", "out", "--dtype", "float64"]) == 0

    corpus = prepare(["text.txt"], cache_dir=tmp_path / "tokens", seq_len=SEQ_LEN, tokenizer=tokenizer)
    assert corpus.vocab_size > 257
    before, after = (AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64) for name in ("model", "out"))
    for model in (before, after):
        lift_forward(model)
    held = torch.from_numpy(corpus.holdout(0, corpus.num_holdout))
    with torch.no_grad():
        first = before(input_ids=held).logits
        exported = after(input_ids=held).logits
    reference(before, corpus)
    with torch.no_grad():
        expected = before(input_ids=held).logits
    assert float((exported - first).norm() / first.norm()) > 0.1
    assert float((exported - expected).norm() / expected.norm()) < 1e-9
