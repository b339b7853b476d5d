"""Sequences, their order and the held-out split depend on the text and the seed alone."""

import json
import mmap
import os
import subprocess
import sys
import sysconfig
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from runflat.errors import DataError
from runflat.train import sources, tokens
from runflat.train.data import Corpus, permuted, prepare, sample_hash
from runflat.train.formats import Reading
from runflat.train.sources import find_text_files, is_text, read_pieces

SEPARATOR = 256
LARGE_BYTES = 64 << 20


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def make(folder: Path, paths: Sequence[Path] = (), **options: Any) -> Corpus:
    merged: dict[str, Any] = {"cache_dir": folder / "cache", "seq_len": 4, "holdout_fraction": 0.0, **options}
    return prepare([str(path) for path in paths], **merged)


def numbered(num_sequences: int, num_holdout: int = 0, seed: int = 0) -> Corpus:
    """A corpus without text, for what only concerns the order."""
    return Corpus("none", 4, 257, SEPARATOR, seed, num_sequences, num_holdout, "", "")


def test_documents_are_joined_by_a_separator(tmp_path: Path) -> None:
    """Catches a missing separator, a lost or doubled byte at a cut, and files in another order than named."""
    second, first = write(tmp_path / "a.txt", "abc"), write(tmp_path / "b.txt", "d\r\nä")
    corpus = make(tmp_path, [first, second])
    expected = [*"d\r\nä".encode(), SEPARATOR, *b"abc", SEPARATOR]
    assert np.load(corpus.token_file).tolist() == expected
    in_file_order = np.argsort(corpus.train_indices(0, 2))
    assert corpus.train_sequences(0, 2)[in_file_order].tolist() == [expected[:4], expected[4:8]]
    assert corpus.train_sequences(0, 2).dtype == np.int64
    assert (corpus.vocab_size, corpus.separator_id, corpus.num_train) == (257, SEPARATOR, 2)


def test_long_documents_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches text lost or changed where one piece ends, a character cut in two among them."""
    monkeypatch.setattr(sources, "_CHUNK_BYTES", 7)
    text = "äöü\n" * 5 + "one line longer than any piece ☃☃☃\r\nlast"
    path = write(tmp_path / "long.txt", text)
    assert is_text(path)
    assert "".join(read_pieces(path)) == text
    assert len(list(read_pieces(path))) > 3
    assert bytes(np.load(make(tmp_path, [path]).token_file)[:-1].astype(np.uint8)) == text.encode()


def test_folder_is_searched_for_text(tmp_path: Path) -> None:
    """Catches order by directory listing, hidden folders, and a file read twice that a pattern and a folder name."""
    for name in ("z.md", "sub/a.py", "sub/.git/b.txt", ".hidden.txt", "sub/picture.png", "B.TXT"):
        write(tmp_path / "text" / name, "x")
    entries = [str(tmp_path / "text"), str(tmp_path / "text" / "**" / "*.md"), str(tmp_path / "text" / "z.md")]
    found = [file.path.relative_to(tmp_path.resolve() / "text").as_posix() for file in find_text_files(entries)]
    assert found == ["B.TXT", "sub/a.py", "z.md"]
    named = find_text_files([str(tmp_path / "text" / "sub" / "picture.png")])
    assert len(named) == 1


@pytest.mark.parametrize("reading", [Reading(), Reading("text")])
def test_a_line_without_end_is_read_in_pieces(
    reading: Reading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches memory in proportion to a line, such as that of a corpus without line ends or a huge JSON document."""
    monkeypatch.setattr(sources, "_CHUNK_BYTES", 7)
    line = "☃ and " * 9
    path = write(tmp_path / "a.jsonl", json.dumps({"text": line}) if reading.field else line)
    sizes: list[int] = []
    encode = tokens._encode_bytes
    monkeypatch.setattr(tokens, "_encode_bytes", lambda piece: (sizes.append(len(piece)), encode(piece))[1])
    corpus = make(tmp_path, [path], reading=reading)
    assert bytes(np.load(corpus.token_file)[:-1].astype(np.uint8)) == line.encode()
    assert max(sizes) <= 14


