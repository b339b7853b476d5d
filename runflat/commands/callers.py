"""Workers that call the controller: what opens the door and waits for them, and paths that mean the same to all."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from runflat.cluster.topology import seats_by_rank
from runflat.commands import network
from runflat.commands.network import ControllerNetwork
from runflat.config import TrainConfig
from runflat.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from runflat.elastic.workers import Workers
    from runflat.train.job import Job


def with_whole_paths(config: TrainConfig, run: Path) -> TrainConfig:
    """The configuration with paths that mean the same in whatever folder a worker is started."""
    model = {name: path.resolve() for name in ("from_dir", "dir") if (path := getattr(config.model, name)) is not None}
    data = {name: path.resolve() for name in ("tokenizer", "cache") if (path := getattr(config.data, name)) is not None}
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "data": config.data.model_copy(update=data),
            "resume" if config.resume else "run": run,
        }
    )


def by_rank(config: TrainConfig, domain_size: int | None) -> tuple[str | None, ...]:
    """The device that each rank drives: replica after replica, then spares; packed into domains of a known size.

    Raises:
        ConfigError: a replica is larger than a domain.
    """
    layout = config.layout
    if domain_size is None:
        return (*layout.places, *config.spare_devices)
    return seats_by_rank(layout.tp, layout.replicas, config.spares, domain_size)


def launcher(
    config: TrainConfig, flags: ControllerNetwork, run: Path, how: str
) -> Callable[[Job, Callable[[str], None]], Workers]:
    """What opens the door and waits for the workers, when the job is known; `how` says who starts them."""

    def launch(job: Job, say: Callable[[str], None]) -> Workers:
        from runflat.elastic.door import Door
        from runflat.elastic.launch_external import ExternalWorkers
        from runflat.elastic.launch_local import open_store
        from runflat.elastic.seats import Seats

        token = network.controller_token(flags.token_file, run, dict(os.environ))
        try:
            door = Door(token, flags.host, flags.port)
            store = open_store(flags.host, flags.store_port)
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {flags.host}: {error}. Give another address or port with --listen or --store-port."
            ) from error
        told = network.announce(run, door.endpoint)
        seats = Seats(by_rank(config, flags.domain_size), flags.domains, flags.may_span)
        say(f"controller: {told} (store: port {store[1]}), waiting for {len(seats.devices)} workers\n{how}")
        workers = ExternalWorkers(job, door, store, seats, say)
        try:
            workers.gather(flags.wait_s)
        except BaseException:  # also an interrupt: those who have come are told
            workers.close()
            raise
        return workers

    return launch
