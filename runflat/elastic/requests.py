"""How a person reaches a running job: a request is a file in the run's folder, the answer is one beside it.

RUN/requests/ID.json          {"action": "drain", "device": "1:3"}      written whole, by rename
RUN/requests/ID.reply.json    {"ok": true, "text": "..."}
RUN/devices.json              what the controller last said of each device
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from runflat.errors import ConfigError, RunError

MAX_PID = 1 << 31
POLL_S = 0.1
PATIENCE_S = 15.0
"""Longest wait for an answer."""
Action = Literal["drain", "kill", "return", "inject"]


class Request(BaseModel):
    """What a person wants of a device."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    action: Action
    device: str
    event: dict[str, Any] | None = None
    """For "inject": the fault, an object of a file of events."""


def write_whole(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file so that a reader sees all of it or none."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(data) + "\n", encoding="utf-8")
    draft.rename(path)


class Inbox:
    """The controller's side."""

    def __init__(self, run: Path):
        """Open the folder; what was asked of an earlier controller is forgotten."""
        self._folder = run / "requests"
        self._folder.mkdir(exist_ok=True)
        for path in self._folder.glob("*.json"):
            _forget(path)

    def take(self) -> list[tuple[str, Request]]:
        """(id, request) of all that has come in since; one that makes no sense is answered here."""
        found = []
        for path in sorted(self._folder.glob("*.json")):
            if path.name.startswith(".") or path.name.endswith(".reply.json"):
                continue
            try:
                found.append((path.stem, Request.model_validate_json(path.read_bytes())))
            except ValidationError as error:
                self.reply(path.stem, ok=False, text=f"not a request: {error.errors()[0]['msg']}")
            except OSError:
                continue  # a folder, or gone: whatever it is, training does not depend on it
            _forget(path)
        return found

    def reply(self, request: str, *, ok: bool, text: str) -> None:
        """Answer a request."""
        write_whole(self._folder / f"{request}.reply.json", {"ok": ok, "text": text})


def _forget(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def read_devices(run: Path) -> dict[str, Any]:
    """What the controller of `run` last said of its devices.

    Raises:
        ConfigError: there is no such run, or it was never started.
    """
    path = run / "devices.json"
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data["finished"], bool) or not 0 < data["controller_pid"] < MAX_PID:
            raise ValueError("a field has a value that no controller writes")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{run} is no run of this version: {path} cannot be used ({error}).") from error
    return data


def is_running(devices: Mapping[str, Any]) -> bool:
    """Whether the controller that wrote `devices` still runs on this machine."""
    if devices["finished"]:
        return False
    try:
        os.kill(int(devices["controller_pid"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def post(run: Path, number: str, action: Action, device: str, event: Mapping[str, Any] | None = None) -> None:
    """Put a request before the controller of `run`: those that it finds together it takes in the order of `number`."""
    wish = {"action": action, "device": device}
    write_whole(run / "requests" / f"{number}.json", wish if event is None else {**wish, "event": dict(event)})


def answer(run: Path, number: str) -> tuple[bool, str] | None:
    """(done, what the controller says) of a request that was posted; None as long as there is no answer."""
    path = run / "requests" / f"{number}.reply.json"
    if not path.exists():
        return None
    reply = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    return bool(reply["ok"]), str(reply["text"])


def ask(run: Path, action: Action, device: str, sleep: Callable[[float], None]) -> tuple[bool, str]:
    """Ask the controller of `run` for something; returns (done, its answer).

    Raises:
        ConfigError: the run is not running.
        RunError: there was no answer in time.
    """
    if not is_running(read_devices(run)):
        raise ConfigError(f"{run} is not running, so nothing can be asked of its devices. Resume it first.")
    number = uuid.uuid4().hex
    post(run, number, action, device)
    for _ in range(round(PATIENCE_S / POLL_S)):
        reply = answer(run, number)
        if reply is not None:
            return reply
        sleep(POLL_S)
    raise RunError(f"the controller of {run} gave no answer within {PATIENCE_S:.0f} s.")
