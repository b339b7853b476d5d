"""Which files a corpus is made of: what the user named, or the running Python's own standard library."""

from __future__ import annotations

import codecs
import glob
import io
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from runflat.errors import DataError

# What a folder is searched for. A file that is named, or matched by a pattern, is read whatever it is called.
# fmt: off
TEXT_SUFFIXES = frozenset((
    ".c", ".cc", ".cfg", ".cpp", ".css", ".csv", ".cu", ".go", ".h", ".hpp", ".html", ".ini", ".java", ".js",
    ".json", ".jsonl", ".log", ".lua", ".md", ".pl", ".py", ".pyi", ".r", ".rb", ".rs", ".rst", ".scala", ".sh",
    ".sql", ".swift", ".tex", ".toml", ".ts", ".txt", ".xml", ".yaml", ".yml",
))
# fmt: on
# Folders of the standard library that hold no library text: tests, and copies of what stands elsewhere.
_STDLIB_SKIPPED = frozenset({"dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"})
_CHUNK_BYTES = 1 << 20
TABLE_SUFFIX = ".arrow"
Told = Callable[[int, int], object]
"""Hears how far a reading has come: bytes of the sources that are behind it (at least), bytes of all."""


def unheard(done_bytes: int, all_bytes: int) -> None:
    """Tells nobody."""


class HowFar:
    """Counts what is read of sources, one after the other, and tells it."""

    def __init__(self, files: Sequence[TextFile], told: Told):
        """Nothing is read yet."""
        self.all_bytes = sum(file.size_bytes for file in files)
        self._told = told
        self._before_bytes = self._here_bytes = 0

    def read(self, file: TextFile, num_bytes: int) -> None:
        """So much more of `file` is behind; what is said to be read beyond its size does not count."""
        self._here_bytes = min(self._here_bytes + num_bytes, file.size_bytes)
        self._told(self._before_bytes + self._here_bytes, self.all_bytes)

    def end(self, file: TextFile) -> None:
        """All of `file` is behind, whatever was said of it."""
        self._before_bytes += file.size_bytes
        self._here_bytes = 0


@dataclass(frozen=True)
class TextFile:
    """One file to read, with what tells whether it has changed since.

    Attributes:
        path: where it is, absolute.
        size_bytes: its size.
        mtime_ns: time of its last change, nanoseconds.
    """

    path: Path
    size_bytes: int
    mtime_ns: int


def find_text_files(paths: Sequence[str]) -> tuple[TextFile, ...]:
    """Files behind files, folders and glob patterns, each once, in an order that the machine does not influence.

    The entries keep their order; inside a folder or pattern files are ordered by relative path. Folders are searched
    recursively for `TEXT_SUFFIXES`, without hidden entries; one that `datasets` saved is its tables, in their order (of
    several splits name the one to take). No entry at all means the source code of the running
    Python's standard library. Files that are not text are found too: only reading tells.

    Raises:
        DataError: an entry that does not exist, a saved dataset that is damaged or has splits, or no file at all.
    """
    found: dict[Path, None] = {}
    for path in (path for entry in paths for path in _expand(entry)) if paths else _standard_library():
        found.setdefault(path.resolve())
    files = []
    for path in found:
        status = path.stat()
        files.append(TextFile(path, status.st_size, status.st_mtime_ns))
    if not files:
        looked_at = ", ".join(paths) if paths else f"{_stdlib_root()} (the standard library, as no data was named)"
        raise DataError(
            f"No text file was found in {looked_at}. A folder is searched for {' '.join(sorted(TEXT_SUFFIXES))}; name "
            f"other files themselves, or by a pattern such as 'folder/*', in data.paths."
        )
    return tuple(files)


def is_text(path: Path) -> bool:
    """True if the file can be opened and is UTF-8 text without NUL bytes; reads it in pieces."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                if b"\0" in chunk:
                    return False
                decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except (OSError, UnicodeDecodeError):
        return False
    return True


def read_pieces(path: Path) -> Iterator[str]:
    """Text of a UTF-8 file in pieces of about a mebibyte that end at a line's end, line endings as they stand.

    A line that is longer than that is cut.
    """
    with path.open(encoding="utf-8", newline="") as stream:
        yield from _pieces(stream)


def text_pieces(text: str) -> Iterator[str]:
    """A text in pieces like those of a file."""
    return _pieces(io.StringIO(text, newline=""))


def _pieces(stream: TextIO) -> Iterator[str]:
    lines: list[str] = []
    num_chars = 0
    while line := stream.readline(_CHUNK_BYTES):
        lines.append(line)
        num_chars += len(line)
        if num_chars > _CHUNK_BYTES:
            yield "".join(lines)
            lines, num_chars = [], 0
    if lines:
        yield "".join(lines)


def _expand(entry: str) -> Iterable[Path]:
    path = Path(entry).expanduser()
    if path.is_dir():
        return _tables(path) or _in_folder(path, TEXT_SUFFIXES, frozenset())
    if path.is_file():
        return [path]
    if glob.has_magic(entry):
        return [match for name in sorted(glob.glob(str(path), recursive=True)) if (match := Path(name)).is_file()]
    raise DataError(
        f"data.paths names {entry}, which is neither a file nor a folder (looked for at {path.absolute()}). Relative "
        f"paths start at the directory that runflat was started in."
    )


def _tables(folder: Path) -> list[Path]:
    """The tables of a folder that `datasets.Dataset.save_to_disk` wrote, in their order; none for another folder."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(part.name for part in folder.iterdir() if (part / "state.json").is_file())
        raise DataError(
            f"data.paths names {folder}, which `datasets` saved with the splits {', '.join(splits)}. Name the one to "
            f"train on, such as {folder / (splits or ['train'])[0]}."
        )
    state = folder / "state.json"
    if not (state.is_file() and (folder / "dataset_info.json").is_file()):
        return []
    try:
        tables = [folder / part["filename"] for part in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"data.paths names {folder}, and its state.json is not as `datasets` writes it ({error!r}). Save the "
            f"dataset again with save_to_disk."
        ) from error
    for table in tables:
        if table.suffix != TABLE_SUFFIX or not table.is_file():
            raise DataError(
                f"data.paths names {folder}, whose state.json lists {table.name}, and no such table is there. Copy the "
                f"whole folder, or save the dataset again with save_to_disk."
            )
    return tables


def _in_folder(root: Path, suffixes: frozenset[str], skipped: frozenset[str]) -> list[Path]:
    """Files under a folder with one of the suffixes, by relative path; hidden and skipped folders are left out."""
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = (name for name in subfolders if name not in skipped and not name.startswith("."))
        files += [
            Path(folder, name) for name in names if not name.startswith(".") and Path(name).suffix.lower() in suffixes
        ]
    return sorted((path for path in files if path.is_file()), key=lambda path: path.relative_to(root).as_posix())


def _stdlib_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _standard_library() -> list[Path]:
    """Source files of the running Python's standard library, without tests, copies and what its build generated."""
    files = _in_folder(_stdlib_root(), frozenset({".py"}), _STDLIB_SKIPPED)
    return [path for path in files if not path.name.startswith("_sysconfigdata")]