def test_a_large_text_needs_little_memory(tmp_path: Path) -> None:
    """Catches a corpus, or an order of it, that is held in memory while it is tokenised, opened and read."""
    path = tmp_path / "large.txt"
    with path.open("w") as stream:
        for number in range(LARGE_BYTES >> 20):
            stream.write(f"{number:063}\n" * (1 << 14))
    tracemalloc.start()
    try:
        corpus = make(tmp_path, [path], seq_len=8, holdout_fraction=0.01)
        for start in (0, corpus.num_train - 2, 3 * corpus.num_train):
            corpus.train_sequences(start, 4)
        corpus.holdout(0, corpus.num_holdout)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert corpus.num_sequences == (LARGE_BYTES + 1) // 8
    assert peak_bytes < LARGE_BYTES / 4


class Pages:
    """The token file of a corpus and its map at once; knows how many sequences were mapped before they were let go."""

    def __init__(self, tokens: Any) -> None:
        self.tokens, self.mapped, self.most_mapped = tokens, 0, 0

    def __getitem__(self, indices: Any) -> Any:
        self.mapped += len(indices)
        self.most_mapped = max(self.most_mapped, self.mapped)
        return self.tokens[indices]

    def madvise(self, advice: int) -> None:
        assert advice == mmap.MADV_DONTNEED
        self.mapped = 0


