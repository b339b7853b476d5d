"""What stands in a source of training data: text, JSON lines or tables with a field of text, or token ids.

A *document* is a text file, a line of a .jsonl file where a field is named, or a row of a table that `datasets` saved.
A .bin file has token ids, little-endian, with whatever separators its writer put between documents.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from runflat.errors import DataError
from runflat.train.sources import TABLE_SUFFIX, TextFile, is_text, read_pieces, text_pieces

IdType = Literal["uint16", "uint32"]
ID_SUFFIX = ".bin"
LINES_SUFFIX = ".jsonl"
_CHUNK_IDS = 1 << 20
_ROWS = 256
DEFAULT_FIELD = "text"
"""Column of a table, where no field is named."""


@dataclass(frozen=True)
class Reading:
    """How sources are read: the field of JSON lines that is the text (none: they are plain text), the type of ids.

    The field names the column of a table too (none: `DEFAULT_FIELD`).
    """

    field: str | None = None
    id_type: IdType = "uint16"


def has_ids(file: TextFile) -> bool:
    """Whether a source holds token ids instead of text."""
    return file.path.suffix.lower() == ID_SUFFIX


def documents(file: TextFile, reading: Reading) -> Iterator[Iterator[str]] | None:
    """The documents of a source of text, each in pieces; None if it is not text, or cannot be opened.

    Raises:
        DataError: while a document is read: a line that is no JSON object with the field, a table without the column.
    """
    if file.path.suffix == TABLE_SUFFIX:
        return _rows(file.path, reading.field or DEFAULT_FIELD)
    if not is_text(file.path):
        return None
    if reading.field is not None and file.path.suffix.lower() == LINES_SUFFIX:
        return _lines(file.path, reading.field)
    return iter([read_pieces(file.path)] if file.size_bytes else [])


def _lines(path: Path, field: str) -> Iterator[Iterator[str]]:
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield text_pieces(_text_of(path, number, line, field))


def _rows(path: Path, field: str) -> Iterator[Iterator[str]]:
    """The texts of a column, read through a memory map."""
    try:
        from datasets import Dataset, Value
    except ImportError as error:
        raise DataError(
            f"{path} is a table that `datasets` saved, and that library is not installed: "
            f"pip install 'runflat[datasets]'."
        ) from error
    try:
        table = Dataset.from_file(str(path))
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise DataError(
            f"The table {path} cannot be read ({error}). Save the dataset again with save_to_disk."
        ) from error
    if table.features.get(field) not in (Value("string"), Value("large_string")):
        raise DataError(
            f"The table {path} has no text in the column {field!r}; its columns are {', '.join(table.column_names)}. "
            f"Name the one that holds the text with data.field."
        )
    for batch in table.select_columns([field]).iter(batch_size=_ROWS):
        for text in batch[field]:
            if text:
                yield text_pieces(text)


def _text_of(path: Path, number: int, line: str, field: str) -> str:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise DataError(
            f"Line {number} of {path} is not JSON ({error}). With data.field each line of a .jsonl file is one JSON "
            f"object; correct the line, or leave data.field out to read the file as plain text."
        ) from error
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        known = f"its fields are {', '.join(map(str, row))}" if isinstance(row, dict) else "it is no object"
        raise DataError(
            f"Line {number} of {path} has no text in the field {field!r}: {known}. Name the field that holds the text "
            f"with data.field."
        )
    return text


def read_ids(file: TextFile, reading: Reading, vocab_size: int) -> Iterator[npt.NDArray[np.integer[Any]]]:
    """Token ids of a .bin file in pieces, one dimension.

    Raises:
        DataError: the size is not a multiple of an id's, or an id is not below `vocab_size`.
    """
    kind = np.dtype(reading.id_type).newbyteorder("<")
    if file.size_bytes % kind.itemsize:
        raise DataError(
            f"{file.path} has {file.size_bytes} bytes, not a multiple of the {kind.itemsize} of a {reading.id_type}. "
            f"Say with data.id_type what its ids are."
        )
    position = 0
    with file.path.open("rb") as stream:
        while len(ids := np.frombuffer(stream.read(_CHUNK_IDS * kind.itemsize), kind)):
            if int(ids.max()) >= vocab_size:
                where = int(np.argmax(ids >= vocab_size))
                raise DataError(
                    f"Token {position + where} of {file.path} is {int(ids[where])}, but there are {vocab_size} ids: "
                    f"check data.id_type ({reading.id_type} now), the model's vocabulary and data.tokenizer."
                )
            yield ids
            position += len(ids)
