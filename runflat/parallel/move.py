"""Move state between devices when one plan replaces another: pure tensor geometry, then one exchange over the world.

Glossary for this file
    state     a device's part of the model and of AdamW's memory: three tensors per parameter, and one step count
    slab      units start..stop-1 of one segment of one parameter: one range of every shard that holds them
    message   all slabs that one device sends to another, followed by the step count and a checksum
    newcomer  a target that gets all its units: it also needs the replicated parameters
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from runflat.parallel.comms import Comms
from runflat.parallel.post import LIMIT_BYTES, exchange, num_words, seal, unseal
from runflat.plan.plan import Plan
from runflat.plan.transfers import Transfer
from runflat.plan.units import REPLICATED, TENSORS, ModelSpec, ParamSpec

Held = Mapping[str, Sequence[int]]
"""Units per kind, ascending."""


@dataclass(frozen=True)
class ShardState:
    """What one device holds: `tensors[kind][name]` for each kind of `TENSORS`, and the number of applied steps.

    Before the first applied step the moments are zeros and the count is 0, which AdamW takes as a fresh start.
    """

    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    optimizer_step: int


NOTHING = ShardState({kind: {} for kind in TENSORS}, 0)
"""The state of a device that has just come."""


def read_state(params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> ShardState:
    """The state of a device that trains; its tensors are the live ones, not copies."""
    tensors: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in TENSORS}
    step = 0
    for name, param in params.items():
        state = optimizer.state.get(param)
        tensors["weight"][name] = param.detach()
        for kind in TENSORS[1:]:
            tensors[kind][name] = state[kind] if state else torch.zeros_like(param.detach())
        step = int(state["step"]) if state else 0
    return ShardState(tensors, step)


def install_moments(optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter], state: ShardState) -> None:
    """Make `state`'s moments and step count those of `optimizer`, which owns `params`; the tensors are not copied."""
    for name, param in params.items():
        optimizer.state[param] = {
            "step": torch.tensor(float(state.optimizer_step), dtype=torch.float32),
            "exp_avg": state.tensors["exp_avg"][name],
            "exp_avg_sq": state.tensors["exp_avg_sq"][name],
        }


@dataclass(frozen=True)
class Slab:
    """Units start..stop-1 of segment `segment` of parameter `param`; the whole of a replicated one, with segment -1."""

    param: str
    segment: int = -1
    start: int = 0
    stop: int = 0


Written = tuple[str, Slab]
"""A tensor of `TENSORS` and the part of it that is meant."""


def unit_slabs(spec: ModelSpec, kind: str, start: int, stop: int) -> tuple[Slab, ...]:
    """The slabs of units start..stop-1 of `kind`: one per parameter and segment that has them, in the model's order.

    The kind `REPLICATED` stands for all that every device holds whole.
    """
    if kind == REPLICATED:
        return replicated_slabs(spec)
    return tuple(
        Slab(param.name, index, start, stop)
        for param in spec.params
        for index, segment in enumerate(param.segments)
        if segment.kind == kind
    )


def replicated_slabs(spec: ModelSpec) -> tuple[Slab, ...]:
    """The slabs of the parameters that every device holds whole."""
    return tuple(Slab(param.name) for param in spec.params if param.dim is None)


def slab_shape(spec: ModelSpec, param: ParamSpec, slab: Slab) -> tuple[int, ...]:
    """Shape of a slab of `param`."""
    if param.dim is None:
        return param.shape
    kind = spec.kind(param.segments[slab.segment].kind)
    size = kind.range_of(slab.stop - 1)[1] - kind.range_of(slab.start)[0]
    return (*param.shape[: param.dim], size, *param.shape[param.dim + 1 :])


def slab_view(spec: ModelSpec, param: ParamSpec, slab: Slab, held: Held, shard: torch.Tensor) -> torch.Tensor:
    """The part of `shard` (the local shard of `param` on a device with the units `held`) that is `slab`; not a copy."""
    if param.dim is None:
        return shard
    position = 0
    for segment in param.segments[: slab.segment]:
        position += spec.kind(segment.kind).size_of(held[segment.kind])
    kind = spec.kind(param.segments[slab.segment].kind)
    units = held[kind.name]
    first = bisect_left(units, slab.start)
    wanted = units[first : first + slab.stop - slab.start]
    assert tuple(wanted) == tuple(range(slab.start, slab.stop)), f"{slab} is not held: {kind.name} units {units}"
    return shard.narrow(param.dim, position + kind.size_of(units[:first]), kind.size_of(wanted))


