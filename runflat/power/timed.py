"""Backends around a backend: one that lets no call take forever, and one that only says what it would set."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar, cast

from runflat.power.devices import DeviceError, DeviceFacts, PowerBackend, Reading

Answer = TypeVar("Answer")
Job = tuple[Callable[[], Any], "Future[Any]"]


class TimedDevices:
    """A `PowerBackend` whose calls end within `timeout_s` with an answer or as `slow`.

    Each device has a thread of its own, so that one that hangs in its driver holds up no other. While a call still
    hangs the next one to that device is `slow` at once: calls to a device never overtake each other.
    """

    def __init__(self, backend: PowerBackend, timeout_s: float):
        self._backend = backend
        self._timeout_s = timeout_s
        self._workers: dict[str, _Worker] = {}

    def list_devices(self) -> tuple[DeviceFacts, ...]:
        """As the backend says."""
        return self._call("the list of devices", self._backend.list_devices)

    def read(self, uuid: str) -> Reading:
        """As the backend says."""
        return self._call(uuid, lambda: self._backend.read(uuid))

    def set_limit(self, uuid: str, limit_w: float) -> None:
        """As the backend does; after `slow` it may still happen."""
        self._call(uuid, lambda: self._backend.set_limit(uuid, limit_w))

    def _call(self, who: str, work: Callable[[], Answer]) -> Answer:
        worker = self._workers.get(who)
        if worker is None:
            worker = self._workers[who] = _Worker(who)
        if worker.last is not None and not worker.last.done():
            raise DeviceError("slow", f"{who}: an earlier call has not come back yet")
        answer: Future[Any] = Future()
        worker.last = answer
        worker.jobs.put((work, answer))
        try:
            return cast(Answer, answer.result(self._timeout_s))
        except TimeoutError as error:
            raise DeviceError("slow", f"{who}: no answer within {self._timeout_s:g} s") from error


class _Worker:
    """A thread that does one device's calls in order; it never keeps the process from ending."""

    def __init__(self, name: str):
        self.jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.last: Future[Any] | None = None
        threading.Thread(target=self._run, name=f"power {name}", daemon=True).start()

    def _run(self) -> None:
        while True:
            work, answer = self.jobs.get()
            try:
                answer.set_result(work())
            except BaseException as error:  # whatever it is belongs to whoever waits for the answer
                answer.set_exception(error)


class DryRunDevices:
    """A `PowerBackend` that writes nothing: what was set shows in its readings as if it had been."""

    def __init__(self, backend: PowerBackend):
        self._backend = backend
        self._limits_w: dict[str, float] = {}

    def list_devices(self) -> tuple[DeviceFacts, ...]:
        """As the backend says."""
        return self._backend.list_devices()

    def read(self, uuid: str) -> Reading:
        """As the backend says, but for the limit."""
        found = self._backend.read(uuid)
        limit_w = self._limits_w.get(uuid)
        return found if limit_w is None else replace(found, limit_w=limit_w, enforced_w=limit_w)

    def set_limit(self, uuid: str, limit_w: float) -> None:
        """Remember it."""
        self._backend.read(uuid)
        self._limits_w[uuid] = limit_w
