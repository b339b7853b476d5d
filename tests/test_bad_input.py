"""Bad input as a table: each line is one paragraph that names the value, the limit and the way out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runflat.cli import run as runflat
from runflat.commands.config_files import load_config
from runflat.config import TrainConfig
from runflat.errors import ConfigError, DataError, UserError
from runflat.presets import read_preset
from runflat.train.data import Corpus, prepare

CONFIGS = {
    "unknown key": ("[train]\nstepz = 3", ["train.stepz", "nearest is train.steps"]),
    "unknown section": ("[layuot]\ntp = 3", ["layuot", "nearest is layout"]),
    "key outside its section": ("steps = 3", ["no key steps", "nearest is train.steps"]),
    "key like nothing": ("[layout]\nxyzzy = 3", ["layout.xyzzy", "layout.tp, layout.replicas, layout.dead"]),
    "two at once": ("[train]\nstepz = 3\nlr = -1", ["train.stepz", "train.lr is -1", "greater than 0"]),
    "text for a number": ('[train]\nsteps = "10"', ["train.steps is '10'", "valid integer"]),
    "truth for a number": ("[layout]\ntp = true", ["layout.tp is True", "valid integer"]),
    "fraction for a number": ("[layout]\ntp = 1.5", ["layout.tp is 1.5", "valid integer"]),
    "date for a number": ("[train]\nlr = 2020-01-01", ["train.lr", "valid number"]),
    "text for a list": ('[layout]\ndead = "1:3"', ["layout.dead is '1:3'", "valid array"]),
    "number in a list": ("[layout]\ndead = [3]", ["layout.dead[0] is 3", "valid string"]),
    "number for a section": ("model = 3", ["model is 3", "[model]"]),
    "not a number": ("[train]\nlr = nan", ["train.lr is nan", "finite"]),
    "no choice": ('[train]\ndtype = "float16"', ["train.dtype is 'float16'", "'bfloat16'", "'float32'"]),
    "no preset": ('[model]\npreset = "huge"', ["model.preset is 'huge'", "'tiny' or 'demo'"]),
    "degree 0": ("[layout]\ntp = 0", ["layout.tp is 0", "greater than or equal to 1"]),
    "slot written wrong": ('[layout]\ndead = ["1-3"]', ["'1-3'", "replica:slot", "1:3"]),
    "slot negative": ('[layout]\ndead = ["0:-1"]', ["'0:-1'", "replica:slot"]),
    "slot does not exist": ('[layout]\ntp = 4\nreplicas = 2\ndead = ["1:4"]', ["1:4", "0:0 to 1:3"]),
    "replica does not exist": ('[layout]\ntp = 4\ndead = ["1:0"]', ["1:0", "layout.replicas 1", "0:0 to 0:3"]),
    "slot twice": ('[layout]\ntp = 4\ndead = ["0:1", "0:1"]', ["0:1 more than once"]),
    "replica all dead": ('[layout]\ntp = 2\nreplicas = 2\ndead = ["1:0", "1:1"]', ["all 2 slots of replica 1"]),
    "batch too small": ("[layout]\nreplicas = 9\n[train]\nglobal_batch = 8", ["train.global_batch is 8", "9 replicas"]),
    "warm-up too long": ("[train]\nsteps = 5\nwarmup_steps = 6", ["train.warmup_steps 6", "train.steps, 5"]),
    "decay too long": (
        '[train]\nsteps = 5\nschedule = "wsd"\nwarmup_steps = 3\ndecay_steps = 3',
        ["train.warmup_steps 3 and train.decay_steps 3", "train.steps, 5"],
    ),
    "wsd without decay": ('[train]\nschedule = "wsd"', ["train.decay_steps is 0"]),
    "decay without wsd": ("[train]\ndecay_steps = 5", ["train.decay_steps is 5", "cosine"]),
    "two models": ('[model]\npreset = "tiny"\narch = "llama"', ["model.preset and model.arch", "keep one"]),
    "heads do not divide": ("[model]\nnum_heads = 10\nnum_kv_heads = 4", ["model.num_heads is 10", "multiple", "4"]),
    "not TOML": ("steps: 3", ["is not TOML", "line 1"]),
}


def assert_paragraph(error: UserError, parts: list[str]) -> None:
    message = str(error)
    assert error.exit_code == 2
    assert "\n" not in message
    assert message.endswith(".")
    for part in parts:
        assert part in message


@pytest.mark.parametrize("case", CONFIGS)
def test_bad_configuration(case: str, tmp_path: Path) -> None:
    """Catches a bad configuration that is taken, fails with another error, or has a message that does not help."""
    text, parts = CONFIGS[case]
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as info:
        load_config(path)
    assert_paragraph(info.value, [*parts, str(path)])


def test_missing_configuration(tmp_path: Path) -> None:
    """Catches a missing file that silently gives the defaults."""
    with pytest.raises(ConfigError) as info:
        load_config(tmp_path / "none.toml")
    assert_paragraph(info.value, ["none.toml", "No such file"])


def test_configuration_that_is_not_text(tmp_path: Path) -> None:
    """Catches a traceback for a file in another encoding."""
    path = tmp_path / "latin.toml"
    path.write_bytes(b'[model]\ndir = "\xe4"')
    with pytest.raises(ConfigError) as info:
        load_config(path)
    assert_paragraph(info.value, ["latin.toml", "cannot be read"])


def corpus(folder: Path, *paths: str, tokenizer: str | None = None, model_vocab_size: int | None = None) -> Corpus:
    return prepare(
        [str(folder / path) for path in paths],
        cache_dir=folder / "cache",
        seq_len=64,
        tokenizer=None if tokenizer is None else folder / tokenizer,
        model_vocab_size=model_vocab_size,
    )


DATA: dict[str, tuple[Callable[[Path], Corpus], list[str]]] = {
    "no such path": (lambda folder: corpus(folder, "nowhere"), ["nowhere", "neither a file nor a folder"]),
    "empty folder": (lambda folder: corpus(folder, "empty"), ["No text file", "empty", ".txt"]),
    "pattern without match": (lambda folder: corpus(folder, "*.nothing"), ["No text file", "*.nothing"]),
    "no readable text": (lambda folder: corpus(folder, "binary.txt", "latin.txt"), ["None of the 2 files", "2 could"]),
    "nothing in it": (lambda folder: corpus(folder, "nothing.txt"), ["None of the 1 files", "nothing.txt"]),
    "too little text": (lambda folder: corpus(folder, "short.txt"), ["6 tokens", "2 sequences of 64", "data.seq_len"]),
    "vocabulary too large": (
        lambda folder: corpus(folder, "long.txt", model_vocab_size=256),
        ["257 ids", "has 256", "model.vocab_size"],
    ),
    "no tokenizer": (lambda folder: corpus(folder, "long.txt", tokenizer="gone"), ["data.tokenizer", "cannot be read"]),
    "directory without tokenizer": (
        lambda folder: corpus(folder, "long.txt", tokenizer="empty"),
        ["tokenizer.json", "cannot be read"],
    ),
    "not a tokenizer": (lambda folder: corpus(folder, "long.txt", tokenizer="short.txt"), ["is not a tokenizer"]),
    "cache cannot be written": (
        lambda folder: prepare([str(folder / "long.txt")], cache_dir=folder / "short.txt" / "cache", seq_len=64),
        ["cannot be written", "--run"],
    ),
}


@pytest.mark.parametrize("case", DATA)
def test_bad_data(case: str, tmp_path: Path) -> None:
    """Catches a traceback, or a run that trains on nothing, where the text or its tokenizer cannot be used."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary.txt").write_bytes(b"a\0b" * 100)
    (tmp_path / "latin.txt").write_bytes(b"\xe4" * 300)
    (tmp_path / "nothing.txt").write_bytes(b"")
    (tmp_path / "short.txt").write_text("short", encoding="utf-8")
    (tmp_path / "long.txt").write_text("long " * 100, encoding="utf-8")
    make, parts = DATA[case]
    with pytest.raises(DataError) as info:
        make(tmp_path)
    assert_paragraph(info.value, parts)


