"""`runflat controller`: train with workers that something else starts, on any number of machines."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from runflat.commands import network, watching
from runflat.commands.network import FLAGS, ControllerNetwork
from runflat.commands.prepare import run_folder
from runflat.commands.train import parse, train
from runflat.commands.watching import Watching
from runflat.config import TrainConfig
from runflat.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from runflat.elastic.workers import Workers
    from runflat.train.job import Job

DESCRIPTION = """Train as runflat train does, with workers that something else starts: Slurm, Kubernetes, ssh.

runflat controller [CONFIG.toml] [flags]; all flags of runflat train are allowed. For each device, one runflat worker
calls; the rank says which device it drives: the slots of replica 0, those of replica 1, and so on, then the spares. The
run's folder must be at the same path on all machines.

NETWORK
Example: runflat controller examples/demo.toml --run runs/job --listen eth0:29500
""".replace("NETWORK", FLAGS + "\n")


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    config, flags, looking = parse_controller(argv)
    run = run_folder(config).resolve()
    config = _with_whole_paths(config, run)
    return train(config, watching=looking, launch=_launcher(config, flags, run))[0]


def parse_controller(argv: list[str]) -> tuple[TrainConfig, ControllerNetwork, Watching]:
    """What `argv` asks for: the training, the network, who watches.

    Raises:
        ConfigError: a file, a flag or a value that is not valid.
    """
    flags, rest = network.split(argv)
    looking, rest = watching.split(rest)
    return parse(rest, "controller", DESCRIPTION), flags, looking


def _with_whole_paths(config: TrainConfig, run: Path) -> TrainConfig:
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


def _launcher(
    config: TrainConfig, flags: ControllerNetwork, run: Path
) -> Callable[[Job, Callable[[str], None]], Workers]:
    """What opens the door and waits for the workers, when the job is known."""

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
        devices = (*config.layout.places, *config.spare_devices)
        say(
            f"controller: {told} (store: port {store[1]}), waiting for {len(devices)} workers\n"
            f"start each by: RANK=0..{len(devices) - 1} runflat worker --run {run}"
        )
        workers = ExternalWorkers(job, door, store, Seats(devices, flags.domains, flags.may_span), say)
        try:
            workers.gather(flags.wait_s)
        except BaseException:  # also an interrupt: those who have come are told
            workers.close()
            raise
        return workers

    return launch
