"""A tokenizer learnt from the training text: byte-level BPE, so that every text has tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from runflat.errors import DataError
from runflat.train.formats import Reading, documents, has_ids
from runflat.train.sources import TextFile

SEPARATOR = "<|endoftext|>"


def train_tokenizer(files: Sequence[TextFile], reading: Reading, num_ids: int, folder: Path) -> None:
    """Learn at most `num_ids` ids from the text of the sources; writes tokenizer.json and its configuration.

    256 ids are the bytes, one ends documents, the others are learnt: fewer than asked for where the text is short.

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
    tokenizer.train_from_iterator(_pieces(files, reading), trainer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SEPARATOR}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"The tokenizer cannot be written to {folder}: {error}. Choose another --run.") from error


def _pieces(files: Sequence[TextFile], reading: Reading) -> Iterator[str]:
    for file in files:
        for document in documents(file, reading) or ():
            yield from document
