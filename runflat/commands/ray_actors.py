"""The actors of a job on Ray: a controller, and for each device what `runflat worker` does. They take and give JSON."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from runflat import __version__
from runflat.commands.callers import launcher, with_whole_paths
from runflat.commands.network import ControllerNetwork, find_controller, read_token
from runflat.commands.training import train
from runflat.commands.watching import Watching
from runflat.config import TrainConfig
from runflat.elastic.attend import Attendant
from runflat.elastic.calls import Caller
from runflat.elastic.launch_ray import ID_DIGITS
from runflat.errors import INTERRUPTED, RunflatError


class SeatOrder(BaseModel):
    """What an actor of a device is to be."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str
    rank: int
    run: Path
    token_file: Path | None
    wait_s: float


class ControllerOrder(BaseModel):
    """What the controller's actor is to do."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: str
    run: Path
    network: ControllerNetwork
    watching: Watching


def outcome(code: int, text: str) -> str:
    """How the work of an actor ended, as it is told to the driver."""
    return json.dumps({"code": code, "text": text})


def place() -> dict[str, Any]:
    """Where this actor is: the node, named by the machine and Ray's id, and the process."""
    import ray

    node = str(ray.get_runtime_context().get_node_id())
    return {"node": f"{socket.gethostname()}/{node[:ID_DIGITS]}", "pid": os.getpid()}


class SeatActor:
    """Drives one device, in a process without torch that starts the worker process, as `runflat worker` does."""

    def __init__(self, order: str):
        """`order` is a `SeatOrder`; Ray calls its methods in the order in which it was asked for them."""
        self._order = SeatOrder.model_validate_json(order)

    def __repr__(self) -> str:
        """The name before each of its lines in Ray's logs."""
        return f"runflat {self._order.device}"

    def where(self) -> str:
        """Where it is."""
        return json.dumps(place())

    def work(self) -> str:
        """Attend to the device until the run is over, on whatever node this is; a node is a domain."""
        order, node, environment = self._order, str(place()["node"]), dict(os.environ)

        def about(ours: str) -> Caller:
            # Ray shows an actor its own GPU only, so that this is always number 0.
            return Caller(version=__version__, rank=order.rank, local_rank=0, node=node, host=ours)

        attendant = Attendant(
            find=lambda: find_controller(None, order.run, environment),
            token=lambda: read_token(order.token_file, order.run, environment),
            about=about,
            say=lambda text: print(text, flush=True),
            wait_s=order.wait_s,
            environment=environment,
        )
        try:
            attendant.run()
        except RunflatError as error:
            return outcome(error.exit_code, str(error))
        return outcome(0, "the run is over")


class ControllerActor:
    """Trains as `runflat controller` does."""

    def __init__(self, order: str):
        """`order` is a `ControllerOrder`."""
        self._order = ControllerOrder.model_validate_json(order)

    def __repr__(self) -> str:
        """The name before each of its lines in Ray's logs."""
        return "runflat controller"

    def where(self) -> str:
        """Where it is."""
        return json.dumps(place())

    def work(self) -> str:
        """Train to the end. Ctrl-C reaches the driver, which interrupts this process."""
        # Ray starts its processes with the signal blocked; Controller.supervise says what it does.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        order = self._order
        try:
            config = with_whole_paths(TrainConfig.model_validate_json(order.config), order.run)
            launch = launcher(config, order.network, order.run, "Ray starts them")
            code, summary = train(config, watching=order.watching, launch=launch)
        except RunflatError as error:
            return outcome(error.exit_code, str(error))
        except KeyboardInterrupt:
            return outcome(INTERRUPTED, "interrupted before training began")
        return outcome(code, f"{'stopped' if summary['stopped'] else 'finished'} at step {summary['step']}")
