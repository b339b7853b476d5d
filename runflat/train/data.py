"""Training text as fixed-length token sequences in an order that depends on nothing but a seed.

Words: a *document* is one text file; documents are concatenated with a separator token and cut into *sequences* of
`seq_len` tokens, with no mask between documents. Sequences are numbered as they lie in the token file (sequence index).
*Samples* are numbered over the whole run: step k of a job with a global batch of B uses samples k*B .. (k+1)*B - 1,
and the sequence behind a sample number is a pure function of the seed. No rank, layout or failure enters it.

`prepare` runs once per run, in the process that starts it; workers rebuild the `Corpus` from its JSON form and only
map the token file into memory.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runflat.errors import DataError
from runflat.train.formats import Reading, has_ids
from runflat.train.sources import TextFile, Told, find_text_files, unheard
from runflat.train.tokens import Codec, TokenFile, cached_token_file, id_codec, load_codec

PLAIN = Reading()
"""Text as it stands."""
# Streams of random numbers that must differ although they share the user's seed.
_HOLDOUT_STREAM = 0
_ORDER_STREAM = 1
_NUM_ROUNDS = 8
_MIN_HALF_BITS = 4
_READ_AT_ONCE = 8
"""Sequences read before their pages are let go: with each one up to two mebibytes around it are mapped."""


@dataclass(frozen=True)
class Corpus:
    """Tokenised text, split into held-out and training sequences; the same in every process that holds its JSON form.

    Attributes:
        token_file: path of the .npy file with all tokens, one dimension, uint16 or uint32.
        seq_len: tokens per sequence.
        vocab_size: number of token ids that may occur; the model's vocabulary must not be smaller.
        separator_id: token id that follows each document; -1 where the source is token ids of another's making.
        seed: seed of the held-out selection and of the order of samples.
        num_sequences: whole sequences in the token file; the tokens after the last one are not used.
        num_holdout: sequences that are held out, never trained on.
        fingerprint: SHA-256 (hex) of all tokens; equal fingerprints mean equal data.
        source: what was read, for the log.
    """

    token_file: str
    seq_len: int
    vocab_size: int
    separator_id: int
    seed: int
    num_sequences: int
    num_holdout: int
    fingerprint: str
    source: str

    @property
    def num_train(self) -> int:
        """Number of training sequences; one pass over the data has as many samples."""
        return self.num_sequences - self.num_holdout

    def train_sequences(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Tokens of the samples start .. start+count-1, shape [count, seq_len]."""
        return self._read(self.train_indices(start, count))

    def train_indices(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Sequence indices of the samples start .. start+count-1, shape [count]; each pass is its own permutation."""
        if start < 0 or count < 0:
            raise ValueError(f"samples {start} .. +{count}: neither number may be negative")
        parts: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
        while count > 0:
            pass_number, offset = divmod(start, self.num_train)
            numbers = np.arange(offset, min(offset + count, self.num_train), dtype=np.int64)
            parts.append(self._skip_holdout(permuted(numbers, self.num_train, self.seed, _ORDER_STREAM, pass_number)))
            start, count = start + len(numbers), count - len(numbers)
        return np.concatenate(parts)

    def holdout(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Tokens of the held-out sequences start .. start+count-1, shape [count, seq_len]; the order never changes."""
        if start < 0 or count < 0 or start + count > self.num_holdout:
            raise ValueError(f"held-out sequences {start} .. +{count}: there are {self.num_holdout}")
        return self._read(self.holdout_indices[start : start + count])

    @cached_property
    def holdout_indices(self) -> npt.NDArray[np.int64]:
        """Sequence indices of the held-out set, ascending, shape [num_holdout]."""
        numbers = np.arange(self.num_holdout, dtype=np.int64)
        return np.sort(permuted(numbers, self.num_sequences, self.seed, _HOLDOUT_STREAM))

    def sample_hash(self, previous: str, step: int, samples: Iterable[int]) -> str:
        """`sample_hash` of one step, with the sequence indices filled in.

        Args:
            previous: hash of the steps before; "" at the first step.
            step: step number.
            samples: sample numbers that the step used, in any order.
        """
        return hash_of(self.train_indices, previous, step, samples)

    def to_json(self) -> dict[str, Any]:
        """JSON form, a few hundred bytes; `from_json` gives an equal corpus in another process."""
        return {fact.name: getattr(self, fact.name) for fact in fields(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Corpus:
        """Corpus with the given `to_json` form; the token file is opened at the first read."""
        return cls(**data)

    @cached_property
    def _tokens(self) -> tuple[mmap.mmap, npt.NDArray[np.integer[Any]]]:
        """Token file as a memory map, and its tokens by sequence, shape [num_sequences, seq_len]."""
        try:
            with open(self.token_file, "rb") as stream:
                np.lib.format.read_magic(stream)
                (length,), _, dtype = np.lib.format.read_array_header_1_0(stream)
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
                tokens = np.frombuffer(mapped, dtype, length, stream.tell())
        except (OSError, ValueError) as error:
            raise DataError(
                f"The token file {self.token_file} cannot be read: {error}. It is rebuilt from the text when the run "
                f"is started again; if it was deleted while the run was active, stop and resume the run."
            ) from error
        used = self.num_sequences * self.seq_len
        if len(tokens) < used:
            raise DataError(
                f"The token file {self.token_file} has {len(tokens)} tokens where {used} are expected: it was replaced "
                f"or cut off. Delete it and start the run again; it is rebuilt from the text."
            )
        return mapped, tokens[:used].reshape(self.num_sequences, self.seq_len)

    def _skip_holdout(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Sequence indices of the training sequences of these numbers, counted without the held-out ones."""
        before = self.holdout_indices - np.arange(self.num_holdout)  # training sequences before each held-out one
        return numbers + np.searchsorted(before, numbers, side="right")

    def _read(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        mapped, tokens = self._tokens
        found = np.empty((len(indices), self.seq_len), np.int64)
        for first in range(0, len(indices), _READ_AT_ONCE):
            part = slice(first, first + _READ_AT_ONCE)
            found[part] = tokens[indices[part]]
            mapped.madvise(mmap.MADV_DONTNEED)  # pages stay in the system's cache, but do not count as this process's
        return found


def prepare(
    paths: Sequence[str],
    *,
    cache_dir: Path,
    seq_len: int,
    seed: int = 0,
    tokenizer: Path | None = None,
    holdout_fraction: float = 0.01,
    max_holdout_sequences: int = 64,
    model_vocab_size: int | None = None,
    reading: Reading = PLAIN,
    told: Told = unheard,
) -> Corpus:
    """Corpus of the given text; tokenises it unless `cache_dir` has the tokens of the very same files already.

    Args:
        paths: files, folders (searched for text files) and patterns; none: the Python standard library's source code.
        cache_dir: where token files live; made if missing.
        seq_len: tokens per sequence, at least 2.
        seed: seed of the held-out selection and of the order of samples.
        tokenizer: a tokenizer.json or a directory that has one; None: bytes.
        holdout_fraction: part of the sequences that is held out, 0 to below 1; 0 holds out nothing, anything above at
            least one sequence.
        max_holdout_sequences: most sequences to hold out.
        model_vocab_size: rows of the model's embedding; a tokenizer with more ids is refused before any text is read.
        reading: how JSON lines and files of token ids are read.
        told: hears how far the text is tokenised, after each mebibyte or document.

    Raises:
        DataError: nothing readable, too little text for one training and one held-out sequence, an unusable
            tokenizer, a vocabulary larger than the model's, or a cache directory that cannot be written.
    """
    files = find_text_files(paths)
    codec = _codec(files, tokenizer, model_vocab_size)
    if model_vocab_size is not None and codec.vocab_size > model_vocab_size:
        raise DataError(
            f"The tokens have {codec.vocab_size} ids ({codec.name}) but the model's vocabulary has {model_vocab_size}. "
            f"Set model.vocab_size to {codec.vocab_size} or more, or choose the tokenizer that belongs to the model."
        )
    tokens = cached_token_file(cache_dir, files, codec, reading, told)
    num_sequences = tokens.num_tokens // seq_len
    num_holdout = 0
    if holdout_fraction > 0:
        num_holdout = max(1, min(int(num_sequences * holdout_fraction), max_holdout_sequences))
    if num_sequences - num_holdout < 1:
        raise DataError(
            f"The text has {tokens.num_tokens} tokens, too few for {1 + num_holdout} sequences of {seq_len} tokens "
            f"(one to train on, {num_holdout} held out). Give more text with data.paths or lower data.seq_len."
        )
    return Corpus(
        token_file=str(tokens.path),
        seq_len=seq_len,
        vocab_size=codec.vocab_size,
        separator_id=codec.separator_id,
        seed=seed,
        num_sequences=num_sequences,
        num_holdout=num_holdout,
        fingerprint=tokens.fingerprint,
        source=_described(tokens, codec, paths),
    )


def _described(tokens: TokenFile, codec: Codec, paths: Sequence[str]) -> str:
    """What was read, for the log."""
    return (
        f"{tokens.num_tokens:,} tokens ({codec.name}) from {tokens.num_documents} files of "
        + (", ".join(paths) if paths else "the Python standard library")
        + (f", {tokens.num_skipped} skipped as not UTF-8 text" if tokens.num_skipped else "")
    )


def _codec(files: Sequence[TextFile], tokenizer: Path | None, model_vocab_size: int | None) -> Codec:
    """The tokenizer's codec; without one, that of ids where all files hold ids, else that of bytes."""
    with_ids = [file.path for file in files if has_ids(file)]
    if tokenizer is not None or not with_ids:
        return load_codec(tokenizer)
    if len(with_ids) < len(files) or model_vocab_size is None:
        raise DataError(
            f"{with_ids[0]} holds token ids, and other files of data.paths hold text: without data.tokenizer that text "
            f"would become bytes. Name the tokenizer that made the ids, or give files of one kind."
        )
    return id_codec(model_vocab_size)


def sample_hash(previous: str, step: int, samples: Iterable[tuple[int, int]]) -> str:
    """SHA-256 (hex) over the samples of all steps so far: two runs with equal hashes used the same sequences.

    The order inside a step does not count, since it says only which replica had which sequence.

    Args:
        previous: hash of the steps before; "" at the first step.
        step: step number.
        samples: (sample number, sequence index) of each sample of the step.
    """
    digest = hashlib.sha256(bytes.fromhex(previous))
    ordered = sorted(samples)
    digest.update(struct.pack("<qq", step, len(ordered)))
    for number, index in ordered:
        digest.update(struct.pack("<qq", number, index))
    return digest.hexdigest()


def hash_of(
    train_indices: Callable[[int, int], npt.NDArray[np.int64]], previous: str, step: int, samples: Iterable[int]
) -> str:
    """`sample_hash` with the sequence indices looked up, all that lie between the first and the last sample at once."""
    numbers = list(samples)
    first = min(numbers, default=0)
    indices = train_indices(first, max(numbers, default=-1) - first + 1).tolist()
    return sample_hash(previous, step, [(number, indices[number - first]) for number in numbers])


def permuted(numbers: npt.NDArray[np.int64], count: int, *seeds: int) -> npt.NDArray[np.int64]:
    """Where a permutation of 0 .. count-1 takes each of `numbers`; nothing of size `count` is ever in memory.

    A Feistel network permutes the numbers below a power of two; whoever lands at `count` or above goes through again
    until it does not. Keys are raw output of numpy's SeedSequence, which is guaranteed to stay as it is.
    """
    half = np.uint64(max(_MIN_HALF_BITS, (max(count - 1, 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.SeedSequence(list(seeds)).generate_state(_NUM_ROUNDS, np.uint64)
    found = numbers.astype(np.uint64)
    outside = np.ones(len(found), dtype=bool)
    while outside.any():
        left, right = found[outside] >> half, found[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        found[outside] = (left << half) | right
        outside = found >= count
    return found.astype(np.int64)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Each value with its bits mixed: the finalizer of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
