"""Workers as processes of this machine, started from a fork server that has torch loaded; JSON messages over pipes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch.distributed import TCPStore

from runflat.errors import RunflatError, UserError
from runflat.parallel.comms import CommsError
from runflat.train.worker import HOST, Job, Worker

STORE_TIMEOUT_S = 60.0
LOST_PARENT = 3
"""Exit code of a worker whose parent is gone."""


class PipeLink:
    """A worker's end of the pipe; may be used by several threads."""

    def __init__(self, connection: Connection):
        """Wrap `connection`."""
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one message as JSON bytes; nothing is pickled."""
        with self._lock:
            self._connection.send_bytes(json.dumps(message).encode())


def _worker_process(connection: Connection, job: str, device_id: str, port: int, timeout_s: float) -> None:
    """Main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides what it means
    torch.set_num_threads(1)
    link = PipeLink(connection)
    stop = threading.Event()
    threading.Thread(target=_listen, args=(connection, stop), daemon=True).start()
    try:
        store = TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        Worker(Job.model_validate_json(job), device_id, store, link, stop).run()
    except BaseException as error:  # whatever it is, the parent must hear of it: it decides what the job does
        link.send(_error_message(error))
        os._exit(1)  # not by way of destructors, which may wait for peers that are stopping too


def _error_message(error: BaseException) -> dict[str, Any]:
    cause = "user" if isinstance(error, UserError) else "comms" if isinstance(error, CommsError) else "other"
    text = str(error) if isinstance(error, RunflatError) else f"{type(error).__name__}: {error}"
    return {
        "type": "error",
        "cause": cause,
        "class": type(error).__name__,
        "text": text,
        "traceback": "".join(traceback.format_exception(error)),
    }


def _listen(connection: Connection, stop: threading.Event) -> None:
    """Take orders from the parent; without a parent there is nobody to work for."""
    try:
        while True:
            if json.loads(connection.recv_bytes())["type"] == "stop":
                stop.set()
    except (EOFError, OSError):
        os._exit(LOST_PARENT)


class LocalWorkers:
    """The worker processes of one run, and the store at which they meet; listens on loopback only."""

    def __init__(self, job: Job, device_ids: Iterable[str]):
        """Start one process per device."""
        listener = socket.socket()
        listener.bind((HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        # The store takes over the listening socket: by itself it would listen on all interfaces.
        self._store = TCPStore(
            HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_TIMEOUT_S),
            master_listen_fd=listener.detach(),
        )
        context = multiprocessing.get_context("forkserver")
        model_type = job.hf_config["model_type"]
        context.set_forkserver_preload([__name__, f"transformers.models.{model_type}.modeling_{model_type}"])
        self._connections: dict[str, Connection] = {}
        self._processes: dict[str, multiprocessing.process.BaseProcess] = {}
        for device_id in device_ids:
            ours, theirs = context.Pipe()
            args = (theirs, job.model_dump_json(), device_id, port, STORE_TIMEOUT_S)
            process = context.Process(target=_worker_process, args=args, name=f"runflat-{device_id}", daemon=True)
            process.start()
            theirs.close()
            self._connections[device_id] = ours
            self._processes[device_id] = process

    def messages(self, timeout_s: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """(device id, message) pairs that arrive within `timeout_s`; returns after the first that come in.

        A process that has ended gives a last message {"type": "exit", "code": ...} after all that it has sent.
        """
        waiting = {connection: device_id for device_id, connection in self._connections.items()}
        for ready in wait(list(waiting), timeout_s):
            assert isinstance(ready, Connection)
            device_id = waiting[ready]
            try:
                yield device_id, json.loads(ready.recv_bytes())
            except (EOFError, OSError):
                ready.close()
                del self._connections[device_id]
                process = self._processes[device_id]
                process.join(STORE_TIMEOUT_S)
                yield device_id, {"type": "exit", "code": process.exitcode}

    def pid(self, device_id: str) -> int | None:
        """Process id of a device's worker."""
        return self._processes[device_id].pid

    def stop(self) -> None:
        """Ask all workers to end after the step in flight."""
        for connection in self._connections.values():
            try:
                connection.send_bytes(b'{"type": "stop"}')
            except OSError:
                continue  # it has ended already, which `messages` reports

    def kill(self) -> None:
        """End all workers at once and wait until they are gone."""
        for process in self._processes.values():
            if process.is_alive():
                process.kill()
        deadline = time.monotonic() + STORE_TIMEOUT_S
        for process in self._processes.values():
            process.join(max(deadline - time.monotonic(), 0.1))
