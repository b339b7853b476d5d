"""What is due between steps: held-out losses, checkpoints, and the end of training."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from runflat.train.checkpoint import partial_folder, shard_to_json
from runflat.train.engine import Engine, progress_json

Say = Callable[..., None]


def every(interval: int, step: int) -> bool:
    """Whether something that happens every `interval` steps (0: never) is due after `step` steps."""
    return bool(interval) and step % interval == 0


class Duties:
    """What one device owes between steps; each thing is done once per step and generation."""

    def __init__(self, engine: Engine, say: Say, check: Callable[[], None]):
        """`say(kind, **fields)` reports to the controller; `check` comes before what rests on the state's bits."""
        self._engine = engine
        self._say = say
        self._check = check
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
        end = min(train.steps, train.stop_after or train.steps)
        last = step == stop_at or step >= end
        holdout = bool(step and engine.num_holdout) and (last or every(train.eval_every, step))
        save = bool(step) and (last or every(train.checkpoint_every, step))
        if holdout or save:
            self._once("check", generation, self._check)
        if holdout:
            self._once("holdout", generation, self._holdout)
        if save:
            self._once("save", generation, lambda: self.save(generation))
        if last:
            self._say("done", step=step, stopped=step < end)
        return last

    def _once(self, what: str, generation: int, act: Callable[[], None]) -> None:
        """Do `act` unless it was done; after a recovery it is due again, since peers may have missed it."""
        key = (self._engine.progress.step, generation)
        if self._done.get(what) != key:
            act()
            self._done[what] = key

    def _holdout(self) -> None:
        loss = self._engine.holdout_loss()
        self._say("holdout", step=self._engine.progress.step, loss=loss)

    def save(self, generation: int) -> None:
        """Write this device's shard and tell the controller, which alone publishes.

        The shard's index entry lies beside it, so that a later process can publish a complete folder whose controller
        has died.
        """
        started = time.monotonic()
        engine = self._engine
        fields: dict[str, Any] = {"progress": progress_json(engine.progress)}
        try:
            _, shard = engine.save()
            fields["shard"] = shard_to_json(shard)
            self._write_entry(generation, fields)
        except (OSError, SafetensorError) as error:
            fields = {"progress": fields["progress"], "error": str(error)}
        self._say("shard", generation=generation, seconds=time.monotonic() - started, **fields)

    def _write_entry(self, generation: int, fields: Mapping[str, Any]) -> None:
        engine = self._engine
        assert engine.plan is not None
        folder = partial_folder(Path(engine.job.run), engine.progress.step, generation)
        text = json.dumps({**fields, "num_devices": len(engine.plan.places)})
        (folder / f"{fields['shard']['name']}.json").write_text(text)
