"""The first words on the controller's channel: each side proves that it knows the token, which itself is never sent.

    controller -> caller   magic, 32 random bytes
    caller -> controller   magic, 32 random bytes of its own, proof, length of what it says of itself, that
    controller -> caller   proof

Each proof is an HMAC-SHA-256 under the token over both random texts, the side that it comes from, and what is said with
it, so that none can be used again. Before a proof is right nothing else of what came is looked at. Afterwards frames go
to and fro: length, payload. Nothing is encrypted, and nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable

from runflat.elastic.endpoint import Endpoint
from runflat.errors import ConfigError, RunError

MAGIC = b"RFC1"
NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_CALLER_BYTES = 4096
"""All that a stranger can make us keep."""
MAX_FRAME_BYTES = 1 << 28
MIN_TOKEN_CHARACTERS = 16
SILENCE_S = 10
"""A connection whose other end does not answer for so long, not even its operating system, has ended."""
_LENGTH = struct.Struct(">I")
_HEAD = struct.Struct(f">4s{NONCE_BYTES}s{PROOF_BYTES}sH")
CHALLENGE_BYTES = len(MAGIC) + NONCE_BYTES
HEAD_BYTES = _HEAD.size


class StrangerError(RunError):
    """The other end of a connection is not one of ours."""


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_urlsafe(32)


def check_token(token: str, where: str) -> str:
    """The token without the space around it.

    Raises:
        ConfigError: it is too short to be a secret; says `where` it comes from, and never what it is.
    """
    token = token.strip()
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise ConfigError(
            f"the token in {where} has {len(token)} characters; it must have at least {MIN_TOKEN_CHARACTERS}, so that "
            f"nobody guesses it. `openssl rand -hex 32` makes one."
        )
    return token


def _proof(token: str, side: bytes, *parts: bytes) -> bytes:
    return hmac.new(token.encode(), b"\0".join((MAGIC, side, *parts)), hashlib.sha256).digest()


class Doorkeeper:
    """The controller's side of one call, without a socket: bytes go in, words of the caller come out."""

    def __init__(self, token: str):
        """A new call has come; `greeting` is to be sent first."""
        self._token = token
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._seen = bytearray()
        self.greeting = MAGIC + self._nonce

    def feed(self, data: bytes) -> tuple[bytes, bytes, bytes] | None:
        """Take what came. Once the caller has proved itself: its words, our proof to send, what came behind.

        Raises:
            StrangerError: it is not one of ours.
        """
        self._seen += data
        if not MAGIC.startswith(bytes(self._seen[: len(MAGIC)])):
            raise StrangerError("it does not speak our language")
        if len(self._seen) < HEAD_BYTES:
            return None
        _, nonce, proof, length = _HEAD.unpack_from(self._seen)
        if length > MAX_CALLER_BYTES:
            raise StrangerError(f"it wants to say {length} bytes of itself")
        if len(self._seen) < HEAD_BYTES + length:
            return None
        words = bytes(self._seen[HEAD_BYTES : HEAD_BYTES + length])
        if not hmac.compare_digest(proof, _proof(self._token, b"caller", self._nonce, nonce, words)):
            raise StrangerError("it does not know the token")
        return words, _proof(self._token, b"controller", nonce, self._nonce), bytes(self._seen[HEAD_BYTES + length :])


def framed(payload: bytes) -> bytes:
    """A payload as it goes over the wire."""
    return _LENGTH.pack(len(payload)) + payload


class Frames:
    """Cuts a stream of bytes into payloads."""

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._seen = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads that are complete now.

        Raises:
            StrangerError: one is announced that is too long.
        """
        self._seen += data
        found = []
        while len(self._seen) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._seen)
            if length > MAX_FRAME_BYTES:
                raise StrangerError(f"a frame of {length} bytes, more than {MAX_FRAME_BYTES}")
            end = _LENGTH.size + length
            if len(self._seen) < end:
                break
            found.append(bytes(self._seen[_LENGTH.size : end]))
            del self._seen[:end]
        return found


def be_patient(connection: socket.socket) -> None:
    """Have both directions end within about `SILENCE_S` where the other machine is gone without a word."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_S)


def call(door: Endpoint, token: str, words: Callable[[str], bytes], timeout_s: float) -> socket.socket:
    """Call the controller and say `words(our address)`; returns the connection once both sides have proved themselves.

    Raises:
        OSError: nobody answers there.
        StrangerError: what answers is no controller with our token, or it does not let us in.
    """
    deadline = time.monotonic() + timeout_s
    connection = socket.create_connection((door.host, door.port), timeout_s)
    try:
        greeting = _read(connection, CHALLENGE_BYTES, deadline, "it closed the connection before saying a word")
        if not greeting.startswith(MAGIC):
            raise StrangerError("what answers there is no controller of runflat")
        theirs, ours = greeting[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
        said = words(str(connection.getsockname()[0]))
        connection.sendall(_HEAD.pack(MAGIC, ours, _proof(token, b"caller", theirs, ours, said), len(said)) + said)
        proof = _read(connection, PROOF_BYTES, deadline, "it does not let us in: our token is not the one it expects")
        if not hmac.compare_digest(proof, _proof(token, b"controller", ours, theirs)):
            raise StrangerError("what answers there does not know our token: it is not our controller")
        be_patient(connection)
        connection.settimeout(None)
    except BaseException:  # also an interrupt: nobody else knows of this descriptor
        connection.close()
        raise
    return connection


def _read(connection: socket.socket, num_bytes: int, deadline: float, when_closed: str) -> bytes:
    """Exactly `num_bytes`, by `deadline`."""
    data = b""
    while len(data) < num_bytes:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            more = connection.recv(num_bytes - len(data))
        except ConnectionResetError:
            more = b""
        if not more:
            raise StrangerError(when_closed)
        data += more
    return data
