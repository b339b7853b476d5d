"""Both ways to sum gradients under one plan, `direct` and `reshard`: bytes and messages for `runflat plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from runflat.plan.cost import exchange_bytes, exchange_messages
from runflat.plan.plan import Plan
from runflat.plan.sync_groups import Sync, SyncLayout, sync_layout
from runflat.plan.units import ModelSpec

Which = Literal["full", "reduced"]
"""Devices of replicas at full degree, or of those that have lost some."""


@dataclass(frozen=True)
class SyncReport:
    """What devices send per step for the gradients of what is split, replicated parameters left out.

    `max_` is the most that one device sends, the parts each on their own: to other replicas (network), inside its
    own (domain); a message is a send to one peer.
    """

    sync: Sync
    devices: Which
    num_devices: int
    max_bytes: float
    max_network_bytes: float
    max_domain_bytes: float
    max_messages: int
    max_communicators: int
    total_bytes: float
    total_messages: int


def compare_modes(
    spec: ModelSpec, plan: Plan, direct: SyncLayout, bucket_bytes: int, element_bytes: int
) -> tuple[SyncReport, ...]:
    """Both modes, each for replicas at full degree and for reduced ones, where there are such; one is there already."""
    found = []
    for sync in get_args(Sync):
        layout = direct if sync == "direct" else sync_layout(spec, plan, bucket_bytes, element_bytes, sync)
        for which in get_args(Which):
            places = [
                place for place in plan.places if (plan.replica(place[0]).tp == plan.tp_full) == (which == "full")
            ]
            if not places:
                continue
            sent = [exchange_bytes(layout, place, element_bytes) for place in places]
            messages = [exchange_messages(layout, place) for place in places]
            found.append(
                SyncReport(
                    sync=sync,
                    devices=which,
                    num_devices=len(places),
                    max_bytes=max(map(sum, sent)),
                    max_network_bytes=max(network for network, _ in sent),
                    max_domain_bytes=max(domain for _, domain in sent),
                    max_messages=max(messages),
                    max_communicators=max(map(layout.communicators, places)),
                    total_bytes=sum(map(sum, sent)),
                    total_messages=sum(messages),
                )
            )
    return tuple(found)


def modes_json(modes: tuple[SyncReport, ...]) -> list[dict[str, Any]]:
    """The comparison for programs; docs/plan.md says what each key means."""
    return [asdict(mode) for mode in modes]


def mode_cells(mode: SyncReport, size: Callable[[float], str]) -> list[str]:
    """A row of the table: sizes as `size` writes them."""
    sizes = (mode.max_bytes, mode.max_network_bytes, mode.max_domain_bytes, mode.total_bytes)
    return [mode.sync, mode.devices, *map(size, sizes), f"{mode.max_messages:,}", str(mode.max_communicators)]
