"""What `runflat plan` knows of a layout: everything counted once, for the tables and for programs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from runflat.commands.plan_domains import device_domains, domains_json, with_domains
from runflat.commands.plan_sync import SyncReport, compare_modes, modes_json
from runflat.commands.plan_zero import PairMove, ZeroReport, pair_moves, zero_json, zero_report
from runflat.plan.blast import Blast, blast_radii
from runflat.plan.cost import Memory, Traffic, device_memory, device_traffic, loads
from runflat.plan.plan import Place, Plan
from runflat.plan.planner import build_plan, live_devices
from runflat.plan.sync_groups import Members, SyncLayout, holders, sync_layout
from runflat.plan.transfers import Transfer, lost_units, transfers
from runflat.plan.units import ModelSpec, parse_slot
from runflat.plan.zero import OptimizerMode, Ownership, ownership

ELEMENT_BYTES = {"float32": 4, "float64": 8, "bfloat16": 4}
COMPUTE_BYTES = {**ELEMENT_BYTES, "bfloat16": 2}
MOVED_COPIES = 3
"""Values that move with each element: the parameter and two moments."""
SEQUENCES_PER_REPLICA = 16
By = Literal["all_reduce", "exchange", "owners", "nothing"]


@dataclass(frozen=True)
class PlanArgs:
    """What to plan."""

    model: str
    """Directory with a config.json, a transformers model type such as llama or qwen2, or a named shape (tiny, demo,
    llama3-8b, llama3-70b, llama3-405b, qwen2-7b)."""
    tp: int = 8
    """Full tensor-parallel degree: devices per replica when none is dead."""
    replicas: int = 1
    """Data-parallel replicas."""
    dead: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A dead slot as replica:slot, both counted from 0, such as 1:3."""
    sequences: int | None = None
    """Sequences per step over all replicas; None: 16 for each replica."""
    seq_len: int | None = None
    """Tokens per sequence; None: 4096, or what the model allows if that is less."""
    micro_batch: int = 1
    """Most sequences that a replica computes at once."""
    bucket_mb: float = 25.0
    """Size of a gradient bucket in MiB."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Type of weights, gradients and optimizer state; bfloat16: that of computation, all else is float32."""
    activation_checkpointing: bool = False
    """Keep only the inputs of layers for backward, and compute the layers again there."""
    sequence_parallel: bool = False
    """Between the split layers each device of a replica has a part of the tokens."""
    optimizer: OptimizerMode = "replicated"
    """Who keeps AdamW's moments: each holder of a unit, or (zero1) one owner and one mirror."""
    json: bool = False
    """Print one JSON object instead of tables."""
    domain_size: int | None = None
    """Devices of a domain, such as a machine, which may go as a whole: says what goes with it. Replicas are packed into
    domains; None: nobody knows."""
    topology: Path | None = None
    """Instead: a JSON file with the devices or whole replicas of each domain, {"node1": ["0", "1"], "node2": ["2"]}."""


@dataclass(frozen=True)
class DeviceReport:
    """One device: FLOPs of one sequence and of one step, bytes that it needs, what it launches and sends per step."""

    device: str
    place: Place
    flops_per_sequence: int
    flops_per_step: int
    memory: Memory
    traffic: Traffic
    num_communicators: int


@dataclass(frozen=True)
class GroupReport:
    """One sync group: its members, the units that exactly these hold, and how their gradients are summed.

    `by` is all_reduce (a communicator of its own), exchange (in the all-to-all that small groups share), owners (with
    zero1, each piece by one member), or nothing (one member).
    """

    members: Members
    units: Mapping[str, tuple[int, ...]]
    num_bytes: int
    by: By


