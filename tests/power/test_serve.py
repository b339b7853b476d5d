"""The agent's socket, in a thread: what callers do wrong, and that it costs nobody else anything."""

import contextlib
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runflat.power.client import AgentClient, LocalAgent, acquire, read, release, renew, set_limits
from runflat.power.fakes import CEILING_W, NOMINAL_W, FakeNode, site_limits
from runflat.power.serve import MAX_CLIENTS_OF_ONE_USER, PATIENCE_S, Server, listen
from runflat.power.wire import MAX_MESSAGE_BYTES, Failure, Granted, SetDone, Telemetry

READ = b'{"type": "read"}\n'
Start = Callable[..., tuple[FakeNode, AgentClient, Path]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a server over a node's agent, whose clock stands unless one is given. All end with the test."""
    with contextlib.ExitStack() as stack:

        def begin(*uids: int, clock: Callable[[], float] = lambda: 100.0) -> tuple[FakeNode, AgentClient, Path]:
            node = FakeNode(site=site_limits(allow_uids=uids or (os.geteuid(),)), now_s=clock())
            path = tmp_path / "s"
            listener = listen(path, None)
            stop, trigger = socket.socketpair()
            server = Server(node.agent, listener, stop, clock, lambda: None)
            thread = threading.Thread(target=server.run)
            thread.start()

            def end() -> None:
                trigger.send(b"x")
                thread.join(20)
                for part in (listener, stop, trigger):
                    part.close()
                assert not thread.is_alive()

            stack.callback(end)
            return node, AgentClient(path, timeout_s=20), path

        yield begin


def connect(path: Path, timeout_s: float = 20.0) -> socket.socket:
    """A raw connection."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    connection.connect(str(path))
    return connection


def answer(connection: socket.socket) -> dict[str, object]:
    """One line of the agent's."""
    with connection.makefile("rb") as file:
        found: dict[str, object] = json.loads(file.readline())
        return found


def test_a_lease_from_end_to_end(start: Start) -> None:
    """Catches a field that does not survive the socket, in either direction."""
    node, client, path = start()
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    granted = acquire(client, ["GPU-a", "GPU-b"], ttl_s=20.0, job="job")
    assert isinstance(granted, Granted)
    assert isinstance(renew(client, granted.lease), Granted)
    done = set_limits(client, granted.lease, {"GPU-a": 1000.0, "GPU-b": CEILING_W}, reason="lost 0:3")
    assert isinstance(done, SetDone)
    assert [state.enforced_w for state in done.devices] == [1000.0, CEILING_W]
    seen = read(client)
    assert isinstance(seen, Telemetry)
    assert [state.state for state in seen.devices] == ["leased", "leased", "free"]
    assert release(client, granted.lease).type == "released"
    assert node.limits() == [NOMINAL_W] * 3
    late = set_limits(client, granted.lease, {"GPU-a": 1000.0})
    assert isinstance(late, Failure)
    assert late.error == "no-lease"


def test_caller_who_is_not_allowed(start: Start) -> None:
    """Catches trust in whoever can open the socket: only the kernel's word about the caller counts."""
    node, client, _ = start(os.geteuid() + 1)
    reply = read(client)
    assert isinstance(reply, Failure)
    assert reply.error == "not-allowed"
    assert node.events()[-1] == "refused"


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"\n", "malformed"),
        (b"hello\n", "malformed"),
        (b"\xff\xfe\x00\n", "malformed"),
        (b"[" * 10_000 + b"\n", "malformed"),
        (b'{"type": "read", "more": 1}\n', "malformed"),
        (b'{"type": "format"}\n', "malformed"),
        (b'{"type": "set", "lease": "x", "limits_w": {"GPU-a": NaN}}\n', "malformed"),
        (b'{"type": "set", "lease": "x", "limits_w": {"GPU-a": "1000"}}\n', "malformed"),
        (b'{"type": "set", "lease": "x", "limits_w": {"GPU-a": -1}}\n', "malformed"),
        (b'{"type": "acquire", "devices": [], "ttl_s": 1}\n', "malformed"),
        (b'{"type": "acquire", "devices": ["GPU-a\\n"], "ttl_s": 1}\n', "malformed"),
        (b"x" * (MAX_MESSAGE_BYTES + 1), "oversized"),
    ],
)
def test_what_is_no_message(start: Start, sent: bytes, error: str) -> None:
    """Catches nonsense that is taken for a request, kills the agent, or keeps the connection."""
    node, client, path = start()
    with connect(path) as connection:
        connection.sendall(sent)
        assert answer(connection)["error"] == error
        assert connection.recv(1) == b""
    assert isinstance(read(client), Telemetry)
    assert node.written == []


