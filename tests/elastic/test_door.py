"""Who is let in to the controller's channel, who is turned away, and what that costs the others."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from pydantic import ConfigDict

from runflat.check.live import footprint, until
from runflat.elastic.door import Came, Door, DoorLimits, Heard, Noted, Said, Went
from runflat.elastic.endpoint import Endpoint
from runflat.elastic.frames import Alive, Connection, FeedError, Hello
from runflat.elastic.listener import MAX_STRANGERS, Listener, introduce
from runflat.elastic.messages import parse_message
from runflat.elastic.orders import Wire
from runflat.elastic.proof import CHALLENGE_BYTES, HEAD_BYTES, MAGIC, StrangerError, call, framed
from runflat.errors import RunError

TOKEN = "a token that nobody guesses"
WAIT_S = 10.0


class Visited:
    """A door, and all that was heard at it so far."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.heard: list[Heard] = []

    def until(self, what: str, condition: Callable[[list[Heard]], object]) -> None:
        """Listens until what was heard fulfils the condition."""

        def listen() -> object:
            self.heard += self.door.take(0.0)
            return condition(self.heard)

        until(what, listen, WAIT_S)

    def noted(self) -> str:
        """Returns the lines of the log."""
        return "\n".join(event.text for event in self.heard if isinstance(event, Noted))


@pytest.fixture(params=["127.0.0.1", "::1"])
def visited(request: pytest.FixtureRequest) -> Iterator[Visited]:
    """Returns an open door, over IPv4 and over IPv6."""
    door = Door(TOKEN, request.param, limits=DoorLimits(hello_s=0.2, max_waiting=8))
    yield Visited(door)
    door.close()


def knock(endpoint: Endpoint) -> socket.socket:
    """Returns a connection of somebody who has proved nothing."""
    return socket.create_connection((endpoint.host, endpoint.port), WAIT_S)


def read_to_end(connection: socket.socket) -> bytes:
    """Returns all that comes until the other end closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(1 << 16):
            data += more
    return data


def works(visited: Visited) -> None:
    """Has somebody with the token call, speak, be answered and leave."""
    with call(visited.door.endpoint, TOKEN, lambda _: b"who I am", WAIT_S) as friend:
        visited.heard = [event for event in visited.heard if isinstance(event, Noted)]
        visited.until("the call", lambda heard: any(isinstance(event, Came) for event in heard))
        came = next(event for event in visited.heard if isinstance(event, Came))
        assert came.words == b"who I am"
        friend.sendall(framed(b"one") + framed(b"two")[:3])
        friend.sendall(framed(b"two")[3:])
        visited.until("two payloads", lambda heard: len([e for e in heard if isinstance(e, Said)]) >= 2)
        assert [event.payload for event in visited.heard if isinstance(event, Said)] == [b"one", b"two"]
        visited.door.send(came.peer, b"x" * 300_000)  # more than a socket's buffer takes at once
        answer = b""
        while len(answer) < 300_004:
            answer += friend.recv(1 << 16)
        assert answer == framed(b"x" * 300_000)
    visited.until("the end", lambda heard: Went(came.peer) in heard)


def test_who_has_the_token_is_served(visited: Visited) -> None:
    """Catches frames that are lost, joined or cut, and an end that nobody is told of."""
    works(visited)
    assert visited.noted() == ""


def test_a_wrong_token(visited: Visited) -> None:
    """Catches a proof that is not checked, and a caller who is not told why it does not come in."""
    with pytest.raises(StrangerError, match="our token is not the one it expects"):
        call(visited.door.endpoint, TOKEN + "s", lambda _: b"{}", WAIT_S)
    visited.until("a line", lambda _: "does not know the token" in visited.noted())
    works(visited)


def test_a_proof_is_worth_nothing_again(visited: Visited) -> None:
    """Catches a challenge that repeats: who has listened to a call could come in by saying the same."""
    said: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as between:

        def pass_on() -> None:
            caller, _ = between.accept()
            with caller, knock(visited.door.endpoint) as real:
                caller.sendall(real.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
                said.append(caller.recv(HEAD_BYTES + 2, socket.MSG_WAITALL))
                real.sendall(said[0])
                caller.sendall(real.recv(32, socket.MSG_WAITALL))

        thread = threading.Thread(target=pass_on)
        thread.start()
        call(Endpoint(*between.getsockname()[:2]), TOKEN, lambda _: b"{}", WAIT_S).close()
        thread.join()
    with knock(visited.door.endpoint) as replayed:
        replayed.sendall(said[0])
        assert len(read_to_end(replayed)) == CHALLENGE_BYTES
    visited.until("a line", lambda _: "does not know the token" in visited.noted())


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 70_000,
        pickle.dumps(print),
        MAGIC + b"\xff" * 80,
        MAGIC + b"\0" * 64 + b"\0\2" + b"[" * 2,
    ],
    ids=["http", "zeros", "pickle", "long", "unproved"],
)
def test_garbage(visited: Visited, garbage: bytes) -> None:
    """Catches words of a stranger that are read, kept or answered before it has proved itself."""
    with knock(visited.door.endpoint) as stranger:
        with contextlib.suppress(OSError):  # the other end may have hung up before it has all
            stranger.sendall(garbage)
        assert len(read_to_end(stranger)) <= CHALLENGE_BYTES
    visited.until("a line", lambda _: "refused" in visited.noted())
    assert not any(isinstance(event, Came | Said) for event in visited.heard)
    works(visited)


def test_somebody_who_says_nothing(visited: Visited) -> None:
    """Catches a stranger who may stay for ever, and one who keeps a friend waiting meanwhile."""
    with knock(visited.door.endpoint) as stranger:
        works(visited)
        assert len(read_to_end(stranger)) == CHALLENGE_BYTES
    visited.until("a line", lambda _: "did not prove itself within 0.2 s" in visited.noted())


def test_a_thousand_connections(visited: Visited) -> None:
    """Catches strangers who use up descriptors, threads or the log, or who keep a friend out."""
    before = footprint(os.getpid())
    with contextlib.ExitStack() as stack:
        for number in range(1000):
            stranger = stack.enter_context(knock(visited.door.endpoint))
            if number == 500:
                works(visited)
            if number >= 8:
                stranger.close()
        during = footprint(os.getpid())
        works(visited)
    assert during.num_threads == before.num_threads
    assert during.num_sockets - before.num_sockets <= 8 + 8 + 2
    visited.until("lines", lambda _: "refused" in visited.noted())
    visited.heard += visited.door.take(0.0)
    assert len(visited.noted().splitlines()) <= 3


@pytest.fixture
def log() -> list[str]:
    """Returns the lines for people."""
    return []


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest, log: list[str]) -> Iterator[Listener]:
    """Returns a worker's listener, which answers each frame of a friend with the same."""

    def echo(connection: Connection, source: str) -> None:
        with contextlib.suppress(FeedError):  # it has hung up
            while True:
                connection.send(connection.receive()[0])

    made = Listener("tested", TOKEN, echo, hello_s=0.2, timeout_s=WAIT_S, host=request.param, log=log.append)
    yield made
    made.close()


