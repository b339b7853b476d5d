"""What a site allows: a file of root's that names the callers, the devices and how far their limits may go.

{"allow_uids": [1001], "max_lease_s": 60,
 "devices": {"GPU-5a1b...": {"nominal_w": 960, "ceiling_w": 1150}}}
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from runflat.errors import PowerError
from runflat.power.wire import MAX_DEVICES, Uuid, Watts

MAX_FILE_BYTES = 1 << 20
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DeviceLimits(_Part):
    """How far the limit of one device may go. Watts."""

    nominal_w: Watts
    """Limit in health. The device is boosted only if it is found at it, and is brought back to it."""
    ceiling_w: Watts
    """No limit above this is ever written."""
    floor_w: Watts | None = None
    """Lowest limit, for saving power and for calibration; none: nominal."""

    @property
    def low_w(self) -> float:
        """The lowest limit that may be written."""
        return self.nominal_w if self.floor_w is None else self.floor_w

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.low_w <= self.nominal_w <= self.ceiling_w:
            raise ValueError(
                f"floor {self.low_w:g} <= nominal {self.nominal_w:g} <= ceiling {self.ceiling_w:g} is wrong"
            )
        return self


class SiteLimits(_Part):
    """All that the agent is allowed to do, and for whom."""

    allow_uids: Annotated[tuple[int, ...], Field(min_length=1)]
    """Users who may talk to the agent."""
    max_lease_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Longest time without a sign of life of the controller after which nominal is restored."""
    budget_w: Watts | None = None
    """Bound on the sum of limits over the devices of this file; none: the ceilings alone count."""
    devices: Annotated[dict[Uuid, DeviceLimits], Field(min_length=1, max_length=MAX_DEVICES)]
    """By UUID; a device that is not here is never touched."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for uuid in self.devices:
            if uuid.startswith("MIG-"):
                raise ValueError(f"{uuid} is a part of a GPU; power belongs to the whole: give the GPU's UUID")
        total_w = sum(device.nominal_w for device in self.devices.values())
        if self.budget_w is not None and total_w > self.budget_w:
            raise ValueError(f"budget_w {self.budget_w:g} does not cover the nominal limits, {total_w:g} W in all")
        return self


def read_site(path: Path) -> SiteLimits:
    """The limits in a file that nobody but root (or the agent's own user) can change.

    Raises:
        PowerError: it cannot be read, others may write it or replace it, or a value is wrong.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            _check_owner(path, os.fstat(descriptor), is_folder=False)
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise PowerError(
            f"the limits file {path} cannot be read: {error.strerror}. Write one as docs/power.md shows."
        ) from error
    check_folders(path.parent)
    if len(text) > MAX_FILE_BYTES:
        raise PowerError(f"the limits file {path} is longer than {MAX_FILE_BYTES} bytes. That cannot be right.")
    try:
        return SiteLimits.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise PowerError(
            f"the limits file {path}: {where}: {first['msg']}. docs/power.md shows one that is right."
        ) from error


def check_folders(folder: Path) -> None:
    """Check that nobody but root (or this user) can replace what is in `folder`, all the way up.

    Raises:
        PowerError: a folder on the way can be written by others.
    """
    folder = folder.resolve()
    for place in (folder, *folder.parents):
        try:
            _check_owner(place, os.stat(place), is_folder=True)
        except OSError as error:
            raise PowerError(f"{place} cannot be examined: {error.strerror}.") from error


def _check_owner(path: Path, found: os.stat_result, *, is_folder: bool) -> None:
    if not is_folder and not stat.S_ISREG(found.st_mode):
        raise PowerError(f"{path} is not a plain file. The limits file must be one, and not a link.")
    if found.st_uid not in (0, os.geteuid()):
        raise PowerError(
            f"{path} belongs to user {found.st_uid}, who could change it. Give it to root: chown root {path}"
        )
    is_sticky = is_folder and found.st_mode & stat.S_ISVTX
    if found.st_mode & OTHERS_MAY_WRITE and not is_sticky:
        raise PowerError(f"{path} can be written by others (mode {stat.S_IMODE(found.st_mode):o}): chmod go-w {path}")