def test_a_large_share_of_the_batch_maps_few_pages_at_once(tmp_path: Path) -> None:
    """Catches resident memory in proportion to the batch: with each sequence a mebibyte or two around it are mapped."""
    corpus = make(tmp_path, [write(tmp_path / "a.txt", "abcdefgh" * 1000)])
    expected = corpus.train_sequences(0, 999)
    assert expected.tolist() == corpus._tokens[1][corpus.train_indices(0, 999)].tolist()
    pages = Pages(corpus._tokens[1])
    corpus.__dict__["_tokens"] = (pages, pages)
    assert corpus.train_sequences(0, 999).tolist() == expected.tolist()
    assert 0 < pages.most_mapped <= 16
    assert pages.mapped == 0
    assert corpus.train_sequences(0, 0).shape == (0, 4)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_gigabyte_of_text_in_a_fraction_of_its_memory(tmp_path: Path) -> None:
    """Catches what only the system counts: pages of the token file that stay mapped, buffers of the tokenizer."""
    path = tmp_path / "large.txt"
    with path.open("w") as stream:
        for number in range(1 << 10):
            stream.write(f"{number:063}\n" * (1 << 14))
    command = [sys.executable, str(Path(__file__).parent / "support" / "read_corpus.py"), str(path), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    peaks = json.loads(ran.stdout)
    assert peaks["read"] - peaks["start"] < 100 * 1024, peaks


def test_tokenising_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches minutes without a word, a share above one, and progress that starts again with each file."""
    monkeypatch.setattr(sources, "_CHUNK_BYTES", 7)
    texts = ["äöü, and more\n" * 5, "short", "123 456 789\n" * 9]
    paths = [write(tmp_path / f"{number}.txt", text) for number, text in enumerate(texts)]
    heard: list[tuple[int, int]] = []
    make(tmp_path, paths, told=lambda done, of: heard.append((done, of)))
    size = sum(len(text.encode()) for text in texts)
    assert [of for _, of in heard] == [size] * len(heard)
    done = [at for at, _ in heard]
    assert done[0] == 0
    assert done == sorted(done)
    assert done[-1] == size
    assert len(set(done)) > 10


def test_files_that_are_no_text_are_skipped_and_counted(tmp_path: Path) -> None:
    """Catches a run that stops at the first binary file, or swallows it silently."""
    write(tmp_path / "text" / "a.txt", "good text")
    write(tmp_path / "text" / "b.txt", b"\xff\xfe\xe4")
    write(tmp_path / "text" / "c.txt", b"nul\0")
    write(tmp_path / "text" / "d.txt", b"cut off \xc3")
    write(tmp_path / "text" / "e.txt", b"")
    corpus = make(tmp_path, [tmp_path / "text"])
    assert np.load(corpus.token_file).tolist() == [*b"good text", SEPARATOR]
    assert "3 skipped" in corpus.source
    assert "from 1 files" in corpus.source


def test_default_is_the_standard_library_without_its_tests() -> None:
    """Catches test suites, installed packages or copies in the default text: the demo's loss would differ."""
    root = Path(sysconfig.get_path("stdlib")).resolve()
    paths = [file.path for file in find_text_files(())]
    names = [path.relative_to(root) for path in paths if path.is_relative_to(root)]  # some systems link a file or two
    assert len(names) > 100
    assert Path("argparse.py") in names
    assert not {"site-packages", "test", "tests", "idlelib", "lib2to3"} & {
        part for name in names for part in name.parts
    }
    assert all(name.suffix == ".py" and not name.name.startswith("_sysconfigdata") for name in names)


def test_tokens_are_cached_until_a_file_changes(tmp_path: Path) -> None:
    """Catches a stale token file after an edit, a cache that is never used, and temporary files that stay."""
    path = write(tmp_path / "a.txt", "some text")
    first = make(tmp_path, [path])
    written = os.stat(first.token_file)
    again = make(tmp_path, [path], seq_len=5)
    assert again.token_file == first.token_file
    assert os.stat(again.token_file).st_ino == written.st_ino
    assert again.source == first.source
    write(path, "other text")
    changed = make(tmp_path, [path])
    assert changed.token_file != first.token_file
    assert changed.fingerprint != first.fingerprint
    kept = {Path(first.token_file).stem, Path(changed.token_file).stem}
    assert {entry.stem for entry in (tmp_path / "cache").iterdir()} == kept


def test_nothing_is_left_of_a_token_file_that_failed(tmp_path: Path) -> None:
    """Catches temporary files of gigabytes that stay behind, or a broken token file that the next run takes."""
    with pytest.raises(DataError):
        make(tmp_path, [write(tmp_path / "a.txt", b"\xff")])
    assert list((tmp_path / "cache").iterdir()) == []


def test_fingerprint_is_of_the_tokens_not_of_the_place(tmp_path: Path) -> None:
    """Catches a resumed run that is refused because its text moved to another folder."""
    one = make(tmp_path, [write(tmp_path / "one" / "a.txt", "some text")])
    two = make(tmp_path, [write(tmp_path / "two" / "b.txt", "some text")])
    assert one.fingerprint == two.fingerprint


def test_worker_rebuilds_the_corpus_from_json(tmp_path: Path) -> None:
    """Catches a field that gets lost on the way to a worker, which would then train on other sequences."""
    path = write(tmp_path / "a.txt", "abcdefgh" * 20)
    corpus = make(tmp_path, [path], holdout_fraction=0.2, seed=3)
    corpus.train_indices(0, 1)
    worker = Corpus.from_json(json.loads(json.dumps(corpus.to_json())))
    assert worker == corpus
    np.testing.assert_array_equal(worker.train_sequences(5, 50), corpus.train_sequences(5, 50))
    np.testing.assert_array_equal(worker.holdout(1, 3), corpus.holdout(1, 3))


def test_missing_or_short_token_file_is_a_data_error(tmp_path: Path) -> None:
    """Catches a worker that reads zeros, or fails with numpy's words, when its token file is gone or cut off."""
    corpus = make(tmp_path, [write(tmp_path / "a.txt", "abcdefgh")])
    short = Corpus.from_json(corpus.to_json() | {"num_sequences": 9})
    with pytest.raises(DataError, match="has 9 tokens where 36 are expected"):
        short.train_sequences(0, 1)
    os.remove(corpus.token_file)
    with pytest.raises(DataError, match="cannot be read"):
        Corpus.from_json(corpus.to_json()).train_sequences(0, 1)


@given(num_train=st.integers(1, 40), num_holdout=st.integers(0, 10), seed=st.integers(0, 3), passes=st.integers(1, 3))
def test_each_pass_uses_each_training_sequence_once(num_train: int, num_holdout: int, seed: int, passes: int) -> None:
    """Catches held-out sequences in training, and sequences that a pass uses twice or never."""
    corpus = numbered(num_train + num_holdout, num_holdout, seed)
    used = Counter(corpus.train_indices(0, passes * num_train).tolist())
    assert set(used.values()) == {passes}
    assert used.keys() | set(corpus.holdout_indices.tolist()) == set(range(num_train + num_holdout))
    assert not used.keys() & set(corpus.holdout_indices.tolist())


@given(start=st.integers(0, 100), count=st.integers(0, 60))
def test_order_does_not_depend_on_how_it_is_asked_for(start: int, count: int) -> None:
    """Catches order that has a memory: a resumed run or another split of the batch would see other sequences."""
    whole = numbered(23, 3).train_indices(0, 160)
    corpus = numbered(23, 3)
    corpus.train_indices(7, 90)
    np.testing.assert_array_equal(corpus.train_indices(start, count), whole[start : start + count])


def test_order_is_the_same_everywhere() -> None:
    """Catches an order that changes with the numpy version or the machine: these numbers must never change."""
    corpus = numbered(12, 2, seed=7)
    assert corpus.holdout_indices.tolist() == [1, 5]
    assert corpus.train_indices(0, 20).tolist() == [2, 11, 8, 10, 9, 0, 4, 6, 7, 3, 10, 3, 7, 4, 6, 11, 9, 2, 0, 8]


def test_seeds_and_passes_give_different_orders() -> None:
    """Catches a seed that is ignored, and passes that repeat one another."""
    orders = [numbered(50, seed=seed).train_indices(at, 50).tolist() for seed in (0, 1) for at in (0, 50)]
    assert len({tuple(order) for order in orders}) == 4


def test_orders_are_as_good_as_random() -> None:
    """Catches a permutation that moves little, or sends neighbours to neighbours: batches would be of one document."""
    count = 10_000
    for seed in range(3):
        order = permuted(np.arange(count), count, seed)
        moved = np.abs(order - np.arange(count)).mean() / count
        steps = np.abs(np.diff(order)).mean() / count
        assert moved == pytest.approx(1 / 3, abs=0.02)
        assert steps == pytest.approx(1 / 3, abs=0.02)
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    thirds = np.bincount([int(permuted(np.arange(1), 3, seed)[0]) for seed in range(300)], minlength=3)
    assert thirds.min() > 75


def test_holdout_is_capped_and_never_empty_by_rounding(tmp_path: Path) -> None:
    """Catches a small text whose held-out set rounds to nothing, and a large one that gives away half its text."""
    path = write(tmp_path / "a.txt", "abcdefgh" * 10)
    assert make(tmp_path, [path]).num_holdout == 0
    assert make(tmp_path, [path], holdout_fraction=0.001).num_holdout == 1
    assert make(tmp_path, [path], holdout_fraction=0.5).num_holdout == 10
    assert make(tmp_path, [path], holdout_fraction=0.5, max_holdout_sequences=3).num_holdout == 3


def test_samples_outside_the_range_are_refused(tmp_path: Path) -> None:
    """Catches negative numbers that wrap around, and held-out reads past the end that come back short."""
    corpus = make(tmp_path, [write(tmp_path / "a.txt", "abcdefgh" * 10)], holdout_fraction=0.2)
    with pytest.raises(ValueError, match="negative"):
        corpus.train_indices(-1, 2)
    with pytest.raises(ValueError, match="there are 4"):
        corpus.holdout(3, 2)


def test_sample_hash_sees_samples_and_steps_but_not_their_order() -> None:
    """Catches a proof of equal samples that passes for other samples, or fails for another split of one batch."""
    base = sample_hash(sample_hash("", 0, [(0, 5), (1, 3)]), 1, [(2, 4), (3, 1)])
    assert base == sample_hash(sample_hash("", 0, [(1, 3), (0, 5)]), 1, [(3, 1), (2, 4)])
    others = [
        sample_hash(sample_hash("", 0, [(0, 5), (1, 3)]), 1, [(2, 4), (3, 2)]),  # another sequence
        sample_hash(sample_hash("", 0, [(0, 5), (1, 3)]), 1, [(2, 4)]),  # a sample lost
        sample_hash(sample_hash("", 0, [(0, 5), (1, 3)]), 1, [(2, 4), (3, 1), (3, 1)]),  # a sample twice
        sample_hash(sample_hash("", 0, [(0, 5)]), 1, [(1, 3), (2, 4), (3, 1)]),  # a sample in another step
        sample_hash(sample_hash("", 0, [(0, 5), (1, 3)]), 2, [(2, 4), (3, 1)]),  # a step skipped
    ]
    assert base not in others
    assert len(set(others)) == len(others)
    corpus = numbered(23, 3)
    pairs = list(zip(range(4, 8), corpus.train_indices(4, 4).tolist(), strict=True))
    assert corpus.sample_hash("", 1, [7, 4, 6, 5]) == sample_hash("", 1, pairs)


def save_tokenizer(folder: Path, tokens: Sequence[str], eos_token: object = None) -> Path:
    tokenizer = Tokenizer(models.WordLevel({token: 2 * i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if eos_token is not None:
        write(folder / "tokenizer_config.json", json.dumps({"eos_token": eos_token}))
    return folder


@pytest.mark.parametrize("eos_token", ["end", {"content": "end", "lstrip": False}])
def test_tokenizer_directory(tmp_path: Path, eos_token: object) -> None:
    """Catches a tokenizer's own truncation left on, ids with gaps above the vocabulary size, a wrong separator."""
    tokenizer = save_tokenizer(tmp_path / "tok", ["?", "end", "red", "tyre"], eos_token)
    corpus = make(tmp_path, [write(tmp_path / "a.txt", "red tyre blue red")], tokenizer=tokenizer)
    assert np.load(corpus.token_file).tolist() == [4, 6, 0, 4, 2]
    assert (corpus.vocab_size, corpus.separator_id) == (7, 2)
    same = make(tmp_path, [tmp_path / "a.txt"], tokenizer=tokenizer / "tokenizer.json")
    assert same.token_file == corpus.token_file
    assert make(tmp_path, [tmp_path / "a.txt"]).token_file != corpus.token_file


def test_tokenizer_without_configuration_uses_a_usual_separator(tmp_path: Path) -> None:
    """Catches documents that run into one another where only tokenizer.json is there."""
    tokenizer = save_tokenizer(tmp_path / "tok", ["?", "</s>", "red"])
    assert make(tmp_path, [write(tmp_path / "a.txt", "red red red")], tokenizer=tokenizer).separator_id == 2


@pytest.mark.parametrize(
    ("tokens", "eos_token", "message"),
    [
        (["?", "red"], None, "no end-of-document token"),
        (["?", "red"], "end", "names 'end' as eos_token, which is not in the vocabulary"),
    ],
)
def test_tokenizer_without_separator_is_refused(
    tmp_path: Path, tokens: list[str], eos_token: object, message: str
) -> None:
    """Catches a separator that is made up, such as id 0."""
    with pytest.raises(DataError, match=message):
        make(
            tmp_path, [write(tmp_path / "a.txt", "red")], tokenizer=save_tokenizer(tmp_path / "tok", tokens, eos_token)
        )


def test_large_vocabulary_is_stored_wide(tmp_path: Path) -> None:
    """Catches ids above 65,535 that wrap around in a 16-bit file."""
    tokens = ["?", "end", *(f"w{i}" for i in range(40_000))]
    tokenizer = save_tokenizer(tmp_path / "tok", tokens, "end")
    corpus = make(tmp_path, [write(tmp_path / "a.txt", "w39999 w0 w39998")], tokenizer=tokenizer)
    assert corpus.train_sequences(0, 1).tolist() == [[80_002, 4, 80_000, 2]]
