"""Text files to one memory-mapped file of token ids: bytes as tokens, or a Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from runflat.errors import DataError
from runflat.train.formats import Reading, documents, has_ids, read_ids
from runflat.train.sources import HowFar, TextFile, Told, unheard

# Part of each cache key: raise it when the same files would give other tokens than before.
_FORMAT_VERSION = 1
_NUM_BYTE_VALUES = 256
# Names under which tokenizers keep their end-of-document token, tried where no configuration file says it.
_SEPARATOR_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[EOS]", "[SEP]")


@dataclass(frozen=True)
class Codec:
    """Text to token ids.

    Attributes:
        name: what it is, for messages.
        key: identity, for the cache: equal keys give equal tokens.
        vocab_size: one more than the largest id that may occur.
        separator_id: id that follows each document.
        encode: token ids of a piece of text, one dimension, without separator.
    """

    name: str
    key: str
    vocab_size: int
    separator_id: int
    encode: Callable[[str], npt.NDArray[np.integer[Any]]]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Smallest type that a token file needs: uint16, or uint32 above 65,536 ids."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")


@dataclass(frozen=True)
class TokenFile:
    """Tokens of a set of documents on disk.

    Attributes:
        path: the .npy file, one dimension.
        num_tokens: its length, separators included.
        num_documents: files that it holds.
        num_skipped: files left out as they are no UTF-8 text or cannot be opened.
        fingerprint: SHA-256 (hex) of the tokens.
    """

    path: Path
    num_tokens: int
    num_documents: int
    num_skipped: int
    fingerprint: str


def load_codec(tokenizer: Path | None) -> Codec:
    """Codec of a tokenizer.json or of a directory that has one; None gives bytes, with 256 as separator.

    Raises:
        DataError: no such file, not a tokenizer, or no end-of-document token.
    """
    if tokenizer is None:
        return Codec("bytes", "bytes", _NUM_BYTE_VALUES + 1, _NUM_BYTE_VALUES, _encode_bytes)
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.tokenizer is {tokenizer}, but {path} cannot be read ({error}). Name a tokenizer.json, or a "
            f"directory that has one; leave it out to train on bytes."
        ) from error
    try:
        encoder = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises plain Exception and nothing narrower
        raise DataError(
            f"data.tokenizer is {tokenizer}, but {path} is not a tokenizer that the installed tokenizers library "
            f"reads: {error}. Save it again with save_pretrained, or update tokenizers."
        ) from error
    encoder.no_truncation()
    encoder.no_padding()
    vocabulary = encoder.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError(f"The tokenizer {path} has no tokens. Name one that was trained, or leave data.tokenizer out.")
    return Codec(
        name=f"tokenizer {path}",
        key=hashlib.sha256(text.encode()).hexdigest(),
        vocab_size=max(vocabulary.values()) + 1,  # ids may have gaps, so the number of tokens is not enough
        separator_id=_separator_id(path, vocabulary),
        encode=lambda piece: np.asarray(encoder.encode(piece, add_special_tokens=False).ids, dtype=np.int64),
    )


def id_codec(vocab_size: int) -> Codec:
    """Codec of sources that hold token ids already, of a vocabulary of `vocab_size`; it encodes no text."""

    def encode(piece: str) -> npt.NDArray[np.integer[Any]]:
        raise AssertionError("a source of ids has no text")

    return Codec(f"ids below {vocab_size}", f"ids:{vocab_size}", vocab_size, -1, encode)


def cached_token_file(
    cache_dir: Path, files: Sequence[TextFile], codec: Codec, reading: Reading, told: Told = unheard
) -> TokenFile:
    """Token file of these files in `cache_dir`; written if it is not there yet, while `told` hears of it.

    It appears under its name only when it is complete, so another process never sees a part of one.

    Raises:
        DataError: none of the files is text, or the directory cannot be written.
    """
    path = cache_dir / f"tokens-{_cache_key(files, codec, reading)[:20]}.npy"
    facts_path = path.with_suffix(".json")
    if path.exists() and facts_path.exists():
        facts = json.loads(facts_path.read_text(encoding="utf-8"))
        return TokenFile(path=path, **facts)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="tokens-", suffix=".tmp", dir=cache_dir) as scratch:
            part = Path(scratch, path.name)
            tokens = _write(part, files, codec, reading, told)
            facts = {name: value for name, value in asdict(tokens).items() if name != "path"}
            facts_part = part.with_suffix(".json")
            facts_part.write_text(json.dumps(facts), encoding="utf-8")
            facts_part.replace(facts_path)
            part.replace(path)
    except OSError as error:
        raise DataError(
            f"The token file {path} cannot be written: {error}. It needs {codec.dtype.itemsize} bytes per token, for "
            f"{sum(file.size_bytes for file in files)} bytes of text. Free space, or choose another --run directory."
        ) from error
    return TokenFile(path=path, **facts)


def _write(path: Path, files: Sequence[TextFile], codec: Codec, reading: Reading, told: Told) -> TokenFile:
    """Write the tokens of the files one piece at a time; the length goes into the header at the end."""
    digest = hashlib.sha256()
    num_tokens = num_documents = num_skipped = 0
    how_far = HowFar(files, told)
    told(0, how_far.all_bytes)
    with path.open("wb") as stream:
        header_bytes = _write_header(stream, codec.dtype, 0)
        for file in files:
            if not file.size_bytes:
                continue
            pieces = _pieces(file, codec, reading)
            if pieces is None:
                num_skipped += 1
                continue
            num_documents += 1
            for num_bytes, ids in pieces:
                data = ids.astype(codec.dtype).tobytes()
                stream.write(data)
                digest.update(data)
                num_tokens += len(ids)
                how_far.read(file, num_bytes)
            how_far.end(file)
        stream.seek(0)
        if _write_header(stream, codec.dtype, num_tokens) != header_bytes:
            raise AssertionError("numpy pads the header so that its length does not depend on the shape")
        stream.flush()
        os.fsync(stream.fileno())
    if not num_documents:
        raise DataError(
            f"None of the {len(files)} files looked at is UTF-8 text with something in it ({num_skipped} could not be "
            f"decoded or opened, the others are empty); the first is {files[0].path}. Name text files in data.paths."
        )
    return TokenFile(path, num_tokens, num_documents, num_skipped, digest.hexdigest())


def _pieces(file: TextFile, codec: Codec, reading: Reading) -> Iterator[tuple[int, npt.NDArray[Any]]] | None:
    """(bytes read for it, token ids) of a source, with a separator after each document of text; None if not text.

    A character counts as one byte, so that what was read may be more.
    """
    if has_ids(file):
        return ((ids.nbytes, ids) for ids in read_ids(file, reading, codec.vocab_size))
    found = documents(file, reading)
    if found is None:
        return None
    separator = (0, np.array([codec.separator_id]))
    return (
        part
        for document in found
        for part in chain(((len(piece), codec.encode(piece)) for piece in document), [separator])
    )


def _write_header(stream: IO[bytes], dtype: np.dtype[Any], length: int) -> int:
    """Write an .npy header at the stream's position and return its size in bytes."""
    start = stream.tell()
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(stream, fields)
    return stream.tell() - start


