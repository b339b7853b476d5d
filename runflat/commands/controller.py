"""`runflat controller`: train with workers that something else starts, on any number of machines."""

from __future__ import annotations

from runflat.commands import network, watching
from runflat.commands.callers import by_rank, launcher, with_whole_paths
from runflat.commands.network import FLAGS, ControllerNetwork
from runflat.commands.prepare import run_folder
from runflat.commands.train import parse
from runflat.commands.training import train
from runflat.commands.watching import Watching
from runflat.config import TrainConfig

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
    config = with_whole_paths(config, run)
    how = f"start each by: RANK=0..{len(by_rank(config, flags.domain_size)) - 1} runflat worker --run {run}"
    return train(config, watching=looking, launch=launcher(config, flags, run, how))[0]


def parse_controller(argv: list[str]) -> tuple[TrainConfig, ControllerNetwork, Watching]:
    """What `argv` asks for: the training, the network, who watches.

    Raises:
        ConfigError: a file, a flag or a value that is not valid.
    """
    flags, rest = network.split(argv)
    looking, rest = watching.split(rest)
    return parse(rest, "controller", DESCRIPTION), flags, looking
