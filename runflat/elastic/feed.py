"""Feed a newcomer while training goes on: the sending side.

Glossary for this file
    piece     units of one segment of one parameter (or a whole replicated parameter) with weight and both moments
    claim     copy a piece as of the last commit, under the lock that commits take, and send it. From then on each
              commit's gradient of the piece follows, with which the newcomer makes the same update to the same bits
    behind    the link does not carry the gradients as fast as they come. Pieces are given up, to be claimed again
              later; when training stops at a boundary, `flush` sends all that is left
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from runflat.elastic.frames import (
    Alive,
    Announce,
    Connection,
    FeedError,
    FeedLimits,
    Frame,
    Gradient,
    Hello,
    Piece,
    Skip,
    inode,
    slab_key,
)
from runflat.elastic.listener import introduce
from runflat.elastic.pieces import cut_pieces
from runflat.errors import RunError
from runflat.parallel.move import Held, Slab, slab_shape, slab_view
from runflat.plan.units import TENSORS, ModelSpec

JOIN_S = 5.0
"""How long `close` waits for the thread; it is woken out of every wait."""


@dataclass(frozen=True)
class LiveState:
    """The state of a device that trains, as a feeder reads it.

    `lock` is held by the training thread while a step is applied and reported with `Feeder.after_commit`.
    """

    spec: ModelSpec
    held: Held
    params: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    lock: threading.Lock


class Link:
    """An emulated link of `rate_bytes_per_s`: `pay` returns when that many bytes would be over. None is no limit."""

    def __init__(
        self,
        rate_bytes_per_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ):
        """`clock` and `sleep` are in seconds; without `sleep` the wait ends early when the feed is closed."""
        self._rate = rate_bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._free_at = clock()

    def pay(self, num_bytes: int, stop: threading.Event) -> None:
        """Wait until `num_bytes` more have gone over the link, or `stop` is set."""
        if self._rate is None:
            return
        now = self._clock()
        self._free_at = max(self._free_at, now) + num_bytes / self._rate
        (self._sleep or stop.wait)(self._free_at - now)


@dataclass(frozen=True)
class _Pending:
    """A frame that waits for its turn; `piece` is the one it belongs to, -1 for all."""

    frame: Frame
    piece: int = -1
    tensor: torch.Tensor | None = None


@dataclass(frozen=True)
class FeedProgress:
    """Where a feed stands: `num_claimed` of `num_pieces` are sent or under way, `num_given_up` claims were given up.

    `behind` says that the link cannot keep up with the gradients.
    """

    num_pieces: int
    num_claimed: int
    num_given_up: int
    backlog_bytes: int
    sent_bytes: int
    behind: bool
    caught_up: bool


class Feeder:
    """Streams pieces of a device's state to one newcomer, from a thread of its own. The training thread never waits.

    When the thread ends early, `error` says why; everything else becomes a no-op.
    """

    def __init__(
        self,
        state: LiveState,
        slabs: Sequence[Slab],
        hello: Hello,
        address: tuple[str, int],
        committed: int,
        optimizer_step: int,
        *,
        link: Link | None = None,
        limits: FeedLimits | None = None,
        log: Callable[[str], object] = lambda text: None,
        exempt: Callable[[int], object] = lambda number: None,
    ):
        """Start feeding. Call it between steps, or with `state.lock` held: nothing may be committed meanwhile.

        Args:
            state: what is read.
            slabs: what this device sends (`unit_slabs` of its transfers, `replicated_slabs` on one source).
            hello: who we are and the token.
            address: host and port at which the newcomer listens.
            committed: steps committed so far.
            optimizer_step: how many of them were applied.
            link: an emulated link; as fast as the machine where it is None.
            limits: deadlines and sizes.
            log: takes lines for people; called from the feeder's thread.
            exempt: called with the inode of the connection's socket, once it is open.
        """
        self.limits = limits or FeedLimits()
        self.error: FeedError | None = None
        self._state = state
        self._params = state.spec.by_name
        self._dtype = next(iter(state.params.values())).dtype
        self._pieces = cut_pieces(state.spec, slabs, self._dtype.itemsize, self.limits.piece_bytes)
        self._gradient_bytes = [self._numel(piece) * self._dtype.itemsize for piece in self._pieces]
        self._cap = self.limits.backlog_bytes or 2 * sum(self._gradient_bytes)
        self._hello = hello
        self._address = address
        self._committed = committed
        self._optimizer_step = optimizer_step
        self._link = link or Link(None)
        self._log = log
        self._exempt = exempt
        self._turn = threading.Condition()
        self._unclaimed = deque(range(len(self._pieces)))
        self._claimed: list[int] = []
        self._queue: deque[_Pending] = deque()
        self._backlog = 0
        self._busy = True
        self._closed = False
        self._sent = 0
        self._given_up = 0
        self._late_commits = 0
        self._behind = False
        self._said_behind = False
        self._stop = threading.Event()
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name=f"feed to {address[0]}:{address[1]}", daemon=True)
        self._thread.start()

    def _numel(self, piece: Slab) -> int:
        return torch.Size(slab_shape(self._state.spec, self._params[piece.param], piece)).numel()

    # ---- the training thread

    def after_commit(self, committed: int, optimizer_step: int, lr: float, skipped: bool) -> None:
        """The step that made it `committed` has been applied (or skipped); called with `state.lock` held.

        Gradients still are what AdamW used. They are copied for the claimed pieces; nothing is waited for.
        """
        with self._turn:
            if self._closed or self.error is not None:
                return
            self._committed, self._optimizer_step = committed, optimizer_step
            if skipped:
                if self._claimed:
                    self._queue.append(_Pending(Skip(committed=committed)))
            else:
                self._late_commits = self._late_commits + 1 if self._queue else 0
                self._make_room()
                for piece in self._claimed:
                    self._add_gradient(piece, lr)
                self._behind = self._behind or self._late_commits >= self.limits.patience
            self._turn.notify_all()

    def _make_room(self) -> None:
        """Give up the pieces that were claimed last while their gradients would not fit in the backlog."""
        needed = sum(self._gradient_bytes[piece] for piece in self._claimed)
        while self._claimed and self._backlog + needed > self._cap:
            piece = self._claimed.pop()
            needed -= self._gradient_bytes[piece]
            kept = deque(pending for pending in self._queue if pending.piece != piece)
            self._backlog -= (len(self._queue) - len(kept)) * self._gradient_bytes[piece]
            self._queue = kept
            self._unclaimed.append(piece)
            self._given_up += 1
            self._behind = True

    def _add_gradient(self, piece: int, lr: float) -> None:
        slab = self._pieces[piece]
        gradient = self._state.params[slab.param].grad
        assert gradient is not None, f"{slab.param} was committed without a gradient"
        frame = Gradient(slab=slab_key(slab), committed=self._committed, optimizer_step=self._optimizer_step, lr=lr)
        self._queue.append(_Pending(frame, piece, self._cut(slab, gradient)))
        self._backlog += self._gradient_bytes[piece]

    def _cut(self, slab: Slab, shard: torch.Tensor) -> torch.Tensor:
        view = slab_view(self._state.spec, self._params[slab.param], slab, self._state.held, shard.detach())
        return view.clone(memory_format=torch.contiguous_format)

    # ---- anybody

    @property
    def progress(self) -> FeedProgress:
        """Where the feed stands now."""
        with self._turn:
            return FeedProgress(
                num_pieces=len(self._pieces),
                num_claimed=len(self._claimed),
                num_given_up=self._given_up,
                backlog_bytes=self._backlog,
                sent_bytes=self._sent,
                behind=self._behind,
                caught_up=self._caught_up(),
            )

    @property
    def caught_up(self) -> bool:
        """Whether the newcomer has been sent everything as of the last commit."""
        with self._turn:
            return self._caught_up()

    def _caught_up(self) -> bool:
        return not (self._unclaimed or self._queue or self._busy) and self.error is None

    def flush(self, committed: int, timeout_s: float) -> None:
        """Wait until everything as of `committed` has been sent: a boundary, at which nothing more is committed.

        Raises:
            FeedError: the feed has failed, was closed, or the deadline passed; says what was left.
        """

        def ended() -> bool:
            return self._closed or self.error is not None or (self._committed >= committed and self._caught_up())

        with self._turn:
            in_time = self._turn.wait_for(ended, timeout_s)
            if self.error is not None:
                raise self.error
            if self._closed:
                raise FeedError(f"the feed to {self._name} was closed before step {committed} was sent.")
            if not in_time:
                left = f"{len(self._unclaimed)} of {len(self._pieces)} pieces and {self._backlog} bytes of gradients"
                raise FeedError(
                    f"the feed to {self._name} was not done with step {committed} within {timeout_s:.1f} s: it is at "
                    f"step {self._committed}, with {left} to send."
                )

    @property
    def _name(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"

    def close(self) -> None:
        """End the feed, whatever it is doing, and its thread with it. Again is allowed."""
        with self._turn:
            self._closed = True
            self._stop.set()
            self._turn.notify_all()
            if self._connection is not None:
                self._connection.shut()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)

    # ---- the feeder's thread

    def _run(self) -> None:
        problem = "its thread has ended with an error of its own"
        try:
            with contextlib.closing(self._connect()) as connection:
                while (job := self._next()) is not None:
                    self._sent += connection.send(*job, pay=self._pay)
        except RunError as error:
            problem = str(error)
        finally:
            with self._turn:
                self._connection = None
                if not self._closed:
                    self.error = FeedError(f"the feed to {self._name} has failed: {problem}")
                self._queue.clear()
                self._turn.notify_all()
            if self.error is not None:
                self._log(str(self.error))

    def _pay(self, num_bytes: int) -> None:
        self._link.pay(num_bytes, self._stop)

    def _connect(self) -> Connection:
        """A connection over which the newcomer has let us in and knows what comes."""
        try:
            connected = socket.create_connection(self._address, self.limits.hello_s)
        except OSError as error:
            raise FeedError(f"no connection within {self.limits.hello_s:.0f} s: {error}.") from error
        connection = Connection(connected, f"the newcomer at {self._name}", self.limits.hello_s)
        with contextlib.ExitStack() as undo:
            undo.callback(connection.close)
            self._exempt(inode(connected))
            with self._turn:
                self._connection = connection
                if self._closed:
                    raise FeedError("it was closed.")
            introduce(connection, self._hello, self.limits.timeout_s)
            slabs = tuple(slab_key(piece) for piece in self._pieces)
            connection.send(Announce(dtype=str(self._dtype), slabs=slabs))
            undo.pop_all()
        return connection

    def _next(self) -> tuple[Frame, list[torch.Tensor]] | None:
        """What to send next: gradients of commits first, then another piece; None when the feed is closed."""
        with self._turn:
            self._busy = False
            if self._caught_up():
                self._behind, self._late_commits = False, 0
            self._say_behind()
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._closed or self._queue or self._unclaimed, self.limits.alive_s)
            if self._closed:
                return None
            if not (self._queue or self._unclaimed):
                return Alive(), []
            self._busy = True
            if self._queue:
                pending = self._queue.popleft()
                if pending.tensor is None:
                    return pending.frame, []
                self._backlog -= self._gradient_bytes[pending.piece]
                return pending.frame, [pending.tensor]
        return self._claim()

    def _claim(self) -> tuple[Frame, list[torch.Tensor]]:
        """Copy the next piece as of the last commit; later gradients of it are queued from now on."""
        with self._state.lock:  # a commit takes this lock first and `_turn` inside it: the same order as here
            with self._turn:
                piece = self._unclaimed.popleft()
                self._claimed.append(piece)
                slab = self._pieces[piece]
                frame = Piece(slab=slab_key(slab), committed=self._committed, optimizer_step=self._optimizer_step)
            param = self._state.params[slab.param]
            weight = self._cut(slab, param)
            moments = self._state.optimizer.state.get(param)
            if not moments and not frame.optimizer_step:
                return frame, [weight, torch.zeros_like(weight), torch.zeros_like(weight)]
            if not moments:
                raise FeedError(f"{slab.param} has no moments at step {frame.optimizer_step}: its owner has gone on.")
            return frame, [weight, *(self._cut(slab, moments[kind]) for kind in TENSORS[1:])]

    def _say_behind(self) -> None:
        if self._behind and not self._said_behind:
            self._log(
                f"the link to {self._name} cannot keep up with the gradients: {len(self._claimed)} of "
                f"{len(self._pieces)} pieces are there, the rest must wait for a boundary."
            )
        self._said_behind = self._behind
