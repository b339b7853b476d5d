"""Several machines on one: each is a network namespace with a virtual cable to a switch, at which this one is too."""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType

from two_hosts import system


class Machines:
    """A switch, and machines that come and go; all is gone at the end of the `with` block, or of this process.

    `address` is that of this machine at the switch.
    """

    def __init__(self) -> None:
        taken = system("ip", "-o", "-4", "addr", "show")
        numbers = ((os.getpid() + offset) % 254 + 1 for offset in range(254))
        self._net = next(net for number in numbers if (net := f"10.202.{number}") + "." not in taken)
        self._name = f"rf{os.getpid()}"
        self._holders: dict[str, tuple[int, subprocess.Popen[bytes]]] = {}
        self._count = 1
        self.address = f"{self._net}.1"
        system("ip", "link", "add", self._name, "type", "bridge")
        system("ip", "addr", "add", f"{self.address}/24", "dev", self._name)
        system("ip", "link", "set", self._name, "up")

    def add(self, name: str) -> tuple[str, ...]:
        """Adds a machine; returns what starts a command there when it stands before it."""
        # The namespace lasts as long as the process in it, which ends when this process lets go of its input.
        held = ["unshare", "--net", "sh", "-c", "echo up; exec cat"]
        holder = subprocess.Popen(held, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"
        self._count += 1
        number = self._count
        self._holders[name] = number, holder
        near, far = f"{self._name}n{number}", f"{self._name}f{number}"
        system("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", str(holder.pid))
        system("ip", "link", "set", near, "master", self._name, "up")
        there = ("nsenter", f"--net=/proc/{holder.pid}/ns/net")
        ip = shutil.which("ip") or "ip"
        system(*there, ip, "addr", "add", f"{self._net}.{number}/24", "dev", far)
        system(*there, ip, "link", "set", far, "up")
        system(*there, ip, "link", "set", "lo", "up")
        return there

    def unplug(self, name: str) -> None:
        """Pulls the cable of a machine for good: what is under way is lost, and nobody is told."""
        number, holder = self._holders.pop(name)
        system("ip", "link", "del", f"{self._name}n{number}")
        holder.communicate(timeout=10)

    def __enter__(self) -> Machines:
        """Begin."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Take all away."""
        for name in list(self._holders):
            self.unplug(name)
        system("ip", "link", "del", self._name)
