"""Which devices are fit to work, as frozen data: what a decision looks at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from runflat.cluster.events import Event, EventKind


@dataclass(frozen=True)
class Health:
    """Devices held by a job and those of them that are out of service or slow.

    A device is live if it is held and not failed. Who may call a device failed is the caller's business.
    """

    devices: tuple[str, ...]
    """All device ids held, spares included, in a fixed order."""
    failed: frozenset[str] = frozenset()
    slow: frozenset[tuple[str, float]] = frozenset()
    """(device id, factor by which its computation takes longer)."""

    @property
    def live(self) -> tuple[str, ...]:
        """Devices that can work, in the order of ``devices``."""
        return tuple(device for device in self.devices if device not in self.failed)

    @cached_property
    def _held(self) -> frozenset[str]:
        return frozenset(self.devices)

    def is_live(self, device: str) -> bool:
        """Whether ``device`` is held and can work."""
        return device in self._held and device not in self.failed

    def slowness(self, device: str) -> float:
        """Factor by which computation on ``device`` takes longer; 1 for a device that keeps pace."""
        return max((factor for name, factor in self.slow if name == device), default=1.0)

    def without(self, devices: Iterable[str]) -> Health:
        """The health after ``devices`` failed."""
        return replace(self, failed=self.failed | frozenset(devices))

    def after(self, event: Event) -> Health:
        """The health after ``event``: a loss fails it, a return heals it, a slow spell is noted."""
        device = event.place
        if event.loses_device:
            return self.without((device,))
        others = frozenset(entry for entry in self.slow if entry[0] != device)
        if event.event is EventKind.RETURN:
            return replace(self, failed=self.failed - {device}, slow=others)
        if event.event is EventKind.SLOW:
            assert event.factor is not None
            return replace(self, slow=others | {(device, event.factor)} if event.factor > 1 else others)
        return self
