"""What an injected event does to the worker that it strikes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from runflat.cluster.events import Event, EventKind
from runflat.elastic.corrupt import corrupt
from runflat.errors import RunError
from runflat.parallel.sockets import cut_connections
from runflat.train.engine import Engine

FOREVER_S = 1e9


class InjectedError(Exception):
    """The Python error that an injected `raise` raises."""


def suffer(event: Event, run: Path, engine: Engine) -> None:
    """Let `event` happen to this process, whose state is `engine`. Who stops is woken by the controller.

    Raises:
        InjectedError: for a `raise`.
    """
    if event.event is EventKind.KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    elif event.event is EventKind.STOP:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif event.event is EventKind.RAISE:
        raise InjectedError(f"injected at step {event.step}, phase {event.phase or 'forward'}")
    elif event.event is EventKind.SLOW:
        assert event.factor is not None
        engine.slow_down(event.factor, FOREVER_S if event.duration_s is None else event.duration_s)
    elif event.event is EventKind.CORRUPT:
        corrupt(engine, event.target or "weight", event.seed or 0)
    elif event.event is EventKind.FLAKE:
        assert event.peer is not None
        cut_connections(worker_pid(run, event.peer))


def announce_pid(run: Path, device: str) -> None:
    """Write down which process drives `device`, for tools that look at processes."""
    folder = run / "pids"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{device.replace(':', '-')}.json").write_text(json.dumps({"device": device, "pid": os.getpid()}))


def worker_pid(run: Path, device: str) -> int:
    """Process id of the worker of `device` on this machine.

    Raises:
        RunError: no worker of that name has announced itself.
    """
    path = run / "pids" / f"{device.replace(':', '-')}.json"
    try:
        return int(json.loads(path.read_text())["pid"])
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"the process of device {device} is not known: {path} cannot be read ({error}).") from error