def test_defaults_are_valid() -> None:
    """Catches checks that refuse everything, which would make the tables above pass."""
    assert TrainConfig().layout.num_devices == 1


TRAIN: dict[str, tuple[str, list[str]]] = {
    "unknown flag": ("--layout.tpp 2", ["--layout.tpp", "--layout.tp"]),
    "text for a number": ("--layout.tp four", ["--layout.tp", "'four'"]),
    "fraction for a number": ("--train.steps 1e3", ["--train.steps", "'1e3'"]),
    "no choice": ("--train.dtype bf16", ["--train.dtype", "float32", "float64"]),
    "flag without its value": ("--model.preset", ["--model.preset", "Missing value"]),
    "unknown key in a file": ("bad.toml", ["bad.toml", "train.stepz", "train.steps"]),
    "no such file": ("gone.toml", ["gone.toml", "No such file"]),
    "a folder for a file": ("text", ["text", "cannot be read"]),
    "degree above the heads": ("--layout.tp 9", ["TP 9", "4 units of kind 'head'", "at most 4"]),
    "dead slot that does not exist": ("--layout.tp 2 --layout.dead 0:5", ["0:5", "0:0 to 0:1"]),
    "all slots of a replica dead": ("--layout.dead 0:0", ["all 1 slots of replica 0"]),
    "fewer sequences than replicas": (
        "--layout.replicas 2 --train.global-batch 1",
        ["train.global_batch is 1", "2 replicas"],
    ),
    "no readable text": ("--data.paths binary", ["None of the 1 files", "binary.txt", "data.paths"]),
    "no such text": ("--data.paths gone", ["gone", "neither a file nor a folder"]),
    "too little text": ("--data.seq-len 4000", ["tokens, too few for 2 sequences", "data.seq_len"]),
    "no tokenizer": ("--data.tokenizer gone", ["data.tokenizer is gone", "cannot be read"]),
    "unknown architecture": ("--model.arch nonsense", ["nonsense", "llama", "qwen2"]),
    "architecture without a plan": ("--model.arch bloom --model.num-layers 1", ["BloomForCausalLM has no tensor-par"]),
    "mixture of experts": ("--model.arch mixtral --model.num-layers 1", ["MixtralForCausalLM", "mixture-of-experts"]),
    "norm over all heads": ("--model.arch olmo2 --model.num-layers 1", ["Olmo2ForCausalLM", "q_proj", "norm"]),
    "dropout": ("--model.dir dropout", ["attention_dropout is 0.1", "set it to 0"]),
    "no such model": ("--model.dir gone", ["the model directory gone does not exist", "config.json"]),
    "a folder without a model": ("--model.dir text", ["text", "model directory"]),
    "a model without a type": ("--model.dir typeless", ["typeless", "no model_type"]),
    "a damaged model": ("--model.dir damaged", ["damaged", "config.json", "cannot be read"]),
    "an activation that does not exist": ("--model.dir activation", ["cannot build", "nonsense"]),
    "text for a size": ("--model.dir wordy", ["hidden_size", "'big'"]),
    "no heads": ("--model.dir headless", ["headless"]),
    "heads do not divide the width": ("--model.num-heads 6", ["64", "not a multiple", "6"]),
    "KV heads do not divide the heads": ("--model.num-kv-heads 3", ["4 query heads", "3 KV heads"]),
    "no weights to start from": ("--model.from-dir gone", ["the model directory gone does not exist"]),
    "a file for a run": ("--run file.txt", ["the folder file.txt cannot be made", "--run"]),
    "a run that is there": ("--run old", ["old holds a run already", "--resume old"]),
    "resume of nothing": ("--resume gone", ["gone cannot be resumed", "config.json"]),
    "resume without a checkpoint": ("--resume old", ["old has no checkpoint", "no folder step-N"]),
    "resume of a corrupt checkpoint": ("--resume corrupt", ["no checkpoint of corrupt is whole", "index.json"]),
}


