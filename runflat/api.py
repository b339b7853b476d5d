"""The library: the same recovery for a training loop that you own.

    import runflat.api

    def train(worker):
        for step in worker.steps():
            with step:
                batch = my_batch(step.samples)
                loss = step.model(input_ids=batch, labels=batch).loss
                step.backward(loss, num_targets)

    if __name__ == "__main__":
        runflat.api.launch(train, model={"dir": "my-model"}, layout={"tp": 4, "replicas": 2}, train={"steps": 100})

`step.model` is the unmodified transformers model with this device's shard of the weights; its loss is the *sum* over
target tokens. Leaving `with step:` exchanges gradients, clips by the global norm, updates (AdamW) and commits. When a
device is lost, the loop gets the same step again under the new plan, in the same process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from runflat.commands.config_files import config_error
from runflat.config import TrainConfig
from runflat.elastic.session import Session as Worker
from runflat.errors import ConfigError

__all__ = ["Worker", "launch"]


def launch(loop: Callable[[Worker], None], **sections: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Run `loop` in one worker process per device and watch over them; returns the summary of the run.

    Args:
        loop: a function of a file (not of a notebook or of `-c`): workers import that file, so guard the call of
            `launch` by `if __name__ == "__main__"`.
        sections: the sections and keys of a configuration, as `runflat train` takes them from a file: `model`,
            `layout`, `data` (its `seq_len`), `train`, `run`, `inject`, ...

    Raises:
        UserError: something in `sections` cannot be used.
        RunError: the run failed.
    """
    from runflat.commands.training import train

    file = inspect.getsourcefile(loop)
    if file is None or "<locals>" in loop.__qualname__:
        raise ConfigError(f"{loop.__qualname__} is not a function at the top of a file, so workers cannot import it.")
    try:
        config = TrainConfig.model_validate(sections)
    except ValidationError as error:
        raise config_error(error, TrainConfig) from error
    return train(config, f"{Path(file).resolve()}:{loop.__name__}")[1]
