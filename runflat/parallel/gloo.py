"""A backend of gloo over a store: one network address, one thread, a time-out for each try to connect."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo, Store

ATTEMPTS = 5
"""How often gloo tries to connect to a member that has told its address and died: each try lasts its time-out."""


def create(store: Store, rank: int, size: int, address: str, form_timeout_s: float, timeout_s: float) -> Any:
    """A connected backend that listens on `address`; a collective counts as lost after `timeout_s`.

    Raises:
        RuntimeError: it did not connect within `form_timeout_s`.
    """
    gloo: Any = ProcessGroupGloo  # torch's stub lacks the options
    options = gloo._Options()
    options._timeout = timedelta(seconds=form_timeout_s / ATTEMPTS)
    options._threads = 1
    options._devices = [gloo.create_device(hostname=address)]
    backend = gloo(store, rank, size, options)
    backend.set_timeout(timedelta(seconds=timeout_s))
    return backend
