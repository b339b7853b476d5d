"""A tokenizer learnt from the training text, or a sample of it: byte-level BPE, so that every text has tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from runflat.errors import DataError
from runflat.train.formats import Reading, documents, has_ids
from runflat.train.sources import HowFar, TextFile, Told, unheard

SEPARATOR = "<|endoftext|>"
SAMPLE_BYTES = 1 << 28
"""Of a longer text a sample of about this size is learnt from: the trainer holds each different word in memory."""


@dataclass
class Learnt:
    """What a tokenizer was learnt from: `num_bytes` of text out of sources of `all_bytes`; how many ids it has."""

    num_bytes: int
    all_bytes: int
    num_ids: int = 0

    @property
    def is_sample(self) -> bool:
        """Whether not all of the text was looked at."""
        return self.all_bytes > SAMPLE_BYTES


def train_tokenizer(
    files: Sequence[TextFile], reading: Reading, num_ids: int, folder: Path, *, seed: int = 0, told: Told = unheard
) -> Learnt:
    """Learn at most `num_ids` ids from the text of the sources; writes tokenizer.json and its configuration.

    256 ids are the bytes, one ends documents, the others are learnt: fewer than asked for where the text is short. Of
    more than `SAMPLE_BYTES` of text a sample is taken, drawn by `seed` from all of it, by documents (long ones by
    mebibytes). `told` hears how far the text is read.

    Raises:
        DataError: a source holds ids instead of text, none is text, or the folder cannot be written.
    """
    ids = [file.path for file in files if has_ids(file)]
    if ids:
        raise DataError(f"{ids[0]} holds token ids: a tokenizer is learnt from text. Leave data.train_tokenizer out.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_ids,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    how_far = HowFar(files, told)
    learnt = Learnt(0, how_far.all_bytes)
    tokenizer.train_from_iterator(_sample(files, reading, seed, how_far, learnt), trainer)
    learnt.num_ids = tokenizer.get_vocab_size()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SEPARATOR}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"The tokenizer cannot be written to {folder}: {error}. Choose another --run.") from error
    return learnt


def _sample(files: Sequence[TextFile], reading: Reading, seed: int, how_far: HowFar, learnt: Learnt) -> Iterator[str]:
    """Pieces of the text, each with the same chance; `learnt` counts their bytes."""
    chance = SAMPLE_BYTES / max(1, learnt.all_bytes)
    drawn = random.Random(seed)
    for file in files:
        for piece in (piece for document in documents(file, reading) or () for piece in document):
            how_far.read(file, len(piece))  # at least: a character may have several bytes
            if drawn.random() < chance and learnt.num_bytes < SAMPLE_BYTES:
                learnt.num_bytes += len(piece.encode())
                yield piece
        how_far.end(file)
