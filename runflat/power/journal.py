"""What the agent owes: for each device that it may have moved, the limit to go back to. Saved before each write.

One small file, replaced whole: a crash leaves the old content or the new, never half of one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from runflat.power.wire import Uuid, Watts


class Owed(BaseModel):
    """A device that may not be at its nominal limit.

    `from_w` and `to_w` are the two limits that it may have been left at; `any_w` means that the journal was damaged and
    any limit within the site's range may be ours. `energy_j` is the device's counter before the write: a lower one
    later means that the driver was reloaded.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    nominal_w: Watts
    from_w: Watts
    to_w: Watts
    energy_j: float | None = None
    any_w: bool = False


_RECORDS = TypeAdapter(dict[Uuid, Owed])


class JournalError(Exception):
    """The journal cannot be understood: what is owed must be found out from the devices."""


class Journal(Protocol):
    """Where what is owed survives the agent."""

    def load(self) -> dict[str, Owed]:
        """What was saved last; empty if nothing ever was. Raises `JournalError`."""
        ...

    def save(self, owed: Mapping[str, Owed]) -> None:
        """Make this what is owed; when it returns it survives a power cut. Raises OSError."""
        ...


class FileJournal:
    """A journal in a file of a folder that only the agent can write."""

    def __init__(self, path: Path):
        self._path = path

    def load(self) -> dict[str, Owed]:
        """What is in the file."""
        try:
            return _RECORDS.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (ValidationError, OSError) as error:
            raise JournalError(str(error)) from error

    def save(self, owed: Mapping[str, Owed]) -> None:
        """Write a new file, flush it, put it in place, flush the folder."""
        draft = self._path.with_name(f".{self._path.name}.draft")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(_RECORDS.dump_json(dict(owed), indent=1) + b"\n")
            file.flush()
            os.fsync(descriptor)
        draft.rename(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class MemoryJournal:
    """A journal that lasts as long as this object: for emulated devices, which last no longer either."""

    def __init__(self) -> None:
        self._owed: dict[str, Owed] = {}

    def load(self) -> dict[str, Owed]:
        """What was saved last."""
        return dict(self._owed)

    def save(self, owed: Mapping[str, Owed]) -> None:
        """Remember it."""
        self._owed = dict(owed)