def relayout(
    spec: ModelSpec,
    old_held: Held,
    new_held: Held,
    tensors: Mapping[str, torch.Tensor],
    received: Mapping[Slab, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The shard for `new_held`, by name, from the shard `tensors` for `old_held` and the received slabs.

    What is received takes the place of what was held. A parameter of which nothing changes is returned as it is, any
    other is a new tensor: the old shard stays whole.
    """
    incoming: dict[str, dict[Slab, torch.Tensor]] = {}
    for slab, tensor in received.items():
        incoming.setdefault(slab.param, {})[slab] = tensor
    return {
        param.name: relayout_param(
            spec, param, old_held, new_held, tensors.get(param.name), incoming.get(param.name, {})
        )
        for param in spec.params
    }


def relayout_param(
    spec: ModelSpec,
    param: ParamSpec,
    old_held: Held,
    new_held: Held,
    tensor: torch.Tensor | None,
    received: Mapping[Slab, torch.Tensor],
) -> torch.Tensor:
    """What `relayout` makes of one parameter; `received` are slabs of it, `tensor` is None where nothing was held."""
    same = all(tuple(old_held[s.kind]) == tuple(new_held[s.kind]) for s in param.segments)
    if same and tensor is not None and not received:
        return tensor
    if param.dim is None:
        return received[Slab(param.name)].clone()
    runs = _Runs(param.dim)
    for index, segment in enumerate(param.segments):
        old = _own_units(spec, param, index, old_held, tensor)
        for slab, part in received.items():
            if slab.segment == index:
                old.update(_rows(spec, param, index, range(slab.start, slab.stop), part, 0))
        for unit in new_held[segment.kind]:
            runs.add(*old[unit])
    return runs.join()


_Row = tuple[torch.Tensor, int, int]
"""Elements start..stop-1 of a tensor's partitioned dim."""


def _rows(
    spec: ModelSpec, param: ParamSpec, segment: int, units: Sequence[int], tensor: torch.Tensor, position: int
) -> dict[int, _Row]:
    """Where each of `units` lies in `tensor`, the first of them at `position`."""
    kind = spec.kind(param.segments[segment].kind)
    rows: dict[int, _Row] = {}
    for unit in units:
        size = kind.size_of((unit,))
        rows[unit] = (tensor, position, position + size)
        position += size
    return rows


def _own_units(
    spec: ModelSpec, param: ParamSpec, index: int, held: Held, tensor: torch.Tensor | None
) -> dict[int, _Row]:
    if tensor is None:
        return {}
    position = sum(spec.kind(s.kind).size_of(held[s.kind]) for s in param.segments[:index])
    return _rows(spec, param, index, held[param.segments[index].kind], tensor, position)


class _Runs:
    """Rows to be joined, with those that follow each other in one tensor as one."""

    def __init__(self, dim: int):
        self._dim = dim
        self._rows: list[_Row] = []

    def add(self, tensor: torch.Tensor, start: int, stop: int) -> None:
        if self._rows and self._rows[-1][0] is tensor and self._rows[-1][2] == start:
            start = self._rows.pop()[1]
        self._rows.append((tensor, start, stop))

    def join(self) -> torch.Tensor:
        return torch.cat(
            [tensor.narrow(self._dim, start, stop - start) for tensor, start, stop in self._rows], self._dim
        )


@dataclass(frozen=True)
class Change:
    """One change of plan as the device `device` sees it: `old` gives way to `new`, and `moves` must move.

    `new` and `moves` are the same on all devices, `old` is the plan whose units this device holds. `dtype` and
    `torch_device` are those of the shard: a newcomer cannot tell them from its state.
    """

    spec: ModelSpec
    old: Plan
    new: Plan
    moves: tuple[Transfer, ...]
    device: str
    dtype: torch.dtype
    torch_device: torch.device


@dataclass(frozen=True)
class Message:
    """What `source` sends to `target`: slabs in order, `numel` elements of each kind of tensor in all."""

    source: str
    target: str
    slabs: tuple[Slab, ...]
    numel: int

    @property
    def parts(self) -> Iterator[Written]:
        """What it carries, in order."""
        return ((tensor, slab) for slab in self.slabs for tensor in TENSORS)

    def num_words(self, itemsize: int) -> int:
        """Length in 64-bit words on the wire, step count and checksum included."""
        return num_words(self.num_bytes(itemsize))

    def num_bytes(self, itemsize: int) -> int:
        """Bytes of state, without step count, checksum and padding."""
        return len(TENSORS) * self.numel * itemsize


def messages(change: Change) -> tuple[Message, ...]:
    """Who sends what to whom, the same on all devices: the moves, and what is replicated for those that hold nothing.

    The latter comes from the source of the target's first move.
    """
    spec, params = change.spec, change.spec.by_name
    slabs: dict[tuple[str, str], list[Slab]] = {}
    for move in change.moves:
        slabs.setdefault((move.source, move.target), []).extend(unit_slabs(spec, move.kind, move.start, move.stop))
    for target in sorted({move.target for move in change.moves}):
        asked = any(move.target == target and move.kind == REPLICATED for move in change.moves)
        if _gets_all(change, target) and not asked:
            source = next(move.source for move in change.moves if move.target == target)
            slabs[source, target].extend(replicated_slabs(spec))
    return tuple(
        Message(source, target, tuple(listed), sum(math.prod(slab_shape(spec, params[s.param], s)) for s in listed))
        for (source, target), listed in sorted(slabs.items())
    )


def _gets_all(change: Change, target: str) -> bool:
    """Whether `target` holds nothing: all that it is to hold moves. Told by what all devices know alike."""
    wanted = change.new.held(change.spec.kinds, target)
    num_moved = dict.fromkeys(wanted, 0)
    for move in change.moves:
        if move.target == target and move.kind != REPLICATED:
            num_moved[move.kind] += move.stop - move.start
    return all(num_moved[kind] == len(units) for kind, units in wanted.items())


@dataclass(frozen=True)
class Moved:
    """The state under the new plan, and the bytes of state that this device received."""

    state: ShardState
    received_bytes: int


def execute_transfers(change: Change, state: ShardState, comms: Comms, limit_bytes: int = LIMIT_BYTES) -> Moved:
    """Exchange what `change` moves and rebuild the shard. Called by all devices of the new plan, on its groups.

    `state` is untouched, so that a failure loses nothing; the caller installs the returned tensors (those of parameters
    whose units stay are the ones of `state`). Where nothing moves there is no collective.

    Raises:
        CommsError: a member was lost, or a message came damaged or from another step; the text names source and target.
    """
    listed = messages(change)
    kinds = change.spec.kinds
    new_held = change.new.held(kinds, change.device)
    is_newcomer = not state.tensors["weight"]
    old_held = dict.fromkeys(new_held, ()) if is_newcomer else change.old.held(kinds, change.device)
    itemsize = change.dtype.itemsize
    outgoing = {m: _pack(change, m, old_held, state) for m in listed if m.source == change.device}
    incoming = {
        m: torch.empty(m.num_words(itemsize), dtype=torch.int64, device=change.torch_device)
        for m in listed
        if m.target == change.device
    }
    lengths = {(m.source, m.target): m.num_words(itemsize) for m in listed}
    out, into = {m.target: words for m, words in outgoing.items()}, {m.source: words for m, words in incoming.items()}
    exchange(change.new.devices, lengths, out, into, change.torch_device, comms, limit_bytes)
    step = None if is_newcomer else state.optimizer_step
    received: dict[str, dict[Slab, torch.Tensor]] = {kind: {} for kind in TENSORS}
    for message, words in incoming.items():
        step = unseal(message.source, message.target, words, step)
        for tensor, slab, part in read_parts(change.spec, message.parts, words.view(change.dtype)):
            received[tensor][slab] = part
    tensors = {kind: relayout(change.spec, old_held, new_held, state.tensors[kind], received[kind]) for kind in TENSORS}
    num_bytes = sum(message.num_bytes(itemsize) for message in incoming)
    return Moved(ShardState(tensors, state.optimizer_step if step is None else step), num_bytes)


def _pack(change: Change, message: Message, held: Held, state: ShardState) -> torch.Tensor:
    """The message on the wire: for each slab its tensors, row-major, then step count and checksum; int64."""
    words = torch.zeros(message.num_words(change.dtype.itemsize), dtype=torch.int64, device=change.torch_device)
    write_parts(change.spec, message.parts, lambda tensor, param: held, state, words.view(change.dtype))
    seal(words, state.optimizer_step)
    return words


def write_parts(
    spec: ModelSpec,
    parts: Iterable[Written],
    held_of: Callable[[str, ParamSpec], Held],
    state: ShardState,
    flat: torch.Tensor,
) -> None:
    """Put `parts` of a shard one after the other into `flat`, each row-major.

    `held_of(tensor, param)` are the units that the shard's tensor has, by kind.
    """
    position = 0
    for tensor, slab in parts:
        param = spec.by_name[slab.param]
        part = slab_view(spec, param, slab, held_of(tensor, param), state.tensors[tensor][slab.param])
        assert part.dtype == flat.dtype, f"{slab} is {part.dtype}, not {flat.dtype}"
        flat[position : position + part.numel()].view(part.shape).copy_(part)
        position += part.numel()


def read_parts(
    spec: ModelSpec, parts: Iterable[Written], flat: torch.Tensor
) -> Iterator[tuple[str, Slab, torch.Tensor]]:
    """(tensor, slab, its elements) of what `write_parts` has put into `flat`; views."""
    position = 0
    for tensor, slab in parts:
        shape = slab_shape(spec, spec.by_name[slab.param], slab)
        numel = math.prod(shape)
        yield tensor, slab, flat[position : position + numel].view(shape)
        position += numel
