"""`runflat power-agent`: the one privileged process of a node, which sets power limits and takes them back."""

from __future__ import annotations

import fcntl
import grp
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import tyro

from runflat.errors import PowerError
from runflat.power.agent import Agent
from runflat.power.audit import AuditLog
from runflat.power.client import DEFAULT_SOCKET
from runflat.power.devices import PowerBackend
from runflat.power.journal import FileJournal, Journal, MemoryJournal
from runflat.power.keeper import Keeper
from runflat.power.nvml import NvmlDevices
from runflat.power.serve import Server, listen
from runflat.power.site import check_folders, read_site
from runflat.power.timed import DryRunDevices, TimedDevices

DESCRIPTION = """Set power limits for controllers on this node, and take them back.

The one part of runflat that needs root. It does what the limits file allows, for the users whom that names, while they
keep saying that they are there; then, and whatever else happens, each device goes back to its nominal limit.

Example: runflat power-agent --limits power.json --dry-run
"""

CALL_S = 1.0
"""Deadline of one call to the driver."""


@dataclass(frozen=True)
class AgentArgs:
    """Where the agent finds what it needs."""

    limits: Path = Path("/etc/runflat/power.json")
    """Limits file; nobody but root may be able to write it. docs/power.md shows one."""
    socket: Path = DEFAULT_SOCKET
    """Unix socket to listen on, mode 0660."""
    group: str | None = None
    """Group that may connect; the limits file still decides who is served."""
    state: Path = Path("/var/lib/runflat")
    """Folder of the journal and the log; nobody but root may be able to write it."""
    dry_run: bool = False
    """Set nothing: print what would be set."""
    restore: bool = False
    """Restore what an agent that was killed left behind, and end."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code: 1 if a device is still owed its nominal limit at the end."""
    args = tyro.cli(AgentArgs, args=argv, prog="runflat power-agent", description=DESCRIPTION)
    with ExitStack() as stack:
        args.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_folders(args.state)
        stack.enter_context(_Lock(args.state / "lock"))
        log = AuditLog(args.state / "audit.jsonl", time.time, echo=args.dry_run)
        stack.callback(log.close)
        backend: PowerBackend = TimedDevices(NvmlDevices(), CALL_S)
        journal: Journal = FileJournal(args.state / "journal.json")
        if args.dry_run:
            backend, journal = DryRunDevices(backend), MemoryJournal()
        if args.restore:
            keeper = Keeper({}, backend, journal, log, time.monotonic())
            if keeper.is_damaged:
                raise PowerError(
                    f"the journal in {args.state} is damaged, so what is owed is not known: start the agent with its "
                    "limits file, and it finds out from the devices."
                )
            return _report(tuple(keeper.owed))
        try:
            site = read_site(args.limits)
        except PowerError:
            # What an earlier agent left behind must not wait until somebody has mended the file.
            Keeper({}, backend, journal, log, time.monotonic())
            raise
        now = time.monotonic()
        agent = Agent(site, backend, journal, log, lambda: secrets.token_hex(16), now, dry_run=args.dry_run)
        stop = stack.enter_context(_signals())
        listener = stack.enter_context(_listener(args))
        print(f"runflat power-agent: {len(site.devices)} devices, listening on {args.socket}", flush=True)
        notify = _notifier()
        notify("READY=1")
        try:
            Server(agent, listener, stop, time.monotonic, lambda: notify("WATCHDOG=1")).run()
            notify("STOPPING=1")
        finally:
            owed = agent.stop(time.monotonic())
        return _report(owed)


def _report(owed: tuple[str, ...]) -> int:
    """Exit code, after words about devices that could not be restored."""
    if owed:
        print(
            f"runflat power-agent: not restored yet: {', '.join(owed)}. The journal keeps them; start the agent again.",
            file=sys.stderr,
        )
    return 1 if owed else 0


class _Lock:
    """The right to be this node's agent; the kernel gives it back when the process ends, however it does."""

    def __init__(self, path: Path):
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise PowerError(f"another power agent is running: it holds {path}. One node has one agent.") from error

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


def _listener(args: AgentArgs) -> socket.socket:
    args.socket.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    check_folders(args.socket.parent)
    try:
        group_id = None if args.group is None else grp.getgrnam(args.group).gr_gid
    except KeyError as error:
        raise PowerError(f"there is no group '{args.group}' on this machine.") from error
    return listen(args.socket, group_id)


def _signals() -> socket.socket:
    """A socket that can be read once SIGTERM or SIGINT has come."""
    read_end, write_end = socket.socketpair()
    write_end.setblocking(False)
    signal.set_wakeup_fd(write_end.detach(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return read_end


def _notifier() -> Callable[[str], None]:
    """Tells systemd how the service is; does nothing under anything else."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return lambda text: None
    if address.startswith("@"):
        address = "\0" + address[1:]
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)

    def notify(text: str) -> None:
        try:
            channel.sendto(text.encode(), address)
        except OSError as error:
            print(f"runflat power-agent: systemd cannot be told '{text}': {error}", file=sys.stderr)

    return notify
