"""Reads JSON that somebody else may have damaged: files of lines that grow, and single objects with checked fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runflat.report.records import BadRowError, Row, number, parts

MOST_DEVICES = 1_000_000
"""More than that no layout has: it would only fill the memory of whoever reads it."""
BOOKS = ("goodput", "healthy_step_s", "wall_s", "time_s", "tokens_per_s", "holdout_loss", "num_params", "step")
NUMBERS = {"summary.json": BOOKS, "devices.json": BOOKS}
"""Keys that hold a number, or null."""


class JsonLines:
    """A file of JSON lines that grows, or is written anew."""

    def __init__(self, path: Path):
        """Nothing is read yet."""
        self.path = path
        self._offset = 0
        self._file_id: tuple[int, int] | None = None
        self._tail = b""

    def poll(self) -> tuple[bool, list[tuple[Row | None, str]]]:
        """(whether it was written anew, rows since the last look); a line that is no JSON object is None, with why."""
        try:
            with self.path.open("rb") as file:
                stat = self.path.stat()
                anew = self._file_id is not None and (
                    self._file_id != (stat.st_dev, stat.st_ino) or stat.st_size < self._offset
                )
                if anew:
                    self._offset, self._tail = 0, b""
                self._file_id = (stat.st_dev, stat.st_ino)
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return False, []
        self._offset += len(data)
        *lines, self._tail = (self._tail + data).split(b"\n")
        return anew, [_decode(line) for line in lines if line.strip()]

    @property
    def unfinished(self) -> bool:
        """Whether the last line has no end: cut off, or still being written."""
        return bool(self._tail.strip())


def _decode(line: bytes) -> tuple[Row | None, str]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return None, f"not JSON ({error})"
    return (row, "") if isinstance(row, dict) else (None, "no JSON object")


def read_json(path: Path) -> tuple[Mapping[str, Any], str | None]:
    """(object of a JSON file, what is wrong with it); a file that is not there is empty and has no problem."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, None
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{path.name} cannot be used: {error}"
    return (data, None) if isinstance(data, dict) else ({}, f"{path.name} cannot be used: it holds no JSON object")


def checked(name: str, data: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """(the object without fields that are not what a run writes, what is wrong with those)."""
    kept, problems = dict(data), []
    for key in NUMBERS.get(name, ()):
        try:
            number(data, key)
        except BadRowError as error:
            kept[key] = None
            problems.append(f"{name}: {error}")
    if name in NUMBERS:
        try:
            parts(data, "device_s")
        except BadRowError as error:
            kept["device_s"] = None
            problems.append(f"{name}: {error}")
    if name == "config.json" and data.get("layout") is not None:
        kept["layout"] = _layout(data["layout"])
        if kept["layout"] is None:
            problems.append(f"{name}: layout has no usable tp and replicas")
    return kept, problems


def _layout(layout: object) -> dict[str, int] | None:
    """The degree and replicas of a layout, or None if it is none."""
    if not isinstance(layout, Mapping):
        return None
    tp, replicas = layout.get("tp"), layout.get("replicas", 1)
    if not isinstance(tp, int) or not isinstance(replicas, int):
        return None
    return {"tp": tp, "replicas": replicas} if 0 < tp <= MOST_DEVICES and 0 < tp * replicas <= MOST_DEVICES else None