def test_longest_message_and_several_at_once(start: Start) -> None:
    """Catches a limit that is off by one, and lines that wait in the buffer and are never served."""
    _, _, path = start()
    with connect(path) as connection, connection.makefile("rb") as file:
        longest = b'{"type": "read"' + b" " * (MAX_MESSAGE_BYTES - len(READ)) + b"}\n"
        assert len(longest) == MAX_MESSAGE_BYTES
        connection.sendall(longest)
        assert json.loads(file.readline())["type"] == "telemetry"
        connection.sendall(READ * 5)
        assert [json.loads(file.readline())["type"] for _ in range(5)] == ["telemetry"] * 5


def test_callers_who_never_send_and_never_read(start: Start) -> None:
    """Catches one caller that holds up another, and one that keeps its place for ever."""
    offset_s = 0.0
    node, client, path = start(clock=lambda: 100.0 + offset_s)
    silent, greedy, half = connect(path), connect(path), connect(path)
    with silent, greedy, half:
        half.sendall(b'{"type": "re')
        greedy.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            for _ in range(100_000):
                greedy.send(READ * 100)
        assert isinstance(read(client), Telemetry)
        assert isinstance(acquire(client, ["GPU-a"], 20.0), Granted)
        offset_s = PATIENCE_S
        assert isinstance(read(client), Telemetry)
        for connection in (silent, half):
            assert connection.recv(100) == b""
    assert [facts["error"] for event, facts in node.log if event == "refused"].count("timeout") >= 1


def test_two_hundred_at_once(start: Start) -> None:
    """Catches an agent that one user's crowd brings down or that serves nobody then; those too many are told so."""
    node, client, path = start()
    crowd = [connect(path) for _ in range(200)]
    with contextlib.ExitStack() as stack:
        for connection in crowd:
            stack.enter_context(connection)
        kinds = []
        for connection in crowd:
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(READ)
            kinds.append(str(answer(connection).get("error", "served")))
    assert kinds.count("served") == MAX_CLIENTS_OF_ONE_USER
    assert kinds.count("busy") == 200 - MAX_CLIENTS_OF_ONE_USER
    # The places are free again once the agent has seen that the crowd has gone.
    reply = read(client)
    while isinstance(reply, Failure) and reply.error == "busy":
        reply = read(client)
    assert isinstance(reply, Telemetry)


def test_silence_ends_the_lease(start: Start) -> None:
    """Catches leases that end only when somebody talks to the agent."""
    node, client, _ = start(clock=time.monotonic)
    granted = acquire(client, ["GPU-a"], ttl_s=0.2)
    assert isinstance(granted, Granted)
    set_limits(client, granted.lease, {"GPU-a": 1000.0})
    deadline_s = time.monotonic() + 30
    while "lease-ended" not in node.events():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.02)
    assert node.limits() == [NOMINAL_W] * 3


def test_local_agent_keeps_the_same_rules() -> None:
    """Catches devices of this process that stay boosted because nobody turns the agent's clock."""
    node = FakeNode()
    port = LocalAgent(site_limits(allow_uids=(0,)), node.devices, node.write_down, lambda: node.now_s)
    granted = acquire(port, ["GPU-a"], ttl_s=5.0)
    assert isinstance(granted, Granted)
    assert isinstance(set_limits(port, granted.lease, {"GPU-a": 1100.0}), SetDone)
    assert node.limits()[0] == 1100.0
    node.now_s += 5.0
    seen = read(port)
    assert isinstance(seen, Telemetry)
    assert seen.devices[0].limit_w == NOMINAL_W
    reply = renew(port, granted.lease)
    assert isinstance(reply, Failure)
    assert reply.error == "no-lease"


def test_nobody_there(tmp_path: Path) -> None:
    """Catches a controller that an absent, silent or babbling agent brings down or holds up."""
    client = AgentClient(tmp_path / "none", timeout_s=0.2)
    reply = read(client)
    assert isinstance(reply, Failure)
    assert reply.error == "unreachable"
    with listen(tmp_path / "none", None):
        reply = read(client)
        assert isinstance(reply, Failure)
        assert reply.error == "timeout"


@pytest.mark.parametrize("said", [b"what?\n", b'{"type": "released", "owed": []}\n', b""])
def test_agent_that_answers_nonsense(tmp_path: Path, said: bytes) -> None:
    """Catches an answer that is believed because it came."""
    with listen(tmp_path / "s", None) as listener:
        listener.setblocking(True)

        def babble() -> None:
            with listener.accept()[0] as connection:
                connection.recv(1000)
                connection.sendall(said)

        thread = threading.Thread(target=babble)
        thread.start()
        reply = read(AgentClient(tmp_path / "s", timeout_s=20))
        thread.join(20)
    assert isinstance(reply, Failure)
    assert reply.error == ("malformed" if said else "unreachable")
