"""A worker as a process of its own: the entry function, and its end of the pipe to the controller."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from runflat.elastic.communicators import Communicators
from runflat.elastic.endpoint import interface_of
from runflat.elastic.formation import Address
from runflat.elastic.orders import Order, parse_order
from runflat.elastic.session import Session
from runflat.errors import RunflatError, UserError
from runflat.parallel.comms import CommsError
from runflat.parallel.nccl import PROCESS_SETTINGS, is_device_error, site_settings
from runflat.parallel.sockets import GroupSockets, Sockets
from runflat.train.job import Job

FAILED = 1
M_ARENA_MAX = -8
"""glibc's name of the option for `mallopt` (malloc.h)."""
NUM_ARENAS = 2


class PipeChannel:
    """A worker's end of the pipe: JSON bytes, nothing pickled; may be used by several threads."""

    def __init__(self, connection: Connection, incarnation: int):
        """Wrap `connection`; every message says that it comes from `incarnation`."""
        self._connection = connection
        self._incarnation = incarnation
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Deliver one message; nothing happens when the controller is gone."""
        text = json.dumps({**message, "incarnation": self._incarnation}).encode()
        with self._lock:
            try:
                self._connection.send_bytes(text)
            except OSError:
                return  # the listening thread notices the same and ends the work in order

    def receive(self) -> Order | None:
        """The next order; None when the controller is gone."""
        try:
            return parse_order(self._connection.recv_bytes())
        except (EOFError, OSError):
            return None


def error_message(error: BaseException) -> dict[str, Any]:
    """The message with which a worker ends that cannot go on."""
    cause = "user" if isinstance(error, UserError) else "comms" if isinstance(error, CommsError) else "other"
    if is_device_error(error):
        cause = "device"
    text = str(error) if isinstance(error, RunflatError) else f"{type(error).__name__}: {error}"
    return {
        "type": "error",
        "cause": cause,
        "class": type(error).__name__,
        "text": text,
        "traceback": "".join(traceback.format_exception(error)),
    }


def worker_process(
    connection: Connection,
    job: str,
    device_id: str,
    incarnation: int,
    store: Address,
    host: str,
    index: int | None = None,
) -> None:
    """Main function of a worker process.

    `store` is where the process groups meet, `host` the address at which other workers reach this one, `index` the
    number of the device on this machine; None where all devices of the job are here.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the controller decides
    torch.set_num_threads(1)
    _few_arenas()
    channel = PipeChannel(connection, incarnation)
    code = 0
    try:
        parsed = Job.model_validate_json(job)
        if index is None:
            index = _index(device_id, parsed.tp_full, parsed.replicas)
        returning = incarnation > 0 or ":" not in device_id
        groups = _groups(host, channel, parsed.emulated is not None)
        session = Session(parsed, device_id, channel, store, index, returning, groups)
        loop = _user_loop(parsed.loop) if parsed.loop else Session.run
        loop(session)
    except BaseException as error:  # whatever it is, the controller must hear of it: it decides what the job does
        channel.send(error_message(error))
        code = FAILED
    os._exit(code)  # not by way of destructors, which may wait for peers that are gone


def _groups(host: str, channel: PipeChannel, emulated: bool) -> GroupSockets:
    """What ends the groups of a generation here: gloo's on CPUs, NCCL's on GPUs."""
    if emulated or not torch.cuda.is_available():
        return Sockets(host)
    os.environ.update(PROCESS_SETTINGS)
    for name, value in site_settings(interface_of(host)).items():
        os.environ.setdefault(name, value)

    def stuck(why: str) -> None:
        channel.send(error_message(CommsError(f"{why}; its process ends, to be started again")))
        os._exit(FAILED)

    return Communicators(host, stuck)


def _few_arenas() -> None:
    """Have all threads allocate from few heaps; nothing happens where the C library is not glibc.

    Each generation has threads of its own, and each new thread may be given a heap that nobody gives back: 40 losses
    and returns of the tiny model left 40 to 70 MB behind; with two heaps 16 to 27, most of it by the tenth.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, NUM_ARENAS)


def _user_loop(name: str) -> Callable[[Session], None]:
    """The function that "file.py:function" names; the file is run as a module of its own."""
    path, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location("runflat_user_loop", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for the module that they stand in
    spec.loader.exec_module(module)
    loop: Callable[[Session], None] = getattr(module, function)
    return loop


def _index(device_id: str, tp_full: int, replicas: int) -> int:
    """Number of the device's place on this machine; spares (`s0`) come after the slots."""
    replica, _, slot = device_id.partition(":")
    return int(replica) * tp_full + int(slot) if slot else replicas * tp_full + int(device_id.removeprefix("s"))
