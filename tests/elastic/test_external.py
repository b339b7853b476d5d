"""The launcher of workers that are started elsewhere, and what they have at their end."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runflat import __version__
from runflat.check.live import is_alive, until
from runflat.elastic.attend import Attendant
from runflat.elastic.calls import OWN, PASSED, Caller, Ended, Later, Launch, Over, Word, parse_word
from runflat.elastic.door import Door
from runflat.elastic.launch_external import ExternalWorkers
from runflat.elastic.messages import Back, Exited, Heartbeat, Message, Ready
from runflat.elastic.orders import Go
from runflat.elastic.proof import Frames, call, framed
from runflat.elastic.seats import Seats
from runflat.errors import ConfigError, RunError

TOKEN = "a token that nobody guesses"
WAIT_S = 10.0


class NoJob:
    """Stands for a job: a worker process would be told this."""

    def model_dump_json(self) -> str:
        return "{}"


class Guest:
    """A `runflat worker` that only talks."""

    def __init__(self, door: Door, rank: int, node: str, version: str = __version__) -> None:
        self.caller = Caller(version=version, rank=rank, local_rank=0, node=node, host="127.0.0.1")
        self.line = call(door.endpoint, TOKEN, lambda _: self.caller.encode(), WAIT_S)
        self._frames = Frames()
        self._heard: list[bytes] = []

    def hear(self) -> bytes:
        """Returns the next frame; empty at the end."""
        while not self._heard:
            data = self.line.recv(1 << 16)
            if not data:
                return b""
            self._heard += self._frames.feed(data)
        return self._heard.pop(0)

    def word(self) -> Word:
        """Returns the next word of the controller."""
        frame = self.hear()
        assert frame[:1] == OWN
        return parse_word(frame[1:], "controller")

    def say(self, **fields: Any) -> None:
        """Passes on a message of its worker process."""
        self.line.sendall(framed(PASSED + json.dumps(fields).encode()))

    def ended(self, incarnation: int, code: int) -> None:
        self.line.sendall(framed(OWN + Ended(incarnation=incarnation, code=code).encode()))


class Hosting:
    """A launcher, what it said, and what it heard."""

    def __init__(self, **fields: Any) -> None:
        self.door = Door(TOKEN, "127.0.0.1")
        self.said: list[str] = []
        seats = Seats(("0:0", "0:1", "1:0", "1:1"), **fields)
        store: Any = (None, 1234)
        job: Any = NoJob()
        self.workers = ExternalWorkers(job, self.door, store, seats, self.said.append)
        self.heard: list[tuple[str, int, Message]] = []
        self.guests: list[Guest] = []

    def until(self, condition: Callable[[], object]) -> None:
        """Listens until `condition` holds."""

        def listen() -> object:
            self.heard += self.workers.messages(0.0)
            return condition()

        until("something to be heard", listen, WAIT_S)

    def has(self, device: str, kind: type) -> bool:
        return any(name == device and isinstance(message, kind) for name, _, message in self.heard)

    def calls(self, rank: int, node: str, version: str = __version__) -> Guest:
        """Returns a worker that has called."""
        self.guests.append(Guest(self.door, rank, node, version))
        return self.guests[-1]

    def close(self) -> None:
        for guest in self.guests:
            guest.line.close()
        self.workers.close(-WAIT_S)

    def guest(self, rank: int, node: str) -> Guest:
        """Returns a worker that has been seated."""
        guest = self.calls(rank, node)
        device = f"{rank // 2}:{rank % 2}"
        self.heard = [row for row in self.heard if row[0] != device]
        self.until(lambda: self.has(device, Back))
        return guest


@pytest.fixture
def hosting() -> Iterator[Hosting]:
    """Returns a launcher for two replicas of two."""
    made = Hosting()
    yield made
    made.close()


def test_a_life(hosting: Hosting) -> None:
    """Catches words that go to another device or another process, an end that is not told, or a start in vain."""
    guest = hosting.guest(2, "n1")
    assert hosting.heard == [("1:0", 0, Back(incarnation=0, domain="n1"))]
    hosting.workers.start("1:0", 0)
    assert guest.word() == Launch(device="1:0", incarnation=0, job="{}", store_port=1234)
    guest.say(type="ready", generation=7, incarnation=0)
    hosting.until(lambda: ("1:0", 0, Ready(incarnation=0, generation=7)) in hosting.heard)
    hosting.workers.send("1:0", Go(generation=7))
    assert guest.hear() == PASSED + Go(generation=7).encode()
    guest.ended(0, -9)
    hosting.until(lambda: ("1:0", 0, Exited(incarnation=0, code=-9)) in hosting.heard)
    hosting.workers.start("1:0", 1)
    assert guest.word() == Launch(device="1:0", incarnation=1, job="{}", store_port=1234)
    guest.line.close()
    hosting.until(lambda: ("1:0", 1, Exited(incarnation=1, code=None, absent=True)) in hosting.heard)
    hosting.workers.start("1:0", 2)
    hosting.until(lambda: ("1:0", 2, Exited(incarnation=2, code=None, absent=True)) in hosting.heard)
    hosting.guest(2, "n9")
    assert hosting.heard[-1] == ("1:0", 2, Back(incarnation=2, domain="n9"))


def test_who_finds_no_place(hosting: Hosting) -> None:
    """Catches two workers for one device, a replica over two nodes, other versions, and surplus that ends the job."""
    first = hosting.guest(0, "n0")
    cases = {
        "taken by rank 0 on n0": hosting.calls(0, "n5"),
        "span the domains n0 and n5": hosting.calls(1, "n5"),
        "the controller " + __version__: hosting.calls(1, "n0", "0.0.0"),
    }
    hosting.until(lambda: all(any(text in line for line in hosting.said) for text in cases))
    for text, guest in cases.items():
        word = guest.word()
        assert isinstance(word, Later)
        assert text in word.text
        assert guest.hear() == b""
    hosting.calls(4, "n5")
    hosting.until(lambda: any("one more than the 4 devices" in line for line in hosting.said))
    first.line.close()
    hosting.until(lambda: any("rank 0 on n0 has gone" in line for line in hosting.said))
    hosting.guest(0, "n5")


def test_garbage_of_one_of_ours_costs_only_its_own_device(hosting: Hosting) -> None:
    """Catches a worker of another build that ends the job by a word that the controller does not know."""
    guest = hosting.guest(0, "n0")
    hosting.workers.start("0:0", 0)
    guest.word()
    guest.line.sendall(framed(PASSED + b'{"type": "nonsense"}'))
    hosting.until(lambda: hosting.has("0:0", Exited))
    assert any("cut off" in line for line in hosting.said)
    assert guest.hear() == b""


def test_the_run_waits_for_all_or_for_a_time(hosting: Hosting) -> None:
    """Catches a run that begins without those who are on their way, or waits for ever, or for nobody."""
    with pytest.raises(RunError, match=r"no worker has called .* within 0 s"):
        hosting.workers.gather(0.0)
    for rank in range(3):
        hosting.calls(rank, f"n{rank // 2}")
    hosting.until(lambda: len([line for line in hosting.said if "drives" in line]) == 3)
    hosting.workers.gather(0.1)
    assert hosting.said[-1] == "3 of 4 workers are there; going on without 1:1"
    hosting.calls(3, "n1")
    hosting.workers.gather(WAIT_S)
    assert {device for device, _, message in hosting.workers.messages(0.0)} == {"1:1"}


def test_a_layout_that_spans_nodes_from_the_start_is_refused(hosting: Hosting) -> None:
    """Catches a job that runs slowly for days because ranks were given out in another order."""
    for rank in range(2):
        hosting.calls(rank, f"n{rank % 2}")
    with pytest.raises(ConfigError, match="replica 0 span the domains n0 and n1"):
        hosting.workers.gather(WAIT_S)


def test_at_the_end_all_are_told() -> None:
    """Catches workers that wait for a controller which has finished, and so are started for ever."""
    hosting = Hosting(may_span=True)
    guests = [hosting.guest(rank, f"n{rank}") for rank in (0, 1)]
    assert all(message.may_span and message.domain for _, _, message in hosting.heard if isinstance(message, Back))
    closing = threading.Thread(target=hosting.workers.close)
    closing.start()
    for guest in guests:
        assert guest.word() == Over()
        guest.line.close()
    closing.join(WAIT_S)
    assert not closing.is_alive()


CHILD = """
import json, os, sys
from multiprocessing.connection import Connection

