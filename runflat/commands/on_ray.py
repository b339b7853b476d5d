"""`runflat train --launcher ray`: the driver, which connects with a running Ray cluster and keeps the job's actors."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from runflat.commands import network
from runflat.commands.callers import with_whole_paths
from runflat.commands.network import ControllerNetwork
from runflat.commands.prepare import run_folder
from runflat.commands.ray_actors import ControllerActor, ControllerOrder, SeatActor, SeatOrder
from runflat.commands.watching import Watching, take_flags
from runflat.config import TrainConfig
from runflat.elastic.launch_ray import Making, RayCluster, parse_needs, supervise
from runflat.elastic.ray_facts import End, Rules, StartController, StartSeat
from runflat.elastic.ray_site import open_site
from runflat.errors import ConfigError, RunError, UserError

FLAGS = """Launcher: --launcher local (the default) starts the workers on this machine, --launcher ray on the nodes of a
running Ray cluster: --address HOST:PORT of its head (default: RAY_ADDRESS, or the cluster of this machine),
--per-device GPU=1,CPU=4 that Ray gives each device (default: one GPU, or one CPU where no node has a GPU), --pending-s
SECONDS until a replica that no node can hold is asked for as far as one can (300), and --listen, --store-port,
--token-file, --wait-s and --span-domains as for runflat controller."""
LAUNCHERS = ("local", "ray")
CONNECT_TRIES = "1"
"""How often Ray tries to reach a head: one try takes 41 s where nobody answers, and its default is 20 of them."""


@dataclass(frozen=True, kw_only=True)
class RayFlags:
    """The launcher's flags, checked; `per_device` is None where it depends on the cluster."""

    network: ControllerNetwork
    address: str | None = None
    per_device: Mapping[str, float] | None = None
    pending_s: float = 300.0


def split(argv: Sequence[str]) -> tuple[RayFlags | None, list[str]]:
    """The flags of this module if the launcher is Ray, and all other arguments.

    Raises:
        ConfigError: a flag has no value, or one that makes no sense.
    """
    found, rest = take_flags(argv, ("--launcher",))
    name = found.get("--launcher", "local")
    if name not in LAUNCHERS:
        raise ConfigError(f"--launcher is {name!r}; the launchers are {' and '.join(LAUNCHERS)}.")
    if name == "local":
        return None, rest
    found, rest = take_flags(rest, ("--address", "--per-device", "--pending-s"))
    address = found.get("--address")
    if address is not None and address.startswith("ray://"):
        raise ConfigError(
            f"--address is {address!r}, Ray's client from outside of the cluster, which runflat does not use: run this "
            f"command on a node of the cluster, or by `ray job submit`, with the HOST:PORT of its head."
        )
    pending = found.get("--pending-s", "300")
    if not (pending.isascii() and pending.replace(".", "", 1).isdigit()):
        raise ConfigError(f"--pending-s is {pending!r}; it is a number of seconds, such as 300.")
    flags, rest = network.split(rest)
    if flags.domains:
        raise ConfigError("--topology is not for --launcher ray, where a node is a domain; --span-domains allows more.")
    if flags.domain_size is not None:
        raise ConfigError("--domain-size is not for --launcher ray, which gives each replica a node by itself.")
    needs = found.get("--per-device")
    return RayFlags(
        network=flags,
        address=address,
        per_device=None if needs is None else parse_needs(needs),
        pending_s=float(pending),
    ), rest


