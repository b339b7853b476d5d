"""How controller and workers on several machines find each other: flags, the environment, files of the run's folder."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runflat.commands.watching import port_of, take_flags
from runflat.elastic.endpoint import Endpoint, local_address, parse_endpoint, resolved
from runflat.elastic.proof import check_token, new_token
from runflat.elastic.requests import write_whole
from runflat.elastic.seats import read_domains
from runflat.errors import ConfigError

TOKEN_NAME = "token"
ENDPOINT_NAME = "controller.json"
ANYWHERE = ("0.0.0.0", "::")
WAIT_S = 600.0

FLAGS = """Network: --listen HOST[:PORT] (an address, a host name or an interface such as eth0; default: loopback, any
free port); --store-port PORT, at which process groups meet; --token-file FILE with the secret that workers must share
(or RUNFLAT_TOKEN_FILE, or RUNFLAT_TOKEN, in the environment; default: RUN/token, made if need be); --wait-s SECONDS for
all workers to call (600), then training starts with those that did. A node is a domain, and no replica spans domains:
--topology FILE names larger ones ({"rack1": ["node1", "node2"]}), --span-domains allows it. Ranks fill replica after
replica, then spares; with --domain-size N those of each N ranks that are too few for a replica are spares too."""


@dataclass(frozen=True, kw_only=True)
class ControllerNetwork:
    """The controller's flags, checked."""

    host: str = "127.0.0.1"
    port: int = 0
    store_port: int = 0
    token_file: Path | None = None
    wait_s: float = WAIT_S
    domains: Mapping[str, str]
    may_span: bool = False
    domain_size: int | None = None


def split(argv: Sequence[str]) -> tuple[ControllerNetwork, list[str]]:
    """The flags of this module, and all other arguments.

    Raises:
        ConfigError: a flag has no value, or one that makes no sense.
    """
    names = ("--listen", "--store-port", "--token-file", "--wait-s", "--topology", "--domain-size")
    found, rest = take_flags(argv, names, ("--span-domains",))
    listen = parse_endpoint(found.get("--listen", "127.0.0.1"), "--listen", 0)
    wait_s = found.get("--wait-s", str(WAIT_S))
    if not (wait_s.isascii() and wait_s.replace(".", "", 1).isdigit()):
        raise ConfigError(f"--wait-s is {wait_s!r}; it is a number of seconds, such as 600.")
    size = found.get("--domain-size")
    if size is not None and not (size.isascii() and size.isdigit() and int(size)):
        raise ConfigError(f"--domain-size is {size!r}; it is the number of devices of a node, such as 8.")
    token_file, topology = found.get("--token-file"), found.get("--topology")
    return ControllerNetwork(
        host=local_address(listen.host, "--listen"),
        port=listen.port,
        store_port=port_of(found.get("--store-port", "0"), "--store-port"),
        token_file=Path(token_file) if token_file else None,
        wait_s=float(wait_s),
        domains=read_domains(Path(topology)) if topology else {},
        may_span="--span-domains" in found,
        domain_size=int(size) if size else None,
    ), rest


def read_token(token_file: Path | None, run: Path | None, environment: Mapping[str, str]) -> str:
    """The shared secret: from the file that is named, the environment, or the run's folder.

    Raises:
        ConfigError: there is none, or one that is too short.
    """
    named = token_file or (Path(name) if (name := environment.get("RUNFLAT_TOKEN_FILE")) else None)
    if named is None and environment.get("RUNFLAT_TOKEN"):
        return check_token(environment["RUNFLAT_TOKEN"], "RUNFLAT_TOKEN")
    path = named or (run / TOKEN_NAME if run else None)
    if path is None:
        raise ConfigError(
            "there is no token: name the file that holds it with --token-file or RUNFLAT_TOKEN_FILE, or put it into "
            "RUNFLAT_TOKEN. The controller makes one as token in the run's folder if it is given none."
        )
    try:
        return check_token(path.read_text(encoding="utf-8"), str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the token cannot be read from {path}: {error}.") from error


def controller_token(token_file: Path | None, run: Path, environment: Mapping[str, str]) -> str:
    """The shared secret; one is made in the run's folder, readable by its owner only, where none is given."""
    path = run / TOKEN_NAME
    given = token_file or environment.get("RUNFLAT_TOKEN_FILE") or environment.get("RUNFLAT_TOKEN")
    if not given and not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(new_token() + "\n")
    return read_token(token_file, run, environment)


def announce(run: Path, door: Endpoint) -> Endpoint:
    """Write down in the run's folder where workers find the controller; returns that."""
    told = Endpoint(socket.gethostname(), door.port) if door.host in ANYWHERE else door
    write_whole(run / ENDPOINT_NAME, {"host": told.host, "port": told.port})
    return told


def find_controller(given: str | None, run: Path | None, environment: Mapping[str, str]) -> Endpoint:
    """Where the controller is, its host as an address.

    Raises:
        ConfigError: as `named_controller`, or the host is not known (yet).
    """
    found = named_controller(given, run, environment)
    return Endpoint(resolved(found.host, "the controller's host"), found.port)


def named_controller(given: str | None, run: Path | None, environment: Mapping[str, str]) -> Endpoint:
    """Where the controller is: as `given`, else as the run's folder says, else at MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: nothing of these says it.
    """
    if given is not None:
        return parse_endpoint(given, "--controller")
    if run is not None:
        return _announced(run / ENDPOINT_NAME)
    if environment.get("MASTER_ADDR") and environment.get("MASTER_PORT"):
        text = str(Endpoint(environment["MASTER_ADDR"], 0)).removesuffix("0") + environment["MASTER_PORT"]
        return parse_endpoint(text, "MASTER_ADDR:MASTER_PORT")
    raise ConfigError(
        "it is not known where the controller is: give --controller HOST:PORT, --run with the folder of a run that "
        "both can read, or MASTER_ADDR and MASTER_PORT in the environment."
    )


def _announced(path: Path) -> Endpoint:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Endpoint(str(data["host"]), int(data["port"]))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} does not say where the controller is: {error}.") from error