connection = Connection(int(sys.argv[1]))
start = json.loads(connection.recv_bytes())
connection.send_bytes(json.dumps({"type": "hello", "pid": os.getpid(), "incarnation": start["incarnation"]}).encode())
try:
    while True:
        connection.send_bytes(connection.recv_bytes())
except EOFError:
    sys.exit(0)
"""
"""A worker process that says hello, repeats what it is told, and leaves when nobody is there any more."""


class Attending:
    """A `runflat worker` in a thread, whose worker process is a small script."""

    def __init__(self, folder: Path, door: Door, wait_s: float = WAIT_S, token: str = TOKEN) -> None:
        script = folder / "child.py"
        script.write_text(CHILD)
        self.said: list[str] = []
        self.door = door
        self.error: Exception | None = None
        self._attendant = Attendant(
            find=lambda: self.door.endpoint,
            token=lambda: token,
            about=lambda ours: Caller(version=__version__, rank=0, local_rank=0, node="n0", host=ours),
            say=self.said.append,
            wait_s=wait_s,
            environment=dict(os.environ),
            sleep=lambda _: None,
            command=(sys.executable, str(script)),
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._attendant.run()
        except (RunError, ConfigError) as error:
            self.error = error

    def finish(self) -> None:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


def pid_of(hosting: Hosting) -> int:
    """Returns the process id in the last hello."""
    found: list[int] = [getattr(message, "pid", 0) for _, _, message in hosting.heard if hasattr(message, "pid")]
    return found[-1]


def greeted(hosting: Hosting, incarnation: int) -> bool:
    return any(number == incarnation and hasattr(message, "pid") for _, number, message in hosting.heard)


def test_a_process_is_started_killed_and_started_again(hosting: Hosting, tmp_path: Path) -> None:
    """Catches a process that outlives its kill, an exit code that is lost, and words that are not passed on."""
    attending = Attending(tmp_path, hosting.door)
    hosting.until(lambda: hosting.has("0:0", Back))
    hosting.workers.start("0:0", 0)
    hosting.until(lambda: greeted(hosting, 0))
    first = pid_of(hosting)
    hosting.workers.signal("0:0", signal.SIGSTOP)
    hosting.workers.kill("0:0")
    hosting.until(lambda: ("0:0", 0, Exited(incarnation=0, code=-9)) in hosting.heard)
    assert not is_alive(first)
    hosting.workers.start("0:0", 1)
    hosting.until(lambda: greeted(hosting, 1))
    second = pid_of(hosting)
    beat: Any = Heartbeat(incarnation=1, generation=0, committed=0, phase="x" * 200_000)
    hosting.workers.send("0:0", beat)  # whatever it is given, the script repeats it
    hosting.until(lambda: ("0:0", 1, beat) in hosting.heard)
    closing = threading.Thread(target=hosting.workers.close)
    closing.start()
    attending.finish()
    closing.join(WAIT_S)
    assert attending.error is None
    assert not is_alive(second)


def test_the_controller_goes_and_another_one_comes(hosting: Hosting, tmp_path: Path) -> None:
    """Catches a worker that ends with its controller, or keeps its process while it waits for the next one."""
    attending = Attending(tmp_path, hosting.door)
    hosting.until(lambda: hosting.has("0:0", Back))
    hosting.workers.start("0:0", 0)
    hosting.until(lambda: greeted(hosting, 0))
    first = pid_of(hosting)
    resumed = Hosting()
    attending.door = resumed.door
    hosting.door.close()
    resumed.until(lambda: resumed.has("0:0", Back))
    assert not is_alive(first)
    assert any("the controller is gone" in line for line in attending.said)
    closing = threading.Thread(target=resumed.workers.close)
    closing.start()
    attending.finish()
    closing.join(WAIT_S)


def test_a_wrong_token_and_no_controller_are_said(hosting: Hosting, tmp_path: Path) -> None:
    """Catches a worker that calls for ever, or gives up for a reason that helps nobody."""
    attending = Attending(tmp_path, hosting.door, token="another token, also long")
    attending.finish()
    assert isinstance(attending.error, ConfigError)
    assert "Give both the same token" in str(attending.error)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    nobody = Door(TOKEN, "127.0.0.1", port)
    nobody.close()
    waiting = Attending(tmp_path, nobody, wait_s=0.0)
    waiting.finish()
    assert isinstance(waiting.error, RunError)
    assert "no controller for 0 s" in str(waiting.error)
