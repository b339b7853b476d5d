"""Which device a rank drives, and the domains that a replica must not span: pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runflat.errors import ConfigError


@dataclass(frozen=True)
class Seats:
    """Rank r drives `by_rank[r]` (None: nothing): the slots of replica 0, of replica 1, ..., then the spares.

    `domains` gives the domain of a node, where that is not the node itself. With `may_span` domains do not matter.
    """

    by_rank: tuple[str | None, ...]
    domains: Mapping[str, str] = field(default_factory=dict)
    may_span: bool = False

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices of the job, in the order of their ranks."""
        return tuple(device for device in self.by_rank if device is not None)

    def device(self, rank: int) -> str | None:
        """The device of a rank; None for one more than the job has."""
        return self.by_rank[rank] if rank < len(self.by_rank) else None

    def domain(self, node: str) -> str:
        """The domain of a node."""
        return self.domains.get(node, node)

    def problem(self, device: str, node: str, present: Mapping[str, str]) -> str | None:
        """Why a worker on `node` cannot drive `device` while those in `present` (node by device) are there."""
        replica, colon, _ = device.partition(":")
        if self.may_span or not colon:
            return None
        ours = self.domain(node)
        others = {self.domain(at) for name, at in present.items() if name.startswith(f"{replica}:") and name != device}
        if others <= {ours}:
            return None
        return (
            f"device {device} on node {node} would have replica {replica} span the domains "
            f"{' and '.join(sorted(others | {ours}))}, so that tensor parallelism crosses their borders; give "
            f"neighbouring ranks to one node (layout.tp of them), name larger domains with --topology, or allow it "
            f"with --span-domains"
        )


def read_domains(path: Path) -> dict[str, str]:
    """Domain by node, of a JSON file that lists the nodes of each domain: {"rack1": ["node1", "node2"]}.

    Raises:
        ConfigError: it cannot be read, or names a node twice.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the topology {path} cannot be read: {error}.") from error
    found: dict[str, str] = {}
    if not isinstance(data, dict) or not all(
        isinstance(nodes, list) and all(isinstance(node, str) for node in nodes) for nodes in data.values()
    ):
        raise ConfigError(
            f"the topology {path} is not an object of lists; it names the nodes of each domain, such as "
            f'{{"rack1": ["node1", "node2"]}}.'
        )
    for domain, nodes in data.items():
        for node in nodes:
            if node in found:
                raise ConfigError(
                    f"the topology {path} names node {node} in {found[node]} and in {domain}; name it once."
                )
            found[node] = domain
    return found
