"""`runflat worker`: drive one device of a job whose controller is elsewhere."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tyro

from runflat import __version__
from runflat.commands.network import WAIT_S, find_controller, named_controller, read_token
from runflat.elastic.attend import Attendant
from runflat.elastic.calls import Caller
from runflat.elastic.endpoint import local_address
from runflat.errors import ConfigError

DESCRIPTION = """Drive one device of a job of runflat controller.

Start one for each device, with anything that sets torchrun's variables: RANK (or SLURM_PROCID) says which device,
LOCAL_RANK (or SLURM_LOCALID) which GPU of the machine. It waits for the controller, starts the worker process, starts
it again when the controller wants, and ends with code 0 when the run is over. When it is killed, start it again.

Example: RANK=3 LOCAL_RANK=3 runflat worker --run runs/job
"""


@dataclass(frozen=True)
class WorkerArgs:
    """Which device, and where the controller is."""

    run: Path | None = None
    """Folder of the run, where this machine has it too: it says where the controller is, and has the token."""
    controller: str | None = None
    """HOST:PORT of the controller; none: as RUN/controller.json says, or MASTER_ADDR and MASTER_PORT."""
    token_file: Path | None = None
    """File with the secret that the controller has too; none: RUNFLAT_TOKEN_FILE, RUNFLAT_TOKEN, or RUN/token."""
    rank: int | None = None
    """Which device; none: RANK or SLURM_PROCID."""
    local_rank: int | None = None
    """Which GPU of this machine; none: LOCAL_RANK or SLURM_LOCALID, else 0."""
    host: str | None = None
    """Where other workers reach this one: an address, a host name or an interface such as ib0; none: the address
    from which the controller is called."""
    node: str | None = None
    """Name of this machine, which is a failure domain; none: SLURMD_NODENAME or the host name."""
    wait_s: float = WAIT_S
    """Longest time without a controller."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = tyro.cli(WorkerArgs, args=argv, prog="runflat worker", description=DESCRIPTION)
    environment = dict(os.environ)
    rank = number(args.rank, "--rank", environment, ("RANK", "SLURM_PROCID"))
    if rank is None:
        raise ConfigError("it is not known which device this is: give --rank, or RANK in the environment, from 0.")
    local_rank = number(args.local_rank, "--local-rank", environment, ("LOCAL_RANK", "SLURM_LOCALID")) or 0
    node = args.node or environment.get("SLURMD_NODENAME") or socket.gethostname()
    host = local_address(args.host, "--host") if args.host else None
    if args.run is None:  # else the files may still come; so may the host's name
        named_controller(args.controller, None, environment)
        read_token(args.token_file, None, environment)

    def about(ours: str) -> Caller:
        return Caller(
            version=__version__,
            rank=rank,
            local_rank=local_rank,
            node=node,
            host=host or ours,
        )

    attendant = Attendant(
        find=lambda: find_controller(args.controller, args.run, environment),
        token=lambda: read_token(args.token_file, args.run, environment),
        about=about,
        say=lambda text: print(f"worker {rank}: {text}", flush=True),
        wait_s=args.wait_s,
        environment=environment,
    )
    attendant.run()
    print(f"worker {rank}: the run is over", flush=True)
    return 0


def number(given: int | None, flag: str, environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """A number that is given, or the first of the variables `names` that is set; None where there is none.

    Raises:
        ConfigError: it is not a number from 0.
    """
    if given is not None and given >= 0:
        return given
    name, text = next(((name, environment[name]) for name in names if environment.get(name)), ("", ""))
    if given is not None:
        name, text = flag, str(given)
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} is {text!r}; it is a number from 0.")
    return int(text)
