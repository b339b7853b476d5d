"""Writes a device's shards beside training: the main thread copies, a thread of its own waits for the disk."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runflat.elastic.side_thread import start_thread
from runflat.plan.units import ModelSpec
from runflat.train.checkpoint import shard_to_json
from runflat.train.publishing import partial_folder
from runflat.train.shards import ShardCopy, write_shard

SLICE_S = 0.05
"""Between looks at whether a wait for the disk is to be given up."""


@dataclass(frozen=True)
class Save:
    """One shard to write, and what is reported with it: `progress` as JSON, devices that write one, as the plan says.

    `report(fields)` tells the controller that it is on disk, or by `error` why it is not.
    """

    copy: ShardCopy
    progress: Mapping[str, Any]
    num_devices: int
    report: Callable[[Mapping[str, Any]], object]


class Saver:
    """Writes one shard at a time, in the background."""

    def __init__(self, run: Path, spec: ModelSpec):
        """`run` is the run's folder, `spec` the model."""
        self._run = run
        self._spec = spec
        self._idle = threading.Event()
        self._idle.set()
        self._problem: BaseException | None = None

    def wait(self, check: Callable[[], object]) -> None:
        """Return when nothing is being written; `check` is called meanwhile, and may raise.

        The controller bounds it: it watches how long a device is in the phase `checkpoint`.
        """
        while not self._idle.wait(SLICE_S):
            check()
        if self._problem is not None:
            raise self._problem

    def begin(self, save: Save) -> None:
        """Write `save` in the background; nothing may be in the making."""
        assert self._idle.is_set(), "one shard at a time, so that one copy is in memory"
        self._idle.clear()
        start_thread("checkpoint", lambda: self._work(save))

    def _work(self, save: Save) -> None:
        try:
            save.report(self._write(save))
        except BaseException as error:  # a bug in here is the worker's error: the main thread raises it
            self._problem = error
        finally:
            self._idle.set()

    def _write(self, save: Save) -> dict[str, Any]:
        """Write the shard, and beside it its index entry: a later process may have to publish what is complete."""
        try:
            shard = shard_to_json(write_shard(self._run, self._spec, save.copy))
            entry = {"progress": save.progress, "shard": shard, "num_devices": save.num_devices}
            folder = partial_folder(self._run, save.copy.step, save.copy.generation)
            (folder / f"{save.copy.name}.json").write_text(json.dumps(entry))
        except OSError as error:
            return {"progress": save.progress, "error": str(error)}
        return {"progress": save.progress, "shard": shard}
