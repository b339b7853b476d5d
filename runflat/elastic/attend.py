"""`runflat worker`: one process per device that calls the controller, starts the worker process, and watches it.

It has no torch and does no work, so that it can say how the worker ended, kill one that hangs, and start the next one.
What the worker and the controller say to each other it passes on.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from runflat.elastic.calls import OWN, PASSED, Caller, Ended, Later, Launch, Over, Signal, StartChild, parse_word
from runflat.elastic.endpoint import Endpoint
from runflat.elastic.proof import StrangerError, call
from runflat.elastic.stream import Stream
from runflat.errors import ConfigError, RunError

CHILD = (sys.executable, "-m", "runflat.elastic.worker_child")
"""Command of a worker process; the descriptor of its connection and our process id follow."""
CALL_S = 10.0
AGAIN_S = 1.0
"""Pause between two calls."""
MAX_REFUSED = 5
"""Calls in a row that are refused before the token is taken to be wrong."""
SAVE_S = 120.0
"""How long a worker process may take to save what it has when the controller is gone."""
EXIT_S = 2.0
"""How long it may take to leave when the run has ended; the controller has told it so."""
REAP_S = 10.0
TURN_S = 1.0


@dataclass
class _Child:
    """A worker process and the connection to it."""

    incarnation: int
    process: subprocess.Popen[bytes]
    stream: Stream


@dataclass
class Attendant:
    """What one `runflat worker` is and does.

    `find` says where the controller is, each time that it is called: it may have moved. `token` is read anew too.
    `wait_s` is the longest time without a controller.
    """

    find: Callable[[], Endpoint]
    token: Callable[[], str]
    about: Callable[[str], Caller]
    """Who we are, given our address as the controller sees it."""
    say: Callable[[str], None]
    wait_s: float
    environment: Mapping[str, str]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    command: tuple[str, ...] = CHILD
    _child: _Child | None = None
    _refused: int = 0
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def run(self) -> None:
        """Work until the run is over.

        Raises:
            ConfigError: the controller has another token.
            RunError: there is no controller for `wait_s`.
        """
        since, said = self.clock(), ""
        while True:
            try:
                door = self.find()
                connection = self._call(door, self.token())
            except (OSError, RunError, ConfigError) as error:
                if self._refused >= MAX_REFUSED:
                    raise ConfigError(
                        f"the controller and this worker do not know each other: {error}. Give both the same token "
                        f"(--token-file, or RUNFLAT_TOKEN_FILE or RUNFLAT_TOKEN in the environment)."
                    ) from error
                if self.clock() - since > self.wait_s:
                    raise RunError(
                        f"no controller for {self.wait_s:.0f} s (--wait-s): {error}. Start `runflat controller`, or "
                        f"name its address with --controller."
                    ) from error
                if str(error) != said:
                    said = str(error)
                    self.say(f"no controller yet: {said}")
                self.sleep(AGAIN_S)
                continue
            over, later = self._serve(connection, door)
            if over:
                return
            if later is None:
                since, said = self.clock(), ""
                self.say("the controller is gone; waiting for it, or for another one")
            elif later != said:
                said = later
                self.say(f"no place: {later}")
            self.sleep(AGAIN_S)

    def _call(self, door: Endpoint, token: str) -> socket.socket:
        try:
            connection = call(door, token, lambda ours: self.about(ours).encode(), CALL_S)
        except StrangerError:
            self._refused += 1  # once or twice may be a crowd of strangers that has pushed us out
            raise
        self._refused = 0
        return connection

    def _serve(self, connection: socket.socket, door: Endpoint) -> tuple[bool, str | None]:
        """Do what the controller says until it is gone: whether the run is over, or why we are to call again."""
        store_host = str(connection.getpeername()[0])
        ours = str(connection.getsockname()[0])
        upward = Stream(connection)
        self._selector.register(upward, selectors.EVENT_READ)
        try:
            while not upward.ended:
                self._await(upward)
                for payload in upward.receive():
                    if payload[:1] == PASSED:
                        if self._child is not None:
                            self._child.stream.send(payload[1:])
                        continue
                    word = parse_word(payload[1:], "the controller")
                    if isinstance(word, Over):
                        self._end_child(EXIT_S)
                        return True, None
                    if isinstance(word, Later):
                        return False, word.text
                    if isinstance(word, Signal) and self._child is not None:
                        self._child.process.send_signal(signal.Signals(word.number))
                    elif isinstance(word, Launch):
                        self.say(f"drives {word.device} for the controller at {door}, start {word.incarnation}")
                        self._launch(word, (store_host, word.store_port), ours)
                self._pass_on(upward)
            return False, None
        finally:
            self._selector.unregister(upward)
            upward.close()
            self._end_child(SAVE_S)

    def _await(self, upward: Stream) -> None:
        """Wait until something can be read or sent, at most `TURN_S`."""
        streams = [upward] if self._child is None else [upward, self._child.stream]
        for stream in streams:
            self._selector.modify(stream, selectors.EVENT_READ | (selectors.EVENT_WRITE if stream.is_full else 0))
        self._selector.select(TURN_S)
        for stream in streams:
            stream.flush()

    def _pass_on(self, upward: Stream) -> None:
        """Pass on what the worker process says, and at last how it ended."""
        child = self._child
        if child is None:
            return
        for payload in child.stream.receive():
            upward.send(PASSED + payload)
        if child.stream.ended:
            code = self._end_child(REAP_S)
            upward.send(OWN + Ended(incarnation=child.incarnation, code=code).encode())

    def _launch(self, order: Launch, store: tuple[str, int], ours: str) -> None:
        self._end_child(0.0)
        near, far = socket.socketpair()
        with far:
            process = subprocess.Popen(
                [*self.command, str(far.fileno()), str(os.getpid())],
                pass_fds=[far.fileno()],
                env=dict(self.environment),
                start_new_session=True,  # Ctrl-C of a terminal is for us; the controller decides about the worker
            )
        stream = Stream(near)
        about = self.about(ours)
        start = StartChild(
            device=order.device,
            incarnation=order.incarnation,
            job=order.job,
            store=store,
            host=about.host,
            index=about.local_rank,
        )
        stream.send(start.encode())
        self._child = _Child(order.incarnation, process, stream)
        self._selector.register(stream, selectors.EVENT_READ)

    def _end_child(self, patience_s: float) -> int | None:
        """Let the worker process end, or kill it after `patience_s`; returns its exit code."""
        child, self._child = self._child, None
        if child is None:
            return None
        self._selector.unregister(child.stream)
        child.stream.close()
        try:
            return child.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            child.process.kill()
        try:
            return child.process.wait(REAP_S)
        except subprocess.TimeoutExpired:  # it is stuck in a driver, say: how it ends is not known
            return None
