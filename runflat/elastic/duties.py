"""What is due between steps: held-out losses, checkpoints, and the end of training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runflat.elastic.saver import Save, Saver
from runflat.parallel.comms import Interrupt
from runflat.train.engine import Engine, progress_json
from runflat.train.holdout import holdout_loss

Say = Callable[..., None]


def every(interval: int, step: int) -> bool:
    """Whether something that happens every `interval` steps (0: never) is due after `step` steps."""
    return bool(interval) and step % interval == 0


class Duties:
    """What one device owes between steps; each thing is done once per step and generation."""

    def __init__(
        self,
        engine: Engine,
        say: Say,
        phase: Callable[[str], None],
        check: Callable[[], None],
        interrupt: Interrupt,
    ):
        """`say(kind, **fields)` reports to the controller, `phase` is told when a save begins.

        `check` comes before what rests on the state's bits; `interrupt` ends waits in a generation that is to be left.
        """
        self._engine = engine
        self._say = say
        self._phase = phase
        self._check = check
        self._interrupt = interrupt
        self._saver = Saver(Path(engine.job.run), engine.spec)
        self._done: dict[str, tuple[int, int]] = {}

    def excuse(self, generation: int) -> None:
        """The state comes from a checkpoint: what its step asked for was done when it was saved."""
        key = (self._engine.progress.step, generation)
        self._done = {"check": key, "holdout": key, "save": key}

    def fulfil(self, generation: int, stop_at: int | None) -> bool:
        """Do what is due after the last step; returns whether training has ended here.

        `stop_at` is the step after which all devices agreed to stop, if they did.
        """
        engine, train = self._engine, self._engine.job.train
        step = engine.progress.step
        last = step == stop_at or step >= train.end
        holdout = bool(step and engine.num_holdout) and (last or every(train.eval_every, step))
        save = bool(step) and (last or every(train.checkpoint_every, step))
        if holdout or save:
            self._once("check", generation, self._check)
        if holdout:
            self._once("holdout", generation, self._holdout)
        if save:
            self._once("save", generation, lambda: self._save(last, lambda: self._interrupt.check(generation)))
        if last:
            self._say("done", step=step, stopped=step < train.end)
        return last

    def _once(self, what: str, generation: int, act: Callable[[], None]) -> None:
        """Do `act` unless it was done; after a recovery it is due again, since peers may have missed it."""
        key = (self._engine.progress.step, generation)
        if self._done.get(what) != key:
            act()
            self._done[what] = key

    def _holdout(self) -> None:
        loss = holdout_loss(self._engine)
        self._say("holdout", step=self._engine.progress.step, loss=loss)

    def _save(self, last: bool, check: Callable[[], object]) -> None:
        """Copy this device's shard and have it written; the controller alone publishes, when it has heard of all.

        Training waits for the copy, and for an earlier save that is not on disk yet; `check` may end the wait. The
        `last` save is waited for.
        """
        started = time.monotonic()
        self._phase("checkpoint")
        self._saver.wait(check)
        copy = self._engine.shard_copy()
        stood_s = time.monotonic() - started

        def report(fields: Mapping[str, Any]) -> None:
            seconds = time.monotonic() - started if last else stood_s
            self._say("shard", generation=copy.generation, seconds=seconds, **fields)

        assert self._engine.plan is not None
        num_devices = len(self._engine.plan.places)
        self._saver.begin(Save(copy, progress_json(self._engine.progress), num_devices, report))
        if last:
            self._saver.wait(check)

    def end(self, generation: int, abandoned: bool) -> None:
        """The worker ends: what is being written gets to the disk; if `abandoned` by the controller, this step too.

        That stays unpublished, for whoever resumes the run. The launcher bounds the wait.
        """
        step = self._engine.progress.step
        if abandoned and step and self._done.get("save") != (step, generation):
            self._save(True, lambda: None)
        self._saver.wait(lambda: None)
