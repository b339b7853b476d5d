"""What a newcomer takes in: frames that are whole, from sources that may be there, for pieces that it needs."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
import torch

from runflat.elastic.frames import (
    MAGIC,
    Alive,
    Announce,
    Connection,
    FeedError,
    FeedLimits,
    Frame,
    Gradient,
    Hello,
    Piece,
    Refused,
    Skip,
    Welcome,
    payload_tensors,
    slab_key,
)
from runflat.elastic.pieces import check_pieces, cut_pieces
from runflat.elastic.receive import Receiver, Target
from runflat.errors import RunError
from runflat.parallel.move import Slab, slab_shape
from runflat.parallel.optimizer import OptimizerSettings
from runflat.plan.units import Kind, ModelSpec, ParamSpec, Segment

WAIT_S = 10.0
TOKEN = "sesame"
UP = ParamSpec("up", (20, 3), "sharded", True, 0, dim=0, segments=(Segment("ffn", 0), Segment("ffn", 10)))
DOWN = ParamSpec("down", (3, 10), "sharded", True, 1, dim=1, segments=(Segment("ffn", 0),))
NORM = ParamSpec("norm", (3,), "equal", False, 2)
SPEC = ModelSpec("tiny", (Kind("ffn", 10, 4),), (UP, DOWN, NORM), 3, 1, 1)
HELD = {"ffn": (1, 2)}
SLABS = (Slab("up", 0, 1, 3), Slab("up", 1, 1, 3), Slab("down", 0, 1, 2), Slab("down", 0, 2, 3), Slab("norm"))


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Connection]]:
    """Returns a raw socket and the connection at its other end."""
    listener = socket.create_server(("127.0.0.1", 0))
    raw = socket.create_connection(listener.getsockname(), WAIT_S)
    other, _ = listener.accept()
    listener.close()
    connection = Connection(other, "1:0", WAIT_S)
    yield raw, connection
    raw.close()
    connection.close()


def frame_bytes(pair: tuple[socket.socket, Connection], frame: Frame, *tensors: torch.Tensor) -> bytes:
    """Returns what goes over the wire for a frame."""
    raw, connection = pair
    size = connection.send(frame, tensors)
    data = b""
    while len(data) < size:
        data += raw.recv(size - len(data))
    return data


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_frames_arrive_as_they_were(pair: tuple[socket.socket, Connection], dtype: torch.dtype) -> None:
    """Catches bytes that are lost, rounded or in column order."""
    tensors = [torch.randn(5, 3).to(dtype), torch.randn(3, 5).to(dtype).t()]
    frame = Gradient(slab=slab_key(SLABS[0]), committed=7, optimizer_step=6, lr=0.1 + 0.2)
    pair[0].sendall(frame_bytes(pair, frame, *tensors))
    received, payload = pair[1].receive()
    assert received == frame
    for sent, came in zip(tensors, payload_tensors(payload, (5, 3), 2, dtype), strict=True):
        assert torch.equal(sent, came)
    with pytest.raises(FeedError, match="not 3 x 15 elements"):
        payload_tensors(payload, (5, 3), 3, dtype)


def test_each_flipped_bit_is_seen(pair: tuple[socket.socket, Connection]) -> None:
    """Catches a byte that no checksum covers: prefix, header or payload."""
    data = frame_bytes(pair, Skip(committed=3), torch.arange(4.0))
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        near, far = socket.socketpair(socket.AF_UNIX)
        with near, far:
            near.sendall(damaged)
            near.shutdown(socket.SHUT_WR)
            with pytest.raises(RunError):
                receive_from(far)


def receive_from(raw: socket.socket) -> tuple[Frame, bytearray]:
    """Returns the frame that waits in a socket, whatever its length fields say."""
    connection = object.__new__(Connection)  # without the TCP option that a pair of local sockets lacks
    connection.__dict__.update(_socket=raw, peer="1:0", timeout_s=WAIT_S)
    return connection.receive(1 << 20, 1 << 20)


def test_silence_ends(pair: tuple[socket.socket, Connection]) -> None:
    """Catches a read without a deadline."""
    pair[1].timeout_s = 0.1
    with pytest.raises(FeedError, match="1:0 did not send a frame within 0.1 s"):
        pair[1].receive()


@pytest.mark.parametrize("piece_bytes", [1, 100, 10_000])
def test_cut_pieces(piece_bytes: int) -> None:
    """Catches pieces that do not cover the units, or are larger than asked for without need."""
    slabs = [Slab("up", 0, 0, 3), Slab("up", 1, 0, 3), Slab("down", 0, 0, 3), Slab("norm")]
    pieces = cut_pieces(SPEC, slabs, 4, piece_bytes)
    assert check_pieces(SPEC, {"ffn": (0, 1, 2)}, pieces)
    for piece in pieces:
        numel = torch.Size(slab_shape(SPEC, {p.name: p for p in SPEC.params}[piece.param], piece)).numel()
        assert 12 * numel <= piece_bytes or piece.stop - piece.start <= 1
    assert (len(pieces) == 4) == (piece_bytes == 10_000)


@pytest.mark.parametrize(
    "wrong",
    [
        Slab("up", 0, 0, 3),
        Slab("up", 2, 1, 2),
        Slab("up", -1),
        Slab("up", 0, 2, 2),
        Slab("norm", 0, 0, 1),
        Slab("none", 0, 1, 2),
    ],
    ids=str,
)
def test_wrong_pieces(wrong: Slab) -> None:
    """Catches units of others, segments and parameters that are not there, and nothing in place of something."""
    with pytest.raises(FeedError, match="not wanted"):
        check_pieces(SPEC, HELD, [wrong])


def test_coverage() -> None:
    """Catches a newcomer that starts with a part of its shard, or takes a part from two sources."""
    assert check_pieces(SPEC, HELD, SLABS)
    for slab in SLABS:
        assert not check_pieces(SPEC, HELD, [other for other in SLABS if other != slab])
        with pytest.raises(FeedError, match="came twice"):
            check_pieces(SPEC, HELD, [*SLABS, slab])


class Source:
    """A source by hand."""

    def __init__(self, receiver: Receiver, name: str = "1:0", token: str = TOKEN):
        self.connection = Connection(socket.create_connection(receiver.address, WAIT_S), "the newcomer", WAIT_S)
        self.connection.send(Hello(source=name, token=token))
        self.answer, _ = self.connection.receive()

    def announce(self, *slabs: Slab, dtype: str = "torch.float32") -> None:
        self.connection.send(Announce(dtype=dtype, slabs=tuple(map(slab_key, slabs))))

    def piece(self, slab: Slab, committed: int, optimizer_step: int = 0) -> None:
        shape = slab_shape(SPEC, {p.name: p for p in SPEC.params}[slab.param], slab)
        frame = Piece(slab=slab_key(slab), committed=committed, optimizer_step=optimizer_step)
        self.connection.send(frame, [torch.ones(shape)] * 3)

    def gradient(self, slab: Slab, committed: int, optimizer_step: int) -> None:
        shape = slab_shape(SPEC, {p.name: p for p in SPEC.params}[slab.param], slab)
        frame = Gradient(slab=slab_key(slab), committed=committed, optimizer_step=optimizer_step, lr=0.1)
        self.connection.send(frame, [torch.ones(shape)])


@pytest.fixture
def log() -> list[str]:
    """Returns the lines for people."""
    return []


@pytest.fixture
def receiver(log: list[str]) -> Iterator[Receiver]:
    """Returns a receiver for two of the three units."""
    target = Target(SPEC, HELD, OptimizerSettings(), torch.float32, torch.device("cpu"))
    limits = FeedLimits(hello_s=0.2, timeout_s=WAIT_S)
    made = Receiver(target, TOKEN, lambda committed: None, limits=limits, log=log.append)
    yield made
    made.close()


@pytest.fixture
def connect(receiver: Receiver) -> Iterator[Callable[..., Source]]:
    """Returns connect(name, token): a source by hand."""
    made: list[Source] = []

    def start(name: str = "1:0", token: str = TOKEN) -> Source:
        made.append(Source(receiver, name, token))
        return made[-1]

    yield start
    for source in made:
        source.connection.close()


def test_two_sources(receiver: Receiver, connect: Callable[..., Source]) -> None:
    """Catches a shard that counts as complete while one source is missing or behind, or a skip for the wrong source."""
    first, second = connect("1:0"), connect("1:1")
    assert isinstance(first.answer, Welcome)
    first.announce(*SLABS[:3])
    for slab in SLABS[:3]:
        first.piece(slab, 4, 2)
    with pytest.raises(FeedError, match="missing is"):
        receiver.wait_for(4, 0.05)
    second.announce(*SLABS[3:])
    second.piece(SLABS[3], 4, 2)
    second.piece(SLABS[4], 3, 1)
    second.gradient(SLABS[4], 4, 2)
    receiver.wait_for(4, WAIT_S)
    first.connection.send(Skip(committed=5))
    with pytest.raises(FeedError, match="missing is (1:0, )?1:1"):
        receiver.wait_for(5, 0.2)
    second.connection.send(Skip(committed=5))
    receiver.wait_for(5, WAIT_S)
    state, committed = receiver.state()
    assert (committed, state.optimizer_step, receiver.fed) == (5, 2, 5)
    assert state.tensors["weight"]["up"].shape == (12, 3)
    assert bool((state.tensors["weight"]["up"] == 1).all())
    assert bool((state.tensors["weight"]["norm"] < 1).all())


Deed = Callable[[Source], object]
DEEDS: dict[str, tuple[str, Deed]] = {
    "a gradient that skips a step": ("gradient of step 6", lambda s: s.gradient(SLABS[4], 6, 2)),
    "a gradient that comes again": ("gradient of step 4", lambda s: s.gradient(SLABS[4], 4, 1)),
    "a step count that jumps": ("gradient of step 5", lambda s: s.gradient(SLABS[4], 5, 3)),
    "a piece not announced": ("without having announced", lambda s: s.piece(SLABS[0], 4, 1)),
    "units of others": ("not wanted", lambda s: s.announce(Slab("up", 0, 0, 1))),
    "another type": ("torch.float64 where torch.float32", lambda s: s.announce(SLABS[4], dtype="torch.float64")),
    "a short payload": (
        "a payload has 12 bytes",
        lambda s: s.connection.send(Piece(slab=slab_key(SLABS[4]), committed=4, optimizer_step=1), [torch.ones(3)]),
    ),
    "a damaged frame": ("does not send frames", lambda s: s.connection._socket.sendall(b"x" * 100)),
    "an order": ("no message", lambda s: s.connection.send(Unknown())),
}


class Unknown(Alive):
    """A frame that is none."""

    def encode(self) -> bytes:
        """Returns another version's header."""
        return b'{"type": "party"}'


