"""Frames of a feed: a checked JSON header and raw tensor bytes over one TCP connection, with a checksum; no pickle.

A frame on the wire: magic, length of the header, length of the payload, CRC-32 of both, header, payload.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, TypeAdapter

from runflat.elastic.orders import Wire, parsed
from runflat.errors import RunError
from runflat.parallel.move import Slab
from runflat.parallel.staging import host_copy

MAGIC = b"RFF1"
_PREFIX = struct.Struct(">4sIQI")
MAX_HEADER_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 1 << 36
MAX_HELLO_BYTES = 4096
"""All that a stranger can make us read."""

SlabKey = tuple[str, int, int, int]
"""A slab as JSON: parameter, segment, first unit, unit after the last."""


class FeedError(RunError):
    """A feed has failed: a lost, late, damaged or unwanted peer. Training is not concerned."""


class Hello(Wire):
    """Source: who I am, and the proof that I may be here."""

    type: Literal["hello"] = "hello"
    source: str
    token: str


class Welcome(Wire):
    """Newcomer: go on."""

    type: Literal["welcome"] = "welcome"


class Refused(Wire):
    """Newcomer: you may not be here."""

    type: Literal["refused"] = "refused"
    text: str


class Announce(Wire):
    """Source: the pieces that will come, each at least once, with elements of `dtype`."""

    type: Literal["announce"] = "announce"
    dtype: str
    slabs: tuple[SlabKey, ...]


class Piece(Wire):
    """Source: a piece as of `committed` steps, of which `optimizer_step` were applied; weight and both moments."""

    type: Literal["piece"] = "piece"
    slab: SlabKey
    committed: int
    optimizer_step: int


class Gradient(Wire):
    """Source: the gradient with which a piece goes from `committed`-1 to `committed`, scaled and clipped."""

    type: Literal["gradient"] = "gradient"
    slab: SlabKey
    committed: int
    optimizer_step: int
    lr: float


class Skip(Wire):
    """Source: the step that made it `committed` was not applied."""

    type: Literal["skip"] = "skip"
    committed: int


class Alive(Wire):
    """Source: nothing to send, but here."""

    type: Literal["alive"] = "alive"


class Copy(Wire):
    """A copy for safe keeping: all that `device` held under the plan of `generation`, as of `progress`."""

    type: Literal["copy"] = "copy"
    device: str
    generation: int
    progress: dict[str, Any]


Frame = Hello | Welcome | Refused | Announce | Piece | Gradient | Skip | Alive | Copy
_FRAMES: TypeAdapter[Frame] = TypeAdapter(Annotated[Frame, Field(discriminator="type")])


def slab_key(slab: Slab) -> SlabKey:
    """The slab as it goes over the wire."""
    return (slab.param, slab.segment, slab.start, slab.stop)


@dataclass(frozen=True)
class FeedLimits:
    """Deadlines and sizes of a feed.

    `timeout_s` bounds each send, and how long a source may be silent; it says that it is alive every `alive_s`.
    `hello_s` is what a stranger has to prove itself. `piece_bytes` is the largest piece (weight and moments) of a
    parameter that is cut into units. `backlog_bytes` of unsent gradients, or `patience` commits in a row that find
    gradients of an earlier one unsent, mean that the link cannot keep up; None for twice the gradients of all pieces.
    """

    timeout_s: float = 60.0
    alive_s: float = 10.0
    hello_s: float = 5.0
    piece_bytes: int = 1 << 20
    backlog_bytes: int | None = None
    patience: int = 8


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, row-major; a view where it is contiguous and on the CPU."""
    whole = tensor.detach().contiguous() if tensor.device.type == "cpu" else host_copy(tensor)
    flat = whole.view(-1).view(torch.uint8)
    return flat.numpy().data


def payload_tensors(payload: bytearray, shape: Sequence[int], count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """`count` tensors of `shape` that lie one after the other in `payload`; they share its memory.

    Raises:
        FeedError: the payload has another length.
    """
    numel = torch.Size(shape).numel()
    if len(payload) != count * numel * dtype.itemsize:
        raise FeedError(f"a payload has {len(payload)} bytes, not {count} x {numel} elements of {dtype}.")
    flat = torch.frombuffer(payload, dtype=dtype)
    return [part.view(tuple(shape)) for part in torch.split(flat, numel)]


class Connection:
    """One end of a feed's connection. One thread sends, one receives."""

    def __init__(self, connected: socket.socket, peer: str, timeout_s: float):
        """Takes over the socket; `peer` names the other end in errors."""
        self._socket = connected
        self.peer = peer
        self.timeout_s = timeout_s
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(
        self, frame: Frame, tensors: Sequence[torch.Tensor] = (), pay: Callable[[int], object] | None = None
    ) -> int:
        """Send one frame; returns its bytes. `pay` is called with them before anything leaves (an emulated link).

        Raises:
            FeedError: the peer is gone, or did not take it in time.
        """
        header = frame.encode()
        parts = [tensor_bytes(tensor) for tensor in tensors]
        num_payload = sum(part.nbytes for part in parts)
        check = zlib.crc32(header)
        for part in parts:
            check = zlib.crc32(part, check)
        num_bytes = _PREFIX.size + len(header) + num_payload
        if pay is not None:
            pay(num_bytes)
        try:
            self._socket.settimeout(self.timeout_s)
            self._socket.sendall(_PREFIX.pack(MAGIC, len(header), num_payload, check) + header)
            for part in parts:
                self._socket.sendall(part)
        except TimeoutError as error:
            raise FeedError(f"{self.peer} did not take a frame within {self.timeout_s:.1f} s.") from error
        except OSError as error:
            raise FeedError(f"the connection to {self.peer} is lost: {error}.") from error
        return num_bytes

    def receive(
        self, max_header: int = MAX_HEADER_BYTES, max_payload: int = MAX_PAYLOAD_BYTES
    ) -> tuple[Frame, bytearray]:
        """The next frame and its payload.

        Raises:
            FeedError: the peer is gone or silent, or what came is damaged, too long or not a frame.
        """
        magic, num_header, num_payload, check = _PREFIX.unpack(self._read(_PREFIX.size))
        if magic != MAGIC:
            raise FeedError(f"{self.peer} does not send frames.")
        if num_header > max_header or num_payload > max_payload:
            raise FeedError(f"{self.peer} sends a frame of {num_header} + {num_payload} bytes: too long.")
        header, payload = self._read(num_header), self._read(num_payload)
        if zlib.crc32(payload, zlib.crc32(header)) != check:
            raise FeedError(f"a frame from {self.peer} came damaged: its checksum is not the one that was sent along.")
        return parsed(_FRAMES, bytes(header), self.peer), payload

    def _read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        view = memoryview(data)
        deadline = time.monotonic() + self.timeout_s  # for all of it: a peer that drips keeps nobody waiting longer
        try:
            while view:
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                count = self._socket.recv_into(view)
                if not count:
                    raise FeedError(f"{self.peer} has closed the connection.")
                view = view[count:]
        except TimeoutError as error:
            raise FeedError(f"{self.peer} did not send a frame within {self.timeout_s:.1f} s.") from error
        except OSError as error:
            raise FeedError(f"the connection to {self.peer} is lost: {error}.") from error
        return data

    def shut(self) -> None:
        """End both directions now: whoever waits in `send` or `receive` gets a FeedError."""
        with contextlib.suppress(OSError):  # it is not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back. Only when nobody sends or receives."""
        self._socket.close()


def inode(opened: socket.socket) -> int:
    """Inode of a socket, by which an abort of process groups tells it from theirs."""
    return os.fstat(opened.fileno()).st_ino
