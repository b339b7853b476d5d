"""Threads beside the main one, under names that the operating system shows too: `top -H` tells who uses the CPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

MAX_NAME = 15
"""Characters that Linux keeps of a thread's name."""


def start_thread(name: str, work: Callable[[], object]) -> threading.Thread:
    """A daemon thread that does `work`; where threads cannot be named, it has no name outside Python."""

    def run() -> None:
        with contextlib.suppress(OSError):
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name[:MAX_NAME])
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