def check_ray() -> None:
    """Nothing, if Ray is installed.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--launcher ray needs the package ray, which is not installed here: install runflat with its extra "
            "(pip install -e '.[ray]') on every node, or leave --launcher out."
        )


def train_on_ray(config: TrainConfig, flags: RayFlags, watching: Watching) -> int:
    """Train on a Ray cluster; returns the exit code.

    Raises:
        UserError: something that was asked for is not possible.
        RunError: the run has failed.
    """
    check_ray()
    if config.layout.dead and config.resume is None:
        raise ConfigError(
            "layout.dead is not for --launcher ray, which asks for all devices and goes on without those that no node "
            "has room for (--wait-s, --pending-s); leave it out."
        )
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", CONNECT_TRIES)  # Ray reads it when it is imported
    import ray

    run = run_folder(config).resolve()
    _connect(ray, flags.address)
    interrupts: list[int] = []

    def interrupted(number: int, _: FrameType | None) -> None:
        interrupts.append(number)

    previous = signal.signal(signal.SIGINT, interrupted)
    try:
        making = _making(ray, with_whole_paths(config, run), flags, watching, run)
        cluster = RayCluster(ray, making, lambda pid: os.kill(pid, signal.SIGINT), time.monotonic)
        rules = Rules(wait_s=flags.network.wait_s, pending_s=flags.pending_s, may_span=flags.network.may_span)
        site = open_site(config.layout.places, config.spare_devices, config.layout.tp)
        end = supervise(rules, site, cluster, _say, time.monotonic, lambda: len(interrupts))
    finally:
        signal.signal(signal.SIGINT, previous)
        ray.shutdown()
    return _conclude(end, run)


def _say(text: str) -> None:
    print(f"ray: {text}", flush=True)


def _conclude(end: End, run: Path) -> int:
    if end.code == UserError.exit_code:
        raise ConfigError(end.text)
    if end.code == RunError.exit_code:
        raise RunError(end.text)
    _say(f"{end.text}; the run is in {run}")
    return end.code


def _connect(ray: Any, address: str | None) -> None:
    try:
        ray.init(address=address or "auto", logging_level="warning")
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        where = address or "RAY_ADDRESS or on this machine"
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise ConfigError(
            f"there is no Ray cluster to connect with at {where} ({reason}). Start one (`ray start --head` on one "
            f"machine, `ray start --address` on the others), or name its head with --address HOST:PORT."
        ) from error


def _making(ray: Any, config: TrainConfig, flags: RayFlags, watching: Watching, run: Path) -> Making:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    ours = str(ray.get_runtime_context().get_node_id())
    check_reach(nodes, ours, flags.network.host)
    per_device = flags.per_device or default_needs(nodes, config)

    def seat_text(action: StartSeat) -> str:
        return SeatOrder(
            device=action.device,
            rank=action.rank,
            run=run,
            token_file=flags.network.token_file,
            wait_s=flags.network.wait_s,
        ).model_dump_json()

    def controller_text(action: StartController) -> str:
        asked = resumed(config, run) if action.resume else config
        return ControllerOrder(
            config=asked.model_dump_json(),
            run=run,
            network=replace(flags.network, wait_s=action.wait_s),
            watching=replace(watching, ray=True),
        ).model_dump_json()

    return Making(
        seat_class=SeatActor,
        controller_class=ControllerActor,
        per_device=per_device,
        seat_text=seat_text,
        controller_text=controller_text,
        committed=lambda: num_lines(run / "steps.jsonl"),
        may_span=flags.network.may_span,
        node=ours,
    )


def num_lines(path: Path) -> int:
    """Lines of a file; 0 where there is none."""
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def resumed(config: TrainConfig, run: Path) -> TrainConfig:
    """The configuration that goes on with the run, without injected faults and dead slots."""
    layout = config.layout.model_copy(update={"dead": ()})
    return config.model_copy(update={"resume": run, "run": None, "inject": None, "layout": layout})


def check_reach(nodes: Sequence[Mapping[str, Any]], ours: str, host: str) -> None:
    """Nothing, if all nodes can call `host`, where the controller is to listen; `ours` is the id of our node.

    Raises:
        ConfigError: it is loopback, and there are other machines.
    """
    addresses = {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in nodes}
    others = {address for address in addresses.values() if address != addresses[ours]}
    if others and ipaddress.ip_address(host).is_loopback:
        raise ConfigError(
            f"the controller would listen at {host}, where only this machine can call it, but nodes of the cluster are "
            f"at {', '.join(sorted(others)[:3])}. Say where it may listen: --listen {addresses[ours]}, or an interface."
        )


def default_needs(nodes: Sequence[Mapping[str, Any]], config: TrainConfig) -> dict[str, float]:
    """What a device needs where nobody has said it: a GPU where there are any, else a CPU."""
    gpus = config.devices == "auto" and any(node["Resources"].get("GPU") for node in nodes)
    return {"GPU": 1.0} if gpus else {"CPU": 1.0}
