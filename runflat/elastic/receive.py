"""Feed a newcomer while training goes on: the receiving side.

A newcomer has pieces from several sources, each as of some committed step. It brings a piece from one step to the next
with the holders' own arithmetic, and so to the same bits, given the gradient that they used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from runflat.elastic.frames import (
    Announce,
    Connection,
    FeedError,
    FeedLimits,
    Gradient,
    Piece,
    Skip,
    SlabKey,
    payload_tensors,
)
from runflat.elastic.listener import Listener
from runflat.elastic.pieces import check_pieces
from runflat.errors import RunError
from runflat.parallel.move import Held, ShardState, Slab, relayout, slab_shape
from runflat.parallel.optimizer import OptimizerSettings
from runflat.plan.units import TENSORS, ModelSpec

NOWHERE = -1
"""Step of a piece that has not come, or is being updated just now."""


@dataclass
class _Held:
    """A piece that has been announced: its source, its tensors (empty before they come), and its step."""

    source: str
    tensors: list[torch.Tensor]
    committed: int = NOWHERE
    optimizer_step: int = 0


@dataclass(frozen=True)
class Target:
    """What a newcomer is to hold under the coming plan, and the update that it is to apply."""

    spec: ModelSpec
    held: Held
    settings: OptimizerSettings
    dtype: torch.dtype
    torch_device: torch.device


class Receiver:
    """Takes feeds and builds the shard of `target`."""

    def __init__(
        self,
        target: Target,
        token: str,
        on_fed: Callable[[int], object],
        *,
        host: str = "127.0.0.1",
        limits: FeedLimits | None = None,
        log: Callable[[str], object] = lambda text: None,
        exempt: Callable[[int], object] = lambda number: None,
    ):
        """Listen at `address`, a free port of `host`.

        Args:
            target: what is to be built.
            token: what a source must show.
            on_fed: called with K each time that all pieces are there as of K commits or later, from a thread of ours;
                it must be short.
            host: address to listen on.
            limits: deadlines and sizes.
            log: takes lines for people, of those who were refused.
            exempt: called with the inode of each socket that is opened.
        """
        self.limits = limits or FeedLimits()
        self.received_bytes = 0
        self._target = target
        self._params = target.spec.by_name
        self._on_fed = on_fed
        self._change = threading.Condition()
        self._pieces: dict[Slab, _Held] = {}
        self._ended: dict[str, str] = {}
        self._complete = False
        self._fed = NOWHERE
        self._closed = False
        self._listener = Listener(
            "feeds",
            token,
            self._serve,
            hello_s=self.limits.hello_s,
            timeout_s=self.limits.timeout_s,
            host=host,
            exempt=exempt,
            log=log,
        )
        self.address = self._listener.address

    # ---- the newcomer's thread

    @property
    def fed(self) -> int | None:
        """The last commit as of which all pieces were there; None before that."""
        with self._change:
            return None if self._fed == NOWHERE else self._fed

    @property
    def ended(self) -> dict[str, str]:
        """Sources whose connection has ended, and why."""
        with self._change:
            return dict(self._ended)

    def wait_for(self, committed: int, timeout_s: float) -> None:
        """Wait until all pieces are there as of `committed` commits.

        Raises:
            FeedError: the deadline passed, a source has ended that was not done, or the receiver was closed.
        """

        def over() -> bool:
            return self._closed or bool(self._ended) or self._reached() >= committed

        with self._change:
            self._change.wait_for(over, timeout_s)
            if self._reached() >= committed:
                return
            late = sorted({piece.source for piece in self._pieces.values() if piece.committed < committed})
            text = f"the units for step {committed} are not all here"
            if self._closed:
                raise FeedError(f"{text}: the receiver was closed.")
            for source, reason in self._ended.items():
                raise FeedError(f"{text}: the feed of {source} has ended ({reason}).")
            raise FeedError(f"{text} after {timeout_s:.1f} s: missing is {', '.join(late) or 'every source'}.")

    def state(self) -> tuple[ShardState, int]:
        """The shard in storage order, and the number of commits it is as of; copies.

        Raises:
            FeedError: the pieces are not all here, or not of one step.
        """
        with self._change:
            steps = {(piece.committed, piece.optimizer_step) for piece in self._pieces.values()}
            if self._reached() == NOWHERE or len(steps) != 1:
                raise FeedError(f"the pieces here are of the (committed, applied) steps {sorted(steps)}, not of one.")
            ((committed, optimizer_step),) = steps
            nothing: dict[str, tuple[int, ...]] = {kind: () for kind in self._target.held}
            tensors = {
                kind: relayout(
                    self._target.spec,
                    nothing,
                    self._target.held,
                    {},
                    {slab: piece.tensors[at] for slab, piece in self._pieces.items()},
                )
                for at, kind in enumerate(TENSORS)
            }
            return ShardState(tensors, optimizer_step), committed

    def close(self) -> None:
        """Stop listening and end all feeds. Again is allowed."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._listener.close()

    # ---- accounting, with `_change` held

    def _reached(self) -> int:
        """The commit as of which all units are here, `NOWHERE` while some are missing."""
        if not self._complete:
            return NOWHERE
        return min(piece.committed for piece in self._pieces.values())

    def _report(self) -> None:
        """Say that all pieces have come a step further."""
        reached = self._reached()
        if reached > self._fed:
            self._fed = reached
            self._on_fed(reached)
        self._change.notify_all()

    # ---- a source's thread

    def _serve(self, connection: Connection, source: str) -> None:
        reason = "an error of the receiver"
        try:
            self._take(connection, source)
        except RunError as error:
            reason = str(error)
        finally:
            with self._change:
                self._ended[source] = reason
                self._change.notify_all()

    def _take(self, connection: Connection, source: str) -> None:
        """Take frames until the connection ends, which is always with a FeedError."""
        while True:
            frame, payload = connection.receive()
            self.received_bytes += len(payload)
            if isinstance(frame, Announce):
                self._announce(frame, source)
            elif isinstance(frame, Piece):
                self._take_piece(frame, payload, source)
            elif isinstance(frame, Gradient):
                self._take_gradient(frame, payload, source)
            elif isinstance(frame, Skip):
                self._take_skip(frame.committed, source)

    def _announce(self, announce: Announce, source: str) -> None:
        if announce.dtype != str(self._target.dtype):
            raise FeedError(f"{source} sends {announce.dtype} where {self._target.dtype} is trained.")
        slabs = [Slab(*key) for key in announce.slabs]
        with self._change:
            pieces = {slab: piece for slab, piece in self._pieces.items() if piece.source != source}
            self._complete = check_pieces(self._target.spec, self._target.held, [*pieces, *slabs])
            self._pieces = pieces | {slab: _Held(source, []) for slab in slabs}
            self._ended.pop(source, None)

    def _piece(self, key: SlabKey, source: str) -> tuple[Slab, _Held]:
        slab = Slab(*key)
        piece = self._pieces.get(slab)
        if piece is None or piece.source != source:
            raise FeedError(f"{source} sent {slab} without having announced it.")
        return slab, piece

    def _payload(self, slab: Slab, payload: bytearray, count: int) -> list[torch.Tensor]:
        shape = slab_shape(self._target.spec, self._params[slab.param], slab)
        tensors = payload_tensors(payload, shape, count, self._target.dtype)
        return [tensor.to(self._target.torch_device) for tensor in tensors]

    def _take_piece(self, frame: Piece, payload: bytearray, source: str) -> None:
        slab, piece = self._piece(frame.slab, source)
        tensors = self._payload(slab, payload, len(TENSORS))
        with self._change:
            piece.tensors = tensors
            piece.committed, piece.optimizer_step = frame.committed, frame.optimizer_step
            self._report()

    def _take_gradient(self, frame: Gradient, payload: bytearray, source: str) -> None:
        slab, piece = self._piece(frame.slab, source)
        (gradient,) = self._payload(slab, payload, 1)
        with self._change:
            before = (piece.committed, piece.optimizer_step)
            if before != (frame.committed - 1, frame.optimizer_step - 1):
                raise FeedError(
                    f"{source} sent the gradient of step {frame.committed} for {slab}, which is at {before}."
                )
            piece.committed = NOWHERE
        self._update(slab, piece, gradient, frame.lr)
        with self._change:
            piece.committed, piece.optimizer_step = frame.committed, frame.optimizer_step
            self._report()

    def _update(self, slab: Slab, piece: _Held, gradient: torch.Tensor, lr: float) -> None:
        """The update of `parallel.optimizer`: element by element, so a piece gets the bits of the whole."""
        settings = self._target.settings
        weight, exp_avg, exp_avg_sq = piece.tensors
        adamw(
            [weight],
            [gradient],
            [exp_avg],
            [exp_avg_sq],
            [],
            [torch.tensor(float(piece.optimizer_step), dtype=torch.float32)],
            foreach=True,
            amsgrad=False,
            beta1=settings.beta1,
            beta2=settings.beta2,
            lr=lr,
            weight_decay=settings.weight_decay if self._params[slab.param].decay else 0.0,
            eps=settings.eps,
            maximize=False,
        )

    def _take_skip(self, committed: int, source: str) -> None:
        with self._change:
            for piece in self._pieces.values():
                if piece.source == source and piece.committed == committed - 1:
                    piece.committed = committed
            self._report()