def write_inputs(folder: Path) -> None:
    """Everything that the table of `train` names, `gone` excepted."""
    text = folder / "text"
    text.mkdir()
    (text / "a.txt").write_text("some words\n" * 500, encoding="utf-8")
    (folder / "binary").mkdir()
    (folder / "binary" / "binary.txt").write_bytes(b"a\0b" * 100)
    (folder / "bad.toml").write_text("[train]\nstepz = 3", encoding="utf-8")
    (folder / "file.txt").write_text("a file", encoding="utf-8")
    tiny = read_preset("tiny")
    models: dict[str, dict[str, Any]] = {
        "dropout": tiny | {"attention_dropout": 0.1},
        "typeless": {"hidden_size": 64},
        "activation": tiny | {"hidden_act": "nonsense"},
        "wordy": tiny | {"hidden_size": "big"},
        "headless": tiny | {"num_attention_heads": 0},
        "damaged": {},
    }
    for name, fields in models.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(fields) if fields else "{", encoding="utf-8")
    for name in ("old", "corrupt"):
        (folder / name / "checkpoints").mkdir(parents=True)
        (folder / name / "steps.jsonl").write_text("", encoding="utf-8")
        (folder / name / "config.json").write_text(TrainConfig().model_dump_json(), encoding="utf-8")
    (folder / "corrupt" / "checkpoints" / "step-00000002").mkdir()


@pytest.mark.parametrize("case", TRAIN)
def test_bad_command_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a traceback, another exit code than 2, or a run that starts on what the user did not ask for."""
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    flags, parts = TRAIN[case]
    # The case's own flags come last, but for a file, which must come first.
    data = [] if "--data.paths" in flags else ["--data.paths", "text"]
    run = [] if "--run" in flags or "--resume" in flags else ["--run", "new"]
    try:
        code = runflat(["train", *flags.split(), *run, *data])
    except SystemExit as ended:  # the parser of flags
        code = ended.code if isinstance(ended.code, int) else -1
    shown = capsys.readouterr()
    assert code == 2, shown.err
    assert "Traceback" not in shown.err
    assert "\n\n" not in shown.err.strip()
    assert shown.out == ""
    message = " ".join(shown.err.split())
    for part in parts:
        assert part in message
    assert not (tmp_path / "new" / "steps.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["tain"], 2, "no command 'tain'; the commands are"),
        ([], 2, ""),
        (["--help"], 0, ""),
        (["--version"], 0, ""),
    ],
)
def test_front(arguments: list[str], code: int, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a mistyped command that ends well, or in a traceback."""
    assert runflat(arguments) == code
    assert part in capsys.readouterr().err
