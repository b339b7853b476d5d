"""The tables of `runflat plan`: equal replicas, devices and groups share a row, so that large layouts stay readable."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar, get_args

from rich import box
from rich.console import Console
from rich.table import Table

from runflat.commands.plan_domains import domain_lines
from runflat.commands.plan_report import MOVED_COPIES, By, DeviceReport, GroupReport, Report
from runflat.commands.plan_sync import mode_cells
from runflat.commands.plan_zero import fallback_lines
from runflat.plan.assignment import base_assignment
from runflat.plan.plan import Place, ReplicaPlan
from runflat.plan.sync_groups import MAX_COMMUNICATORS
from runflat.plan.units import parse_slot

Item = TypeVar("Item")

LABELS = {"head": "query heads", "kv": "KV heads", "ffn": "FFN blocks", "vocab": "vocabulary blocks"}
SHORT = {"head": "heads", "kv": "KV", "ffn": "FFN", "vocab": "vocab"}
MAX_ROWS = 24
"""Rows of a table; what is left out is named under it."""
MAX_DETAILED = 6
"""Replicas (groups of equal ones) whose assignment is printed."""
MAX_SLOTS = 16
"""Slots of a replica up to which each has its own row; above, slots with equal counts share one."""
MAX_PARTS = 6
"""Parts of a list of numbers; the rest is counted."""
MEBI = 2**20


def show(found: Report, console: Console | None = None) -> None:
    """Print the report; the width is the terminal's, 80 columns in a pipe."""
    console = console or Console(highlight=False, markup=False, emoji=False)
    for line in _head(found):
        console.print(line)
    replicas = grouped(found.plan.replicas, lambda r: (r.live_slots, r.assignments, r.num_sequences))
    tables = [_replica_table(found, replicas)]
    tables += [_assignment_table(found, group) for group in replicas[:MAX_DETAILED]]
    for table in tables:
        console.print(table)
        console.print()
    if len(replicas) > MAX_DETAILED:
        console.print(f"{len(replicas) - MAX_DETAILED} more kinds of replica: --json lists every assignment.\n")
    for line in _transfer_lines(found):
        console.print(line)
    modes = [] if found.zero else [_modes_table(found)]
    for table in (_memory_table(found), _traffic_table(found), *modes, _sync_table(found)):
        console.print(table)
        console.print()
    for line in (*_sync_lines(found), *domain_lines(found.plan, found.blasts)):
        console.print(line)