@dataclass(frozen=True)
class Report:
    """All that `runflat plan` knows of a layout. `moves` is None where units are lost, which nobody can send.

    `zero` is there with zero1 only.
    """

    args: PlanArgs
    spec: ModelSpec
    seq_len: int
    plan: Plan
    layout: SyncLayout
    devices: tuple[DeviceReport, ...]
    groups: tuple[GroupReport, ...]
    moves: tuple[Transfer | PairMove, ...] | None
    lost: Mapping[str, tuple[int, ...]]
    modes: tuple[SyncReport, ...]
    zero: ZeroReport | None
    blasts: tuple[Blast, ...]

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of a parameter."""
        return ELEMENT_BYTES[self.args.dtype]

    @property
    def by_replica(self) -> Mapping[int, tuple[DeviceReport, ...]]:
        """The devices of each replica of the plan, by slot."""
        found: dict[int, list[DeviceReport]] = defaultdict(list)
        for device in self.devices:
            found[device.place[0]].append(device)
        return {replica: tuple(devices) for replica, devices in found.items()}


def report(args: PlanArgs, spec: ModelSpec, seq_len: int, live: Mapping[Place, str]) -> Report:
    """Plan the `live` devices, compare with the plan of the same layout without dead slots, and count everything.

    Raises:
        PlanError: the degree is above the number of units of some kind.
    """
    sequences = args.sequences or SEQUENCES_PER_REPLICA * args.replicas
    healthy = build_plan(spec, live_devices(args.tp, args.replicas, ()), args.tp, sequences, seq_len)
    plan = build_plan(spec, live, args.tp, sequences, seq_len, healthy, generation=1) if args.dead else healthy
    domains = device_domains(args.tp, args.replicas, args.domain_size, args.topology)
    healthy, plan = (with_domains(each, domains) for each in (healthy, plan))
    element_bytes = ELEMENT_BYTES[args.dtype]
    bucket_bytes = max(1, int(args.bucket_mb * 2**20))
    layout = sync_layout(spec, plan, bucket_bytes, element_bytes)

    @cache
    def ownership_of(plan: Plan) -> Ownership:
        return ownership(spec, plan, sync_layout(spec, plan, bucket_bytes, element_bytes))

    owned = ownership_of(plan) if args.optimizer == "zero1" else None
    compute_bytes, recompute = COMPUTE_BYTES[args.dtype], args.activation_checkpointing
    how = (args.micro_batch, element_bytes, compute_bytes, recompute, args.sequence_parallel)
    devices = []
    for replica in plan.replicas:
        for slot, flops in loads(spec, replica, seq_len).items():
            place = (replica.replica, slot)
            devices.append(
                DeviceReport(
                    device=plan.device(place),
                    place=place,
                    flops_per_sequence=flops,
                    flops_per_step=flops * replica.num_sequences,
                    memory=device_memory(
                        spec, replica, slot, seq_len, *how, owned.kept_numel(place) if owned is not None else None
                    ),
                    traffic=device_traffic(spec, plan, layout, place, seq_len, *how, owned),
                    num_communicators=layout.communicators(place),
                )
            )
    moves: tuple[Transfer | PairMove, ...]
    if owned is None:
        lost = lost_units(spec, healthy, plan)
        moves = () if lost else transfers(spec, healthy, plan, MOVED_COPIES * element_bytes)
    else:
        moves, lost = pair_moves(spec, healthy, plan, ownership_of, element_bytes) if args.dead else ((), {})
    return Report(
        args=args,
        spec=spec,
        seq_len=seq_len,
        plan=plan,
        layout=layout,
        devices=tuple(devices),
        groups=_groups(spec, plan, layout, element_bytes, owned is not None),
        moves=None if lost else moves,
        lost=lost,
        modes=compare_modes(spec, plan, layout, bucket_bytes, element_bytes),
        zero=zero_report(owned, plan, element_bytes) if owned is not None else None,
        blasts=blast_radii(spec, plan, owned),
    )


def _groups(
    spec: ModelSpec, plan: Plan, layout: SyncLayout, element_bytes: int, is_owned: bool
) -> tuple[GroupReport, ...]:
    units: dict[Members, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for kind, by_unit in holders(spec, plan).items():
        for unit, members in sorted(by_unit.items()):
            units[members][kind].append(unit)
    own = set(layout.groups)
    found = []
    for members in sorted(units):
        held = {kind: tuple(listed) for kind, listed in units[members].items()}
        numel = sum(spec.kind(kind).size_of(listed) * spec.rows_by_kind[kind] for kind, listed in held.items())
        summed: By = "owners" if is_owned else "all_reduce"
        shared: By = summed if members in own else "exchange"
        found.append(GroupReport(members, held, numel * element_bytes, shared if len(members) > 1 else "nothing"))
    return tuple(found)


def as_json(found: Report) -> dict[str, Any]:
    """The report for programs; docs/plan.md says what each key means."""
    spec, plan, args = found.spec, found.plan, found.args
    kinds = [
        {"name": kind.name, "num_units": kind.num_units, "unit_size": kind.unit_size, "size": kind.size}
        for kind in spec.kinds
    ]
    return {
        "model": {"name": spec.name, "num_params": spec.num_params, "num_layers": spec.num_layers, "kinds": kinds},
        "layout": {
            "tp": args.tp,
            "replicas": args.replicas,
            "dead": ["{}:{}".format(*place) for place in sorted(set(map(parse_slot, args.dead)))],
            "num_devices": len(plan.places),
            "sequences": plan.num_sequences,
            "seq_len": found.seq_len,
            "micro_batch": args.micro_batch,
            "bucket_mb": args.bucket_mb,
            "dtype": args.dtype,
            "activation_checkpointing": args.activation_checkpointing,
            "sequence_parallel": args.sequence_parallel,
            "domain_size": args.domain_size,
            "topology": None if args.topology is None else str(args.topology),
        },
        "plan": json.loads(plan.to_json()),
        "replicas": _replicas_json(found),
        "devices": [_device_json(found, device) for device in found.devices],
        "transfers": {
            "bytes": None if found.moves is None else sum(move.num_bytes for move in found.moves),
            "moves": None if found.moves is None else [asdict(move) for move in found.moves],
            "lost_units": found.lost,
        },
        "sync_groups": [
            {
                "members": [plan.device(place) for place in group.members],
                "units": group.units,
                "bytes": group.num_bytes,
                "by": group.by,
            }
            for group in found.groups
        ],
        "domains": domains_json(found.blasts, found.element_bytes),
        "sync_modes": modes_json(found.modes),
        "optimizer": zero_json(found.zero, plan),
        "replicated": {
            "num_params": len(found.layout.replicated),
            "bytes": found.layout.replicated_numel * found.element_bytes,
        },
    }


def _replicas_json(found: Report) -> list[dict[str, Any]]:
    slowest = max(device.flops_per_step for device in found.devices)
    rows = []
    for number, devices in found.by_replica.items():
        flops = [device.flops_per_sequence for device in devices]
        replica = found.plan.replica(number)
        rows.append(
            {
                "replica": number,
                "tp": replica.tp,
                "num_sequences": replica.num_sequences,
                "load_max_over_mean": max(flops) * len(flops) / sum(flops),
                "step_time": max(device.flops_per_step for device in devices) / slowest,
            }
        )
    return rows


def _device_json(found: Report, device: DeviceReport) -> dict[str, Any]:
    held = found.plan.replica(device.place[0]).held(found.spec.kinds, device.place[1])
    return {
        "device": device.device,
        "replica": device.place[0],
        "slot": device.place[1],
        "num_units": {kind: len(units) for kind, units in held.items()},
        "flops_per_sequence": device.flops_per_sequence,
        "flops_per_step": device.flops_per_step,
        "memory": {**asdict(device.memory), "total_bytes": device.memory.total_bytes},
        "traffic": {**asdict(device.traffic), "total_bytes": device.traffic.total_bytes},
        "num_communicators": device.num_communicators,
    }