def _cache_key(files: Sequence[TextFile], codec: Codec, reading: Reading) -> str:
    """SHA-256 (hex) of everything that decides what the token file holds."""
    facts = [[str(file.path), file.size_bytes, file.mtime_ns] for file in files]
    return hashlib.sha256(
        json.dumps([_FORMAT_VERSION, codec.key, codec.separator_id, asdict(reading), facts]).encode()
    ).hexdigest()


def _encode_bytes(text: str) -> npt.NDArray[np.integer[Any]]:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _separator_id(path: Path, vocabulary: dict[str, int]) -> int:
    """Id of the end-of-document token: as the files beside tokenizer.json name it, else one of the usual names."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        config_path = path.parent / name
        if not config_path.is_file():
            continue
        try:
            config = json.loads(config_path.read_text(encoding="utf-8"))
        except ValueError as error:  # JSON and UTF-8 errors are both ValueErrors
            raise DataError(f"{config_path} is not JSON ({error}). Save the tokenizer again.") from error
        token = config.get("eos_token") if isinstance(config, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            if token in vocabulary:
                return vocabulary[token]
            raise DataError(
                f"{config_path} names {token!r} as eos_token, which is not in the vocabulary of {path}. The two files "
                f"belong to different tokenizers: name the directory that holds both."
            )
    for token in _SEPARATOR_NAMES:
        if token in vocabulary:
            return vocabulary[token]
    raise DataError(
        f"The tokenizer {path} has no end-of-document token: no file beside it names an eos_token, and none of "
        f"{', '.join(_SEPARATOR_NAMES)} is in its vocabulary. Documents need a separator: put a tokenizer_config.json "
        f"with an eos_token beside it."
    )
