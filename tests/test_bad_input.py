"""Bad input as a table: each line is one paragraph that names the value, the limit and the way out."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runflat.config import TrainConfig, load_config
from runflat.errors import ConfigError, DataError, UserError
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
    "no choice": ('[train]\ndtype = "bfloat16"', ["train.dtype is 'bfloat16'", "'float32' or 'float64'"]),
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
