"""A running job's numbers as metrics of Ray, which its dashboard and its own Prometheus endpoint show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runflat.report.follow import Follower
from runflat.report.metrics import metrics
from runflat.report.run_files import RunData, RunFiles


class RayGauges:
    """Sets what a run's files say, until `close`, under the names of `/metrics` (Ray puts `ray_` before them).

    All are gauges: the files have totals, which a counter of Ray's cannot be set to.
    """

    def __init__(self, run: Path):
        """Begin; this process must be one of Ray's."""
        from ray.util.metrics import Gauge

        self._make = Gauge
        self._gauges: dict[str, Any] = {}
        self._set: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._follower = Follower(RunFiles(run), "ray metrics", self.take)

    def close(self) -> None:
        """Set what is left, and end."""
        self._follower.close()

    def take(self, data: RunData) -> None:
        """Set all gauges; what is no longer said becomes zero."""
        left = dict.fromkeys(self._set, 0.0)  # what is no longer said: a state that no device is in any more
        for name, _, words, samples in metrics(data):
            for labels, value in samples:
                if name not in self._gauges:
                    self._gauges[name] = self._make(name, description=words, tag_keys=tuple(labels))
                left[name, tuple(labels.items())] = value
        for (name, pairs), value in left.items():
            self._gauges[name].set(value, tags=dict(pairs))
        self._set = left
