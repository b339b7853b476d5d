"""The worker process under `runflat worker`: `python -m runflat.elastic.worker_child DESCRIPTOR PARENT`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection

from runflat.elastic.calls import StartChild
from runflat.elastic.worker_process import worker_process

PR_SET_PDEATHSIG = 1
"""Linux's name of the option for `prctl` (prctl.h)."""


def die_with(parent: int) -> None:
    """Have this process killed when `parent` ends, so that it holds its device no longer; at once if it has ended."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def main(arguments: list[str]) -> None:
    """Hear what to be, and be it."""
    descriptor, parent = (int(text) for text in arguments)
    die_with(parent)
    connection = Connection(descriptor)
    start = StartChild.model_validate_json(connection.recv_bytes())
    place = (start.store, start.host, start.index)
    worker_process(connection, start.job, start.device, start.incarnation, *place)


if __name__ == "__main__":
    main(sys.argv[1:])
