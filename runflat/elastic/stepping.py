"""One step as the loop sees it: compute inside `with`, and the step commits on all devices or on none."""

from __future__ import annotations

import time
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from runflat.elastic.inspection import Inspection
from runflat.parallel.comms import AbortedError, CommsError
from runflat.train.engine import Engine
from runflat.train.job import peak_bytes
from runflat.train.step import Scalars, StepResult


class Host(Protocol):
    """What a step needs of the worker that it belongs to."""

    engine: Engine
    inspection: Inspection

    def say(self, kind: str, **fields: Any) -> None:
        """Send one message to the controller."""

    def wishes(self) -> tuple[bool, bool]:
        """Whether this device wants to stop, and to switch, after the step."""

    def commit(self, scalars: Scalars) -> StepResult:
        """Apply the step whose gradients are final."""


class Step:
    """Step `index` under the plan in force; `samples` are the sample numbers of this replica's share.

    Use as a context manager: the body computes gradients, leaving it exchanges them and commits. When a device is lost
    meanwhile, the body or the exit is left early, nothing is applied, and the loop gets the same step again.
    """

    def __init__(self, host: Host, generation: int):
        """The next step of `host`, under the plan of `generation`."""
        self._host = host
        self._engine = host.engine
        self._generation = generation
        self.index = host.engine.progress.step
        first, count = host.engine.samples()
        self.samples = range(first, first + count)
        self.scalars: Scalars | None = None
        self.error: AbortedError | CommsError | None = None
        self._started = time.perf_counter()
        if host.engine.timeline is not None:
            host.engine.timeline.step()

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model with this device's shard; its loss is the sum over target tokens."""
        assert self._engine.sharded is not None
        return self._engine.sharded.model

    def compute(self) -> None:
        """Forward and backward of this replica's share, as runflat's own trainer does it."""
        self._engine.compute()

    def micro_batches(self, sequences: torch.Tensor) -> list[torch.Tensor]:
        """The share `sequences` [B, T] in pieces of at most the configured micro-batch."""
        return self._engine.micro_batches(sequences)

    def backward(self, loss: torch.Tensor, num_targets: int, last: bool = True) -> None:
        """Gradients of a micro-batch's loss *sum* over `num_targets` tokens; `last` starts the exchange."""
        self._engine.backward(loss, num_targets, last)

    def __enter__(self) -> Step:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Commit; a lost peer ends the step but not the loop."""
        if isinstance(error, AbortedError | CommsError):
            self.error = error
            return True
        if error is not None:
            return False
        try:
            self._finish()
        except (AbortedError, CommsError) as lost:
            self.error = lost
        return True

    def outcome(self) -> Scalars:
        """The sums of this step, which has committed.

        Raises:
            AbortedError: it did not, the generation was left.
            CommsError: it did not, a peer was lost.
        """
        error, self.error = self.error, None
        if error is not None:
            try:
                raise error
            finally:
                # An error holds the frames that it passed, and so the groups of its generation: a frame or a step that
                # holds the error would keep their sockets and threads until the garbage collector comes by.
                del error
        assert self.scalars is not None, "a step was yielded but never entered: use `with step:`"
        return self.scalars

    def _finish(self) -> None:
        """Exchange gradients, meet all devices, commit, report."""
        host, engine = self._host, self._engine
        computed = time.perf_counter()
        engine.finish()
        synced = time.perf_counter()
        compared = host.inspection.before_commit()
        scalars = engine.barrier(*host.wishes())
        if engine.reports:
            fields: dict[str, Any] = {"step": self.index, "scalars": scalars.to_list(), "compared": compared}
            host.say("commit", generation=self._generation, **fields)
        result = host.commit(scalars)
        self.scalars = scalars
        parts_s = engine.times.end()
        if engine.reports:
            assert engine.place is not None
            result = replace(result, compute_s=computed - self._started, sync_s=synced - computed)
            fields = {**vars(result), "parts_s": parts_s, "peak_bytes": peak_bytes(engine.device)}
            if engine.pace is not None:
                pace = engine.pace
                fields |= {"own_s": pace.own_s, "billed_s": pace.billed_s, "late_s": pace.late_s}
            host.say(
                "step",
                generation=self._generation,
                step=self.index,
                replica=engine.place[0],
                first_sample=self.samples.start,
                num_samples=len(self.samples),
                step_s=time.perf_counter() - self._started,
                **fields,
            )
