"""Who may look at a training run from outside: flags of `runflat train` that change nothing of the training itself."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runflat.elastic.endpoint import MAX_PORT, local_address
from runflat.errors import ConfigError

FLAGS = """Watching: --page PORT serves a live page and /metrics (Prometheus) on this machine; --page-host HOST (an
address, a host name or an interface) serves it elsewhere; --page-token TOKEN (or auto) lets it drain and return
devices. --on-incident COMMAND|URL is told of each incident, as JSON on its input or posted. --tensorboard DIR writes
the run's numbers for TensorBoard."""


@dataclass(frozen=True, kw_only=True)
class Watching:
    """The flags, as given."""

    page: int | None = None
    host: str = "127.0.0.1"
    token: str | None = None
    on_incident: str | None = None
    tensorboard: Path | None = None
    ray: bool = False
    """Whether this is an actor of Ray's, whose dashboard and metrics show the run too."""


def split(argv: Sequence[str]) -> tuple[Watching, list[str]]:
    """The flags of this module, and all other arguments.

    Raises:
        ConfigError: a flag has no value, one that makes no sense, or one that needs what is not installed.
    """
    found, rest = take_flags(argv, ("--page", "--page-host", "--page-token", "--on-incident", "--tensorboard"))
    page = found.get("--page")
    port = None if page is None else port_of(page, "--page")
    token = found.get("--page-token")
    folder = found.get("--tensorboard")
    if folder is not None:
        from runflat.report.tensorboard import check_tensorboard

        check_tensorboard()  # before anything is prepared
    return Watching(
        page=port,
        host=local_address(found.get("--page-host", "127.0.0.1"), "--page-host"),
        token=secrets.token_urlsafe(16) if token == "auto" else token,
        on_incident=found.get("--on-incident"),
        tensorboard=None if folder is None else Path(folder),
    ), rest


def port_of(text: str, flag: str) -> int:
    """A port, as it is written after `flag`.

    Raises:
        ConfigError: it is none.
    """
    if not (text.isascii() and text.isdigit() and int(text) <= MAX_PORT):
        raise ConfigError(f"{flag} is {text!r}; it is a port, 0 (any free one) to {MAX_PORT}.")
    return int(text)


def take_flags(
    argv: Sequence[str], names: Collection[str], switches: Collection[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """Values of the flags `names` and of the `switches` (which have none) that are given, and all other arguments.

    Raises:
        ConfigError: a flag has no value.
    """
    found: dict[str, str] = {}
    rest: list[str] = []
    left = list(argv)
    while left:
        text = left.pop(0)
        name, equals, value = text.partition("=")
        if text in switches:
            found[text] = ""
        elif name not in names:
            rest.append(text)
        elif not equals and not left:
            raise ConfigError(f"{name} needs a value.")
        else:
            found[name] = value if equals else left.pop(0)
    return found, rest


@contextlib.contextmanager
def watched(watching: Watching, run: Path, say: Callable[[str], None]) -> Iterator[None]:
    """While this lasts the page is served, and incidents and numbers are told.

    Raises:
        ConfigError: the page cannot be served, or TensorBoard's folder not written.
    """
    with contextlib.ExitStack() as stack:
        if watching.on_incident is not None:
            from runflat.report.hook import IncidentHook

            hook = IncidentHook(run, watching.on_incident, say)
            stack.callback(hook.close)
        if watching.tensorboard is not None:
            from runflat.report.tensorboard import ScalarWriter

            stack.callback(ScalarWriter(run, watching.tensorboard, say).close)
        if watching.ray:
            from runflat.report.ray_metrics import RayGauges

            stack.callback(RayGauges(run).close)
        if watching.page is not None:
            from runflat.elastic.requests import ask
            from runflat.report.live import LivePage

            def pass_on(action: Literal["drain", "return"], device: str) -> tuple[bool, str]:
                return ask(run, action, device, time.sleep)

            page = LivePage(run, watching.host, watching.page, watching.token, pass_on, say)
            stack.callback(page.close)
            secret = f"#token={watching.token}" if watching.token else ""
            say(f"page: {page.url}{secret}  metrics: {page.url}metrics")
        yield
