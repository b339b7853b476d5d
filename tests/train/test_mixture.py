"""Several sources: shares that hold, and a place in each source that the number of a sample alone decides."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runflat.commands.prepare import prepare as prepare_run
from runflat.commands.train import parse
from runflat.errors import ConfigError, DataError
from runflat.train.data import Corpus
from runflat.train.mixture import BLOCK, Mixture, block_counts, data_from_json, mix


def numbered(num_sequences: int, num_holdout: int = 0) -> Corpus:
    """A corpus without text, for what only concerns the order."""
    return Corpus("none", 4, 257, 256, 0, num_sequences, num_holdout, f"{num_sequences}", "")


MIXED = Mixture((numbered(700, 3), numbered(40, 1), numbered(2000)), (700, 250, 50), 5)


@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_shares_follow_the_weights(weights: list[float]) -> None:
    """Catches a source that never comes, and blocks of another size than samples are counted in."""
    counts = block_counts(weights)
    assert sum(counts) == BLOCK
    assert min(counts) >= 1
    over = sum(1 for weight in weights if BLOCK * weight / sum(weights) < 1)
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - BLOCK * weight / sum(weights)) <= 1 + over
    assert block_counts((0.7, 0.3)) == (700, 300)


def test_each_block_has_its_shares_and_each_source_its_own_order() -> None:
    """Catches sequences of a source that are skipped or used twice in a pass, and sources that come in runs."""
    placed = MIXED.placed(0, 3 * BLOCK)
    for block in range(3):
        parts = Counter(part for part, _ in placed[block * BLOCK : (block + 1) * BLOCK])
        assert parts == {0: 700, 1: 250, 2: 50}
    for part in range(3):
        assert [number for found, number in placed if found == part] == list(range(3 * MIXED.counts[part]))
    runs = [part for part, _ in placed]
    assert sum(a != b for a, b in zip(runs, runs[1:], strict=False)) > 1000
    assert runs[:BLOCK] != runs[BLOCK : 2 * BLOCK]


@given(start=st.integers(0, 2500), count=st.integers(0, 1500))
def test_place_does_not_depend_on_how_it_is_asked_for(start: int, count: int) -> None:
    """Catches a mixture with a memory: after a loss or a resume a replica would read other sequences."""
    assert MIXED.placed(start, count) == WHOLE[start : start + count]


WHOLE = MIXED.placed(0, 4000)


def test_indices_count_through_the_parts_and_spare_what_is_held_out() -> None:
    """Catches two sources whose sequences share a number, and held-out sequences in training."""
    indices = MIXED.train_indices(0, 1000)
    held = {*MIXED.parts[0].holdout_indices.tolist(), *(700 + MIXED.parts[1].holdout_indices).tolist()}
    assert not held & set(indices.tolist())
    assert (MIXED.num_holdout, len(held)) == (4, 4)
    limits = [0, 700, 740, 2740]
    for (part, _), index in zip(MIXED.placed(0, 1000), indices.tolist(), strict=True):
        assert limits[part] <= index < limits[part + 1]
    assert data_from_json(json.loads(json.dumps(MIXED.to_json()))) == MIXED


def test_a_run_of_two_sources(tmp_path: Path) -> None:
    """Catches weights that are read but not used, and text that comes from the wrong source."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 4000)
    flags = ["--data.paths", str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), "--data.weights", "3", "1"]
    flags += ["--data.seq-len", "8", "--data.holdout-sequences", "8", "--data.cache", str(tmp_path / "cache")]
    run = tmp_path / "run"
    run.mkdir()
    prepared = prepare_run(parse(flags), run, pytest.fail)
    corpus = prepared.corpus
    assert isinstance(corpus, Mixture)
    letters = corpus.train_sequences(0, BLOCK)[:, 0]
    assert Counter(letters.tolist()) == {ord("a"): 750, ord("b"): 250}
    assert corpus.holdout(0, corpus.num_holdout)[:, 0].tolist() == [ord("a")] * 5 + [ord("b")] * 2
    np.testing.assert_array_equal(corpus.holdout(4, 2), corpus.holdout(0, 7)[4:6])
    assert "75.0 %" in corpus.source
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 2
    assert data_from_json(prepared.job.corpus or {}) == corpus


def test_sources_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    """Catches ids and bytes in one batch, and weights for other sources than there are."""
    parts = iter([numbered(9), Corpus("none", 4, 300, -1, 0, 9, 0, "", "")])
    with pytest.raises(DataError, match=r"b has 300 token ids and a has 257"):
        mix(["a", "b"], [1, 1], seed=0, max_holdout_sequences=2, prepare=lambda paths, most: next(parts))
    with pytest.raises(ConfigError, match="2 numbers for 1 entries"):
        parse(["--data.paths", "a", "--data.weights", "1", "2"])
    with pytest.raises(ConfigError, match=r"data.weights has 0"):
        parse(["--data.paths", "a", "--data.weights", "0"])