def is_served(listener: Listener) -> None:
    """Has somebody with the token call a worker's listener and be answered."""
    connected = socket.create_connection(listener.address, WAIT_S)
    friend = Connection(connected, "the listener", WAIT_S)
    introduce(friend, Hello(source="1:0", token=TOKEN), WAIT_S)
    friend.send(Alive())
    assert friend.receive()[0] == Alive()
    friend.close()


def test_a_workers_listener_serves_a_friend_among_strangers(listener: Listener, log: list[str]) -> None:
    """Catches strangers who make a worker start a thread for each, keep a friend out, or fill the log."""
    before = footprint(os.getpid())
    with contextlib.ExitStack() as stack:
        for number in range(300):
            stranger = stack.enter_context(socket.create_connection(listener.address, WAIT_S))
            with contextlib.suppress(OSError):  # it may have been turned away already
                stranger.sendall((b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000)[number % 3])
            if number % 2:
                stranger.close()
            if number % 50 == 0:
                assert footprint(os.getpid()).num_threads - before.num_threads <= MAX_STRANGERS + 1
            if number == 150:
                is_served(listener)
        is_served(listener)
    listener.close()
    assert 0 < len(log) <= 4
    assert all(line.startswith("tested: refused ") for line in log)
    told = sum(1 if " a call " in line else int(line.split()[2]) for line in log)
    assert told == 300


def test_a_strangers_words_in_the_log(listener: Listener, log: list[str]) -> None:
    """Catches a stranger who writes lines of his own, or a screen full of them, into the log."""
    with socket.create_connection(listener.address, WAIT_S) as stranger:
        connection = Connection(stranger, "the listener", WAIT_S)
        connection.send(Told(**{"type": "hello", "source": "1:0", "token": "x", "\n\x1b[2Jall is well" * 100: "x"}))
        assert read_to_end(stranger) == b""
    listener.close()
    (line,) = log
    assert line.isprintable()
    assert len(line) < 300


class Told(Wire):
    """A frame that says what it was told to."""

    model_config = ConfigDict(extra="allow")


def test_json_that_nests_without_end() -> None:
    """Catches a few kilobytes that end a thread by a recursion without bound."""
    with pytest.raises(RunError, match="no message of this version"):
        parse_message("1:2", b"[" * 4000)