def grouped(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """The items, those with the same key together, in order of first appearance."""
    found: dict[Hashable, list[Item]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return list(found.values())


def number_list(numbers: Iterable[int], max_parts: int = MAX_PARTS) -> str:
    """Ascending numbers as ranges, "0-7, 24"; from `max_parts` ranges on the rest is counted."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    rest = sum(last - first + 1 for first, last in ranges[max_parts:])
    return ", ".join(parts[:max_parts]) + (f" and {rest} more" if rest else "")


def place_list(places: Sequence[Place]) -> str:
    """Places as replicas:slots, "0,3:0-7; 1:0-2": slots 0 to 7 of replicas 0 and 3, slots 0 to 2 of replica 1."""
    slots: dict[int, list[int]] = defaultdict(list)
    for replica, slot in places:
        slots[replica].append(slot)
    parts = []
    for group in grouped(slots.items(), lambda item: tuple(item[1])):
        replicas = number_list((replica for replica, _ in group), 10**9)
        parts.append(f"{replicas}:{number_list(group[0][1], 10**9)}".replace(", ", ","))
    rest = len(parts) - MAX_PARTS
    shown = "; ".join(part if len(part) <= 40 else f"{part[:37]}..." for part in parts[:MAX_PARTS])
    return shown + (f"; and {rest} more" if rest > 0 else "")


def _table(title: str, *columns: str, left: int = 1) -> Table:
    """A table whose first `left` columns are text and whose others are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", overflow="fold")
    return table


def _short(number: float) -> str:
    """Four digits, more where the number has them before its point."""
    return f"{number:,.0f}" if number >= 999.95 or not number else f"{number:#.4g}"


def _mib(num_bytes: float) -> str:
    return _short(num_bytes / MEBI)


def _gib(num_bytes: float) -> str:
    return _short(num_bytes / 1024 / MEBI)


def _head(found: Report) -> list[str]:
    spec, plan, args = found.spec, found.plan, found.args
    full = args.tp * args.replicas
    kinds = ", ".join(f"{kind.num_units} {LABELS.get(kind.name, kind.name)}" for kind in spec.kinds)
    blocks = [kind for kind in spec.kinds if kind.name in ("ffn", "vocab")]
    sizes = ", ".join(f"{LABELS[kind.name]} of {kind.unit_size}" for kind in blocks)
    dead = sorted(set(map(parse_slot, args.dead)))
    lines = [
        f"{args.model}: {spec.name}, {spec.num_params / 1e6:,.1f} M parameters, {spec.num_layers} layers",
        f"units: {kinds} ({sizes})",
        f"layout: {args.replicas} x TP {args.tp}, {len(plan.places)} of {full} devices"
        + (f"; dead: {place_list(dead)}" if dead else ""),
        f"step: {plan.num_sequences} sequences of {found.seq_len} tokens, micro-batches of up to {args.micro_batch}, "
        f"{args.dtype}" + (", moments on owner and mirror (zero1)" if found.zero else ""),
    ]
    gone = sorted(set(range(args.replicas)) - {replica.replica for replica in plan.replicas})
    if gone:
        lines.append(
            f"replica{'s' if len(gone) > 1 else ''} {number_list(gone)} left out: with so few live slots, the step is "
            "shorter when the others do all sequences."
        )
    return [*lines, ""]


def _replica_table(found: Report, groups: list[list[ReplicaPlan]]) -> Table:
    table = _table("Replicas", "replicas", "dead slots", "tp", "sequences each", "load max/mean", "step time", left=2)
    by_replica = found.by_replica
    slowest = max(device.flops_per_step for device in found.devices)
    for group in groups[:MAX_ROWS]:
        devices = by_replica[group[0].replica]
        flops = [device.flops_per_sequence for device in devices]
        table.add_row(
            number_list(replica.replica for replica in group),
            number_list(group[0].dead_slots) or "none",
            str(group[0].tp),
            str(group[0].num_sequences),
            f"{max(flops) * len(flops) / sum(flops):.3f}",
            f"{max(device.flops_per_step for device in devices) / slowest:.1%}",
        )
    table.caption = "step time: FLOPs of the most loaded device, against the slowest replica's"
    _name_rest(table, len(groups), "kinds of replica")
    return table


def _name_rest(table: Table, num_rows: int, what: str) -> None:
    table.caption_justify = "left"
    if num_rows > MAX_ROWS:
        rest = f"{num_rows - MAX_ROWS} more {what}: see --json"
        table.caption = f"{table.caption}; {rest}" if table.caption else rest


def _assignment_table(found: Report, group: list[ReplicaPlan]) -> Table:
    spec, replica = found.spec, group[0]
    named = f"replica{'s' if len(group) > 1 else ''} {number_list(r.replica for r in group)}"
    labels = [SHORT.get(kind.name, kind.name) for kind in spec.kinds]
    table = _table(f"Units of {named}", "slots", *labels, "TFLOP", "load", left=1 + len(labels))
    table.caption = "TFLOP: one sequence, forward and backward; load: that over the replica's mean"
    devices = found.by_replica[replica.replica]
    mean = sum(device.flops_per_sequence for device in devices) / len(devices)
    base = {kind.name: base_assignment(kind.num_units, found.args.tp) for kind in spec.assigned_kinds}
    rows: list[tuple[int, list[str]]] = []
    for device in devices:
        slot = device.place[1]
        held = replica.held(spec.kinds, slot)
        own = {kind: base[kind][slot] if kind in base else units for kind, units in held.items()}
        text = _counts if found.args.tp > MAX_SLOTS else _units
        cells = [text(held[kind.name], own[kind.name]) for kind in spec.kinds]
        flops = device.flops_per_sequence
        rows.append((slot, [*cells, _short(flops / 1e12), f"{flops / mean:.3f}"]))
    shared = grouped(rows, lambda row: tuple(row[1])) if found.args.tp > MAX_SLOTS else [[row] for row in rows]
    for same in shared[:MAX_ROWS]:
        table.add_row(number_list(slot for slot, _ in same), *same[0][1])
    _name_rest(table, len(shared), "kinds of slot")
    return table


def _units(held: Sequence[int], base: Sequence[int]) -> str:
    """The units by number where that is short, else the base and how many were dealt to it."""
    text = number_list(held, 10**9)
    dealt = len(held) - len(base)
    return text if len(text) <= 12 or not dealt else f"{number_list(base)} + {dealt}"


def _counts(held: Sequence[int], base: Sequence[int]) -> str:
    dealt = len(held) - len(base)
    return f"{len(base)} + {dealt}" if dealt else str(len(held))


def _transfer_lines(found: Report) -> list[str]:
    if not found.args.dead:
        return ["To move: nothing, no slot is dead.", ""]
    if found.moves is None:
        units = "; ".join(f"{LABELS.get(kind, kind)} {number_list(units)}" for kind, units in found.lost.items())
        whose = " with all of their optimizer state" if found.zero else ""
        return [f"To move: no live device holds {units}{whose}. Their state must come from a checkpoint.", ""]
    received: dict[str, int] = defaultdict(int)
    for move in found.moves:
        received[move.target] += move.num_bytes
    total = sum(received.values())
    what = f"{MOVED_COPIES} values per element: parameter and two moments"
    if found.zero:
        what = "parameters, and moments that have other keepers now"
    return [
        f"To move from the plan without dead slots to this one: {_mib(total)} MiB ({what}) in "
        f"{len(found.moves)} transfers to {len(received)} devices, at most "
        f"{_mib(max(received.values(), default=0))} MiB to one.",
        "",
    ]


def _memory_table(found: Report) -> Table:
    table = _table("GiB per device", "devices", "parameters", "gradients", "moments", "activations", "total")

    def cells(device: DeviceReport) -> tuple[str, ...]:
        memory = device.memory
        parts = (memory.params_bytes, memory.grads_bytes, memory.moments_bytes, memory.activations_bytes)
        return tuple(map(_gib, (*parts, memory.total_bytes)))

    devices = sorted(found.devices, key=lambda device: -device.memory.total_bytes)
    what = "layers recomputed" if found.args.activation_checkpointing else "nothing recomputed"
    tokens = ", tokens split between the layers" if found.args.sequence_parallel else ""
    table.caption = f"activations: estimate for a micro-batch of {found.args.micro_batch}, {what}{tokens}"
    return _fill(table, devices, cells)


def _traffic_table(found: Report) -> Table:
    weights = ["weights"] if found.zero else []
    columns = ("devices", "comms", "launches", "TP", "sync", "replicated", *weights, "total")
    table = _table("MiB sent per device and step", *columns)

    def cells(device: DeviceReport) -> tuple[str, ...]:
        traffic = device.traffic
        gathered = [traffic.gathered_bytes] if found.zero else []
        sizes = (traffic.tp_bytes, traffic.sync_bytes, traffic.replicated_bytes, *gathered, traffic.total_bytes)
        return (str(device.num_communicators), f"{traffic.num_collectives:,}", *map(_mib, sizes))

    devices = sorted(found.devices, key=lambda device: -device.traffic.total_bytes)
    table.caption = "comms: communicators, with those of all devices and of the replica; launches: collectives"
    table.caption += "; weights: updated ones, from owners to the other holders" if found.zero else ""
    return _fill(table, devices, cells)


def _modes_table(found: Report) -> Table:
    columns = ("mode", "replicas", "most", "network", "domain", "all", "messages", "comms")
    table = _table("Gradient exchange, MiB sent per step", *columns, left=2)
    for mode in found.modes:
        table.add_row(*mode_cells(mode, _mib))
    table.caption = "most: by one device; network, domain: to other replicas, inside its own"
    table.caption_justify = "left"
    return table


def _fill(table: Table, devices: list[DeviceReport], cells: Callable[[DeviceReport], tuple[str, ...]]) -> Table:
    """One row for all devices with equal cells, in the order of `devices`."""
    rows = grouped(devices, cells)
    for same in rows[:MAX_ROWS]:
        table.add_row(place_list(sorted(device.place for device in same)), *cells(same[0]))
    _name_rest(table, len(rows), "kinds of device, with less")
    return table


def _sync_table(found: Report) -> Table:
    labels = [SHORT.get(kind.name, kind.name) for kind in found.spec.kinds]
    table = _table("Sync groups", "members", *labels, "MiB", "summed by")

    def cells(group: GroupReport) -> list[str]:
        counts = (len(group.units.get(kind.name, ())) for kind in found.spec.kinds)
        return [*(str(count) if count else "" for count in counts), _mib(group.num_bytes), group.by.replace("_", "-")]

    alone = len(found.groups) <= MAX_ROWS * 2
    groups = sorted(found.groups, key=lambda group: -group.num_bytes) if not alone else list(found.groups)
    rows = grouped(groups, lambda g: g.members if alone else (len(g.members), *cells(g)))
    limit = MAX_ROWS * 2 if alone else MAX_ROWS
    for same in rows[:limit]:
        first = same[0].members
        text = place_list(first) if len(same) == 1 else f"{len(same)} groups of {len(first)}"
        table.add_row(text, *cells(same[0]))
    table.caption_justify = "left"
    if len(rows) > limit:
        table.caption = f"{sum(map(len, rows[limit:]))} more, smaller groups: see --json"
    return table


def _sync_lines(found: Report) -> list[str]:
    num = {by: sum(group.by == by for group in found.groups) for by in get_args(By)}
    lines = [
        f"{num['all_reduce'] + num['owners']} sync groups with a communicator of their own; "
        f"{len(found.layout.replicated)} replicated parameters "
        f"({_mib(found.layout.replicated_numel * found.element_bytes)} MiB) in one bucket over all devices."
    ]
    if num["exchange"]:
        lines.append(
            f"{num['exchange']} small groups share one all-to-all, so that no device has more than {MAX_COMMUNICATORS} "
            "communicators."
        )
    if num["nothing"]:
        lines.append(f"{num['nothing']} groups have one member and exchange nothing.")
    return lines + (fallback_lines(found.zero, _mib) if found.zero else [])
