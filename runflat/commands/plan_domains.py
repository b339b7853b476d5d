"""`runflat plan`'s view of domains: where devices sit, and what the loss of each domain takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runflat.cluster.topology import seats_by_rank
from runflat.elastic.seats import read_domains
from runflat.errors import ConfigError
from runflat.plan.blast import Blast
from runflat.plan.plan import Plan
from runflat.plan.units import MOMENTS

MAX_KINDS = 12
"""Kinds of domain that are told one by one."""
MAX_NAMED = 4


def device_domains(tp: int, replicas: int, domain_size: int | None, topology: Path | None) -> Mapping[str, str]:
    """Domain by device, packed into domains of one size, or as a file says; empty where nobody knows.

    Raises:
        ConfigError: a replica is larger than a domain, or the file makes no sense.
    """
    if topology is not None:
        return _read(topology, [f"{replica}:{slot}" for replica in range(replicas) for slot in range(tp)])
    if domain_size is None:
        return {}
    ranks = enumerate(seats_by_rank(tp, replicas, 0, domain_size))
    return {device: f"domain {rank // domain_size}" for rank, device in ranks if device is not None}


def _read(path: Path, devices: Sequence[str]) -> Mapping[str, str]:
    """Domain by device, of a file that lists the devices or whole replicas of each domain."""
    named = read_domains(path)
    known = {*devices, *(device.split(":")[0] for device in devices)}
    for name in named:
        if name not in known:
            raise ConfigError(
                f"the topology {path} names {name!r}, which this layout does not have. For runflat plan it lists "
                f'devices or whole replicas, such as {{"node1": ["0", "1"], "node2": ["2:0", "2:1"]}}.'
            )
    return {device: found for device in devices if (found := named.get(device) or named.get(device.split(":")[0]))}


def with_domains(plan: Plan, domains: Mapping[str, str]) -> Plan:
    """The plan, with the domain of each of its devices."""
    return replace(plan, domains=tuple((device, domains[device]) for device in plan.devices if device in domains))


def domain_lines(plan: Plan, blasts: tuple[Blast, ...]) -> list[str]:
    """What the loss of each domain takes, in words, alike ones together; nothing where no domain is known."""
    if not blasts:
        return []
    lines = [f"Domains: {len(blasts)}. What the loss of one takes:"]
    kinds: dict[str, list[Blast]] = {}
    for blast in blasts:
        kinds.setdefault(_told(blast), []).append(blast)
    for text, alike in list(kinds.items())[:MAX_KINDS]:
        lines.append(f"- {_named(alike)}: {text}")
    if len(kinds) > MAX_KINDS:
        lines.append(f"- {len(kinds) - MAX_KINDS} more kinds of domain: see --json")
    spanning = [f"{replica}" for replica, over in _spans(plan).items() if len(over) > 1]
    if spanning:
        lines.append(
            f"Replicas that span domains, so that tensor parallelism crosses their borders: {_short(spanning)}. "
            f"A run refuses them without --span-domains."
        )
    return lines


def _told(blast: Blast) -> str:
    devices = f"{len(blast.devices)} device{'s' if len(blast.devices) > 1 else ''}"
    ends: dict[tuple[int, int], int] = {}
    for hit in blast.hits:
        ends[hit.before, hit.after] = ends.get((hit.before, hit.after), 0) + 1
    parts = []
    for (before, after), count in ends.items():
        who = f"{count} replica{'s' if count > 1 else ''} of TP {before}"
        parts.append(f"{who} to TP {after}" if after else f"{who} as a whole")
    return f"{devices}, {' and '.join(parts)}; {_then(blast)}"


def _then(blast: Blast) -> str:
    if not blast.num_left:
        return "no device is left, and the job ends"
    if blast.goes_on:
        return "all state is elsewhere too, and training goes on"
    what = "weights and moments" if blast.lost else "moments (owner and mirror)"
    return f"{what} are nowhere else: back to a copy in memory (train.memory_every), or to the newest checkpoint"


def _named(alike: list[Blast]) -> str:
    return _short([blast.domain for blast in alike])


def _short(names: list[str]) -> str:
    rest = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _spans(plan: Plan) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for replica in plan.replicas:
        domains = {plan.domain(device) for device in replica.devices if device is not None}
        found[replica.replica] = {domain for domain in domains if domain is not None}
    return found


def domains_json(blasts: tuple[Blast, ...], element_bytes: int) -> list[dict[str, Any]]:
    """The domains for programs; docs/plan.md says what each key means."""
    return [
        {
            "domain": blast.domain,
            "devices": list(blast.devices),
            "replicas": [{"replica": hit.replica, "tp": hit.before, "tp_after": hit.after} for hit in blast.hits],
            "lost_units": blast.lost,
            "lost_moments_bytes": blast.lost_moments * len(MOMENTS) * element_bytes,
            "num_left": blast.num_left,
            "goes_on": blast.goes_on,
        }
        for blast in blasts
    ]
