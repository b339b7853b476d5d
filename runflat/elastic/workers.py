"""What the controller asks of a launcher, whoever starts the workers."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from runflat.elastic.messages import Message
from runflat.elastic.orders import Order


class Workers(Protocol):
    """A launcher: starts, reaches and ends the processes of the devices."""

    def start(self, device: str, incarnation: int) -> None:
        """Start a process for a device."""

    def send(self, device: str, order: Order) -> None:
        """Give an order to a device's present process."""

    def messages(self, timeout_s: float) -> Iterator[tuple[str, int, Message]]:
        """(device, incarnation, message) of all that arrives within `timeout_s`."""

    def kill(self, device: str) -> None:
        """SIGKILL, if the launcher can."""

    def signal(self, device: str, number: signal.Signals) -> None:
        """Any other signal."""

    def pid(self, device: str) -> int | None:
        """Process id on this machine, if it has one."""

    def inject(self, event: Mapping[str, Any]) -> None:
        """Have processes that are started from now on suffer a fault, until it has struck."""

    def forget(self, event: Mapping[str, Any]) -> None:
        """An injected event has struck."""

    def close(self, grace_s: float = 0.0) -> None:
        """End all processes."""
