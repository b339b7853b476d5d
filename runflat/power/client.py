"""The controller's side of the power agent: each call ends by its deadline, and an error is an answer.

`AgentClient` talks to `runflat power-agent` over its socket; `LocalAgent` keeps the same rules over emulated devices of
this process. Whoever holds a lease must say something with it (`renew`, `set_limits`) well within its `ttl_s`.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from runflat.power.agent import Agent, Caller
from runflat.power.devices import PowerBackend
from runflat.power.journal import MemoryJournal
from runflat.power.keeper import Audit
from runflat.power.site import SiteLimits
from runflat.power.wire import (
    MAX_REPLY_BYTES,
    Acquire,
    Failure,
    Granted,
    Read,
    Release,
    Released,
    Renew,
    Reply,
    Request,
    SetDone,
    SetLimits,
    Telemetry,
    parse_reply,
    to_line,
)

Expected = TypeVar("Expected", Telemetry, Granted, SetDone, Released)
DEFAULT_SOCKET = Path("/run/runflat/power.sock")


class PowerPort(Protocol):
    """Answers one request; never raises for what the other side does."""

    def ask(self, request: Request) -> Reply:
        """The agent's answer, or a `Failure` with error `unreachable` or `timeout`."""
        ...


def read(port: PowerPort) -> Telemetry | Failure:
    """What the agent knows of all its devices."""
    return _expect(port.ask(Read()), Telemetry)


def acquire(port: PowerPort, devices: Sequence[str], ttl_s: float, job: str = "") -> Granted | Failure:
    """A lease on these devices, all or none; error `unavailable` says which and why."""
    return _expect(port.ask(Acquire(devices=tuple(devices), ttl_s=ttl_s, job=job)), Granted)


def renew(port: PowerPort, lease: str) -> Granted | Failure:
    """A sign of life. Error `no-lease`: the limits are nominal again; start over."""
    return _expect(port.ask(Renew(lease=lease)), Granted)


def set_limits(port: PowerPort, lease: str, limits_w: Mapping[str, float], reason: str = "") -> SetDone | Failure:
    """Set limits. Error `device` names those that failed; `range`, `budget`, `not-leased`: nothing was set."""
    return _expect(port.ask(SetLimits(lease=lease, limits_w=dict(limits_w), reason=reason)), SetDone)


def release(port: PowerPort, lease: str) -> Released | Failure:
    """Back to nominal; the answer names devices that are not there yet."""
    return _expect(port.ask(Release(lease=lease)), Released)


class AgentClient:
    """A `PowerPort` over the agent's Unix socket; one connection a call, so that nothing has to be kept alive.

    Args:
        path: The agent's socket.
        timeout_s: Deadline of a call, all of it.
        clock: Seconds.
    """

    def __init__(self, path: Path, timeout_s: float = 5.0, clock: Callable[[], float] = time.monotonic):
        self._path = path
        self._timeout_s = timeout_s
        self._clock = clock

    def ask(self, request: Request) -> Reply:
        """One request, one answer."""
        deadline_s = self._clock() + self._timeout_s
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(self._timeout_s)
                connection.connect(str(self._path))
                # An agent that refuses the caller says so and hangs up, perhaps before this is sent: read its words.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(to_line(request))
                return parse_reply(self._read_line(connection, deadline_s))
        except TimeoutError:
            return Failure(error="timeout", text=f"{self._path}: no answer within {self._timeout_s:g} s")
        except ValueError as error:
            return Failure(error="malformed", text=f"{self._path}: the answer makes no sense: {error}")
        except OSError as error:
            return Failure(error="unreachable", text=f"{self._path}: {error.strerror or error}")

    def _read_line(self, connection: socket.socket, deadline_s: float) -> bytes:
        found = bytearray()
        while not found.endswith(b"\n"):
            left_s = deadline_s - self._clock()
            if left_s <= 0:
                raise TimeoutError
            connection.settimeout(left_s)
            chunk = connection.recv(65_536)
            if not chunk:
                raise ConnectionResetError("the agent hung up")
            found += chunk
            if len(found) > MAX_REPLY_BYTES:
                raise ValueError(f"it is longer than {MAX_REPLY_BYTES} bytes")
        return bytes(found)


class LocalAgent:
    """A `PowerPort` over devices of this process, under the same rules as the real agent; nothing survives it.

    Args:
        site: What is allowed; `uid` must be among `allow_uids`.
        backend: The devices.
        audit: Gets (event, facts).
        clock: Seconds.
        uid: User on whose behalf calls are made.
    """

    def __init__(
        self,
        site: SiteLimits,
        backend: PowerBackend,
        audit: Audit,
        clock: Callable[[], float] = time.monotonic,
        uid: int = 0,
    ):
        self._clock = clock
        self._caller = Caller(uid=uid, pid=0)
        self.agent = Agent(site, backend, MemoryJournal(), audit, lambda: secrets.token_hex(16), clock())

    def ask(self, request: Request) -> Reply:
        """The agent's answer, after it has looked at its devices if it was time to."""
        now = self._clock()
        self.agent.tick(now)
        return self.agent.handle(self._caller, request, now)


def _expect(reply: Reply, kind: type[Expected]) -> Expected | Failure:
    """The reply, if it is of the kind that answers the request; anything else is a malformed answer."""
    if isinstance(reply, kind | Failure):
        return reply
    return Failure(error="malformed", text=f"the agent answered with '{reply.type}'")
