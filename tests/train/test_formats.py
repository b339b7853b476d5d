"""What a source holds besides plain text: JSON lines with a field, token ids, and a tokenizer learnt from the text."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from runflat.commands.prepare import prepare as prepare_run
from runflat.commands.prepare import tokenizer_of, write_config
from runflat.commands.train import parse
from runflat.errors import DataError
from runflat.train import formats
from runflat.train import tokenizer as learning
from runflat.train.data import Corpus, prepare
from runflat.train.formats import Reading
from runflat.train.sources import find_text_files
from runflat.train.tokenizer import SEPARATOR, train_tokenizer

END = 256
TEXT = "".join(f"the tyre number {n} runs flat, and the car with tyre {n} runs on: ümläut ☃\n" for n in range(200))


def make(folder: Path, paths: Sequence[Path], reading: Reading, **options: Any) -> Corpus:
    facts = {"seq_len": 2, "holdout_fraction": 0.0, "model_vocab_size": 300, **options}
    return prepare([str(path) for path in paths], cache_dir=folder / "cache", reading=reading, **facts)


def lines(folder: Path, *rows: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_each_line_is_a_document(tmp_path: Path) -> None:
    """Catches JSON's own characters among the tokens, a lost separator, and a field that changes without new tokens."""
    path = lines(tmp_path, {"text": "ab\nc", "other": "x"}, "", {"other": "y", "text": "ä"})
    corpus = make(tmp_path, [path], Reading("text"))
    assert np.load(corpus.token_file).tolist() == [*b"ab\nc", END, *"ä".encode(), END]
    other = make(tmp_path, [path], Reading("other"))
    assert np.load(other.token_file).tolist() == [*b"x", END, *b"y", END]
    plain = make(tmp_path, [path], Reading())
    assert np.load(plain.token_file).tolist() == [*path.read_bytes(), END]


def saved(folder: Path, **columns: list[object]) -> Path:
    """A folder as `datasets` saves it, of two tables."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder), num_shards=2)
    return folder


def test_each_row_of_a_saved_dataset_is_a_document(tmp_path: Path) -> None:
    """Catches tables in another order than listed, a column that nobody asked for, and empty rows as documents."""
    folder = saved(tmp_path / "rows", text=["ab\nc", "", "ä"], other=["x", "y", "z"])
    corpus = make(tmp_path, [folder], Reading())
    assert np.load(corpus.token_file).tolist() == [*b"ab\nc", END, *"ä".encode(), END]
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"].reverse()
    (folder / "state.json").write_text(json.dumps(state))
    turned = make(tmp_path, [folder], Reading("other"))
    assert np.load(turned.token_file).tolist() == [*b"z", END, *b"x", END, *b"y", END]


def test_a_dataset_that_cannot_be_taken_says_why(tmp_path: Path) -> None:
    """Catches a traceback of another library, splits that are mixed, and a table that is left out in silence."""
    datasets = pytest.importorskip("datasets")
    folder = saved(tmp_path / "rows", body=["ab", "cd"], size=[1, 2])
    for reading in (Reading(), Reading("size")):
        with pytest.raises(DataError, match="its columns are body, size"):
            make(tmp_path, [folder], reading)
    datasets.DatasetDict({"train": datasets.load_from_disk(str(folder))}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(DataError, match=r"with the splits train\. Name the one"):
        make(tmp_path, [tmp_path / "splits"], Reading("body"))
    first, second = sorted(folder.glob("*.arrow"))
    second.write_bytes(second.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read"):
        make(tmp_path, [folder], Reading("body"))
    first.unlink()
    with pytest.raises(DataError, match="no such table is there"):
        make(tmp_path, [folder], Reading("body"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "Line 2 .* is not JSON"),
        ({"body": "x"}, "its fields are body"),
        ({"text": 3}, "its fields"),
        ("[1]", "no o"),
    ],
)
def test_lines_without_text_are_refused(tmp_path: Path, row: object, message: str) -> None:
    """Catches documents that are skipped in silence, and a traceback that names no line."""
    with pytest.raises(DataError, match=message):
        make(tmp_path, [lines(tmp_path, {"text": "good"}, row)], Reading("text"))
    assert list((tmp_path / "cache").iterdir()) == []


def ids_in(folder: Path, ids: Sequence[int], kind: str, name: str = "ids.bin") -> Path:
    path = folder / name
    np.array(ids, dtype=np.dtype(kind).newbyteorder("<")).tofile(path)
    return path


@pytest.mark.parametrize("kind", ["uint16", "uint32"])
def test_ids_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """Catches separators put among ids, the wrong byte order, and ids lost between two pieces of a file."""
    monkeypatch.setattr(formats, "_CHUNK_IDS", 3)
    first, second = ids_in(tmp_path, range(290, 300), kind), ids_in(tmp_path, [7, 0], kind, "b.bin")
    corpus = make(tmp_path, [first, second], Reading(id_type=kind))
    assert np.load(corpus.token_file).tolist() == [*range(290, 300), 7, 0]
    assert (corpus.vocab_size, corpus.separator_id) == (300, -1)


def test_large_ids_keep_their_value(tmp_path: Path) -> None:
    """Catches ids above 65,535 that wrap around."""
    corpus = make(tmp_path, [ids_in(tmp_path, [70_000, 1], "uint32")], Reading(None, "uint32"), model_vocab_size=80_000)
    assert corpus.train_sequences(0, 1).tolist() == [[70_000, 1]]


def test_ids_that_cannot_be_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ids of the wrong type or of another vocabulary, which would index past the embedding; mixed sources."""
    monkeypatch.setattr(formats, "_CHUNK_IDS", 2)
    with pytest.raises(DataError, match=r"Token 3 of .*ids.bin is 300, but there are 300 ids"):
        make(tmp_path, [ids_in(tmp_path, [1, 2, 3, 300], "uint16")], Reading())
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(DataError, match="not a multiple of the 2"):
        make(tmp_path, [tmp_path / "odd.bin"], Reading())
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="Name the tokenizer"):
        make(tmp_path, [tmp_path / "a.txt", ids_in(tmp_path, [1], "uint16")], Reading())


