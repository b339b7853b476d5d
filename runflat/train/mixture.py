"""Several sources with weights: which of them a sample comes from is a function of the sample's number and the seed.

Samples come in blocks of `BLOCK`. Each block has the same number of samples of each source, in an order of its own; the
samples of one source are those of its own corpus, in order. So a source that is small or heavy begins its next pass
earlier than others, and no state is needed to know where each of them stands.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from runflat.errors import DataError
from runflat.train.data import Corpus, hash_of, permuted

BLOCK = 1000
_BLOCK_STREAM = 2


@dataclass(frozen=True)
class Mixture:
    """Corpora of one vocabulary and sequence length, and how many of each block's samples come from each.

    To the rest of a run it is what `Corpus` is; sequence indices count through the parts, one after the other.
    """

    parts: tuple[Corpus, ...]
    counts: tuple[int, ...]
    seed: int

    @property
    def vocab_size(self) -> int:
        """Number of token ids that may occur."""
        return self.parts[0].vocab_size

    @property
    def num_holdout(self) -> int:
        """Held-out sequences of all parts."""
        return sum(part.num_holdout for part in self.parts)

    @property
    def source(self) -> str:
        """What was read, for the log."""
        shares = zip(self.counts, self.parts, strict=True)
        return "; ".join(f"{100 * count / BLOCK:.1f} % {part.source}" for count, part in shares)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all parts; equal fingerprints mean equal data."""
        return hashlib.sha256("".join(part.fingerprint for part in self.parts).encode()).hexdigest()

    def train_sequences(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Tokens of the samples start .. start+count-1, shape [count, seq_len]."""
        rows = np.empty((max(count, 0), self.parts[0].seq_len), np.int64)
        for part, number, mine in self._runs(start, count):
            rows[mine] = self.parts[part].train_sequences(number, len(mine))
        return rows

    def train_indices(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Sequence indices of the samples start .. start+count-1, shape [count]."""
        found = np.empty(max(count, 0), np.int64)
        for part, number, mine in self._runs(start, count):
            found[mine] = self._offsets[part] + self.parts[part].train_indices(number, len(mine))
        return found

    def _runs(self, start: int, count: int) -> Iterator[tuple[int, int, list[int]]]:
        """(part, its first sample, the places in start .. start+count-1 that it and the next ones of it have)."""
        if start < 0 or count < 0:
            raise ValueError(f"samples {start} .. +{count}: neither number may be negative")
        placed = self.placed(start, count)
        for part in range(len(self.parts)):
            mine = [place for place, (owner, _) in enumerate(placed) if owner == part]
            if mine:
                yield part, placed[mine[0]][1], mine

    def placed(self, start: int, count: int) -> list[tuple[int, int]]:
        """(part, sample of that part) of the samples start .. start+count-1."""
        found = []
        for block in range(start // BLOCK, (start + count - 1) // BLOCK + 1):
            parts = np.repeat(np.arange(len(self.parts)), self.counts)[
                permuted(np.arange(BLOCK), BLOCK, self.seed, _BLOCK_STREAM, block)
            ]
            first, last = max(start - block * BLOCK, 0), min(start + count - block * BLOCK, BLOCK)
            used = [block * share + int((parts[:first] == part).sum()) for part, share in enumerate(self.counts)]
            for part in parts[first:last].tolist():
                found.append((part, used[part]))
                used[part] += 1
        return found

    def holdout(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Tokens of the held-out sequences start .. start+count-1, part after part; the order never changes."""
        if start < 0 or count < 0 or start + count > self.num_holdout:
            raise ValueError(f"held-out sequences {start} .. +{count}: there are {self.num_holdout}")
        rows = []
        for part in self.parts:
            first, last = max(start, 0), min(start + count, part.num_holdout)
            if first < last:
                rows.append(part.holdout(first, last - first))
            start -= part.num_holdout
        return np.concatenate(rows) if rows else np.empty((0, self.parts[0].seq_len), np.int64)

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        """Sequence index at which each part begins."""
        sizes = [part.num_sequences for part in self.parts]
        return tuple(sum(sizes[:index]) for index in range(len(sizes)))

    def sample_hash(self, previous: str, step: int, samples: Iterable[int]) -> str:
        """Hash of the steps so far, as `Corpus.sample_hash`."""
        return hash_of(self.train_indices, previous, step, samples)

    def to_json(self) -> dict[str, Any]:
        """JSON form; `data_from_json` gives an equal mixture in another process."""
        return {"parts": [part.to_json() for part in self.parts], "counts": list(self.counts), "seed": self.seed}


def data_from_json(data: dict[str, Any]) -> Corpus | Mixture:
    """The corpus or mixture with the given JSON form."""
    if "parts" not in data:
        return Corpus.from_json(data)
    return Mixture(tuple(map(Corpus.from_json, data["parts"])), tuple(data["counts"]), data["seed"])


def block_counts(weights: Sequence[float]) -> tuple[int, ...]:
    """Samples of each source in a block: in proportion to the weights, to one sample, and at least one."""
    total = sum(weights)
    exact = [BLOCK * weight / total for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    by_need = sorted(range(len(exact)), key=lambda index: (counts[index] - exact[index], index))
    for turn in range(max(BLOCK - sum(counts), 0)):
        counts[by_need[turn % len(counts)]] += 1
    while sum(counts) > BLOCK:
        counts[counts.index(max(counts))] -= 1
    return tuple(counts)


def mix(
    paths: Sequence[str],
    weights: Sequence[float],
    *,
    seed: int,
    max_holdout_sequences: int,
    prepare: Callable[[Sequence[str], int], Corpus],
) -> Mixture:
    """A mixture of the sources `paths`, each an entry as `data.prepare` takes it.

    Held-out sequences are dealt to the sources by weight, at least one to each.

    Args:
        paths: the sources.
        weights: share of samples of each, in any unit.
        seed: seed of the order.
        max_holdout_sequences: most sequences to hold out.
        prepare: the corpus of some paths, with at most so many held-out sequences.

    Raises:
        DataError: a source is not usable, or has tokens of another kind.
    """
    counts = block_counts(weights)
    parts = [
        prepare([path], max(1, max_holdout_sequences * count // BLOCK))
        for path, count in zip(paths, counts, strict=True)
    ]
    for path, part in zip(paths, parts, strict=True):
        if (part.vocab_size, part.separator_id) != (parts[0].vocab_size, parts[0].separator_id):
            raise DataError(
                f"{path} has {part.vocab_size} token ids and {paths[0]} has {parts[0].vocab_size}: one holds ids and "
                f"the other text. Name the tokenizer that made the ids with data.tokenizer."
            )
    return Mixture(tuple(parts), counts, seed)