@pytest.mark.parametrize("name", DEEDS)
def test_what_ends_a_feed(receiver: Receiver, connect: Callable[..., Source], log: list[str], name: str) -> None:
    """Catches a newcomer that takes what cannot be right, or does not say whose fault it is."""
    text, deed = DEEDS[name]
    source = connect("1:3")
    source.announce(SLABS[4])
    source.piece(SLABS[4], 4, 1)
    deed(source)
    with pytest.raises(FeedError, match=f"the feed of 1:3 has ended .*{text}"):
        receiver.wait_for(9, WAIT_S)
    assert text in receiver.ended["1:3"]


def test_strangers(receiver: Receiver, connect: Callable[..., Source], log: list[str]) -> None:
    """Catches a stranger that is let in, answers nobody, keeps a thread, or shuts out those who may come."""
    quiet = socket.create_connection(receiver.address, WAIT_S)
    loud = socket.create_connection(receiver.address, WAIT_S)
    loud.sendall(b"GET / HTTP/1.1\r\nHost: newcomer\r\n\r\n")
    long = socket.create_connection(receiver.address, WAIT_S)
    long.sendall(MAGIC + b"\xff" * 16)
    wrong = connect(token="guess")
    assert isinstance(wrong.answer, Refused)
    source = connect()
    source.announce(*SLABS)
    for slab in SLABS:
        source.piece(slab, 0)
    receiver.wait_for(0, WAIT_S)
    for stranger in (quiet, loud, long):
        stranger.settimeout(WAIT_S)
        assert ended(stranger)
        stranger.close()
    receiver.close()
    assert sum(int(line.split()[2].replace("a", "1")) for line in log if line.startswith("feeds: refused ")) == 4


def ended(stranger: socket.socket) -> bool:
    """Returns whether the other end has closed the connection."""
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:  # it had not read all
        return True


def test_the_receiver_was_closed(receiver: Receiver) -> None:
    """Catches a thread that waits on a receiver that will never have more."""
    receiver.close()
    with pytest.raises(FeedError, match="was closed"):
        receiver.wait_for(0, WAIT_S)