def test_tokenizer_is_learnt_from_the_text(tmp_path: Path) -> None:
    """Catches text that does not come back from its tokens, an unlearnt vocabulary, and files transformers refuses."""
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    path = lines(tmp_path, {"text": "runs flat"})
    train_tokenizer(find_text_files([str(tmp_path / "a.txt"), str(path)]), Reading("text"), 400, tmp_path / "tok")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tok" / "tokenizer.json"))
    assert 257 < tokenizer.get_vocab_size() <= 400
    ids = tokenizer.encode(TEXT).ids
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) < len(TEXT) / 3
    assert tokenizer.decode(tokenizer.encode("\x00 unseen ☂").ids) == "\x00 unseen ☂"
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tok")
    assert (loaded.eos_token, loaded(TEXT)["input_ids"]) == (SEPARATOR, ids)
    corpus = make(tmp_path, [tmp_path / "a.txt"], Reading(), tokenizer=tmp_path / "tok", model_vocab_size=400)
    assert np.load(corpus.token_file).tolist() == [*ids, loaded.eos_token_id]
    with pytest.raises(DataError, match="holds token ids"):
        train_tokenizer(find_text_files([str(ids_in(tmp_path, [1], "uint16"))]), Reading(), 400, tmp_path / "tok")


def test_of_a_long_text_a_sample_is_learnt_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches memory in proportion to the text, a sample of its beginning only, and one that no seed decides."""
    monkeypatch.setattr(learning, "SAMPLE_BYTES", 20_000)
    source = lines(tmp_path, *({"text": f"{'early' if n < 2000 else 'late'} {n} ☂"} for n in range(4000)))
    files = find_text_files([str(source)])
    heard: list[tuple[int, int]] = []

    def learn(name: str, seed: int) -> str:
        learnt = train_tokenizer(
            files, Reading("text"), 300, tmp_path / name, seed=seed, told=lambda done, of: heard.append((done, of))
        )
        assert learnt.is_sample
        assert 8_000 < learnt.num_bytes < 20_100  # JSON's own characters are none of the text
        return (tmp_path / name / "tokenizer.json").read_text(encoding="utf-8")

    one, again, other = learn("one", 1), learn("again", 1), learn("other", 2)
    assert one == again != other
    words = Tokenizer.from_str(one).get_vocab()
    assert {"early", "late"} <= words.keys()
    assert all(a <= b for (a, _), (b, _) in pairwise(heard[:4000]))
    assert heard[3999] == heard[-1]
    assert 0 < heard[-1][0] <= heard[-1][1] == source.stat().st_size
    monkeypatch.undo()
    whole = train_tokenizer(files, Reading("text"), 300, tmp_path / "whole", seed=1)
    assert not whole.is_sample
    assert whole.num_bytes == sum(len(json.loads(row)["text"].encode()) for row in source.read_text().splitlines())


def test_a_run_keeps_the_tokenizer_that_it_learnt(tmp_path: Path) -> None:
    """Catches a model whose vocabulary is not the tokenizer's, and a resumed run that learns another tokenizer."""
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    run = tmp_path / "run"
    run.mkdir()
    config = parse(["--data.paths", str(tmp_path / "a.txt"), "--train-tokenizer", "320", "--data.seq-len", "8"])
    heard: list[str] = []
    prepared = prepare_run(config, run, pytest.fail, told=lambda work, done, of: heard.append(work))
    assert prepared.corpus is not None
    assert prepared.learnt is not None
    assert prepared.learnt.num_bytes == len(TEXT.encode())
    assert [*dict.fromkeys(heard)] == ["learning a tokenizer", "tokenising"]
    assert prepared.spec.kind("vocab").size == 320
    assert 257 < prepared.corpus.vocab_size <= 320
    write_config(prepared)
    assert (run / "model" / "tokenizer.json").is_file()
    saved = json.loads((run / "config.json").read_text())
    assert saved["model"]["vocab_size"] == 320
    resumed = config.model_copy(update={"resume": run})
    assert tokenizer_of(resumed, tmp_path / "later") == run / "model"
