"""What of a model is cut into units, and where each unit lies in each parameter.

Glossary for this file
    axis of a kind   the partitioned dimension as the model sees it, in elements (all query heads times head_dim; all
                     FFN columns; all vocabulary rows)
    unit             a block of `unit_size` elements of that axis; the smallest piece that may move
    segment          a place where a parameter's partitioned dim holds one whole axis. A plain weight has one segment,
                     a fused one (QKV, gate_up) several
    range            half-open (start, stop) of elements

Everything here is integers: no tensors, ranks or groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from runflat.errors import PlanError

REPLICATED = "replicated"
"""Stands for all parameters that every device holds whole: unit 0 of this kind, where it is named like one."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's two moments of a parameter."""
TENSORS = ("weight", *MOMENTS)
"""What a device keeps per parameter: the weight and its moments."""
Range = tuple[int, int]
Rule = Literal["sharded", "equal", "partial"]
"""How a parameter's gradient arises on the devices of one replica: `sharded` (each device has its own units'),
`equal` (every device computes the same full gradient), `partial` (each device has an addend of it)."""


@dataclass(frozen=True)
class Kind:
    """One kind of unit: `size` elements in blocks of `unit_size`; the last block may be smaller.

    A kind with a `parent` has no assignment of its own: a device holds unit u of it when it holds one of the parent's
    units u*group .. u*group+group-1 (KV heads follow the query heads that use them).
    """

    name: str
    size: int
    unit_size: int
    parent: str | None = None
    group: int = 1

    @property
    def num_units(self) -> int:
        """Number of blocks."""
        return -(-self.size // self.unit_size)

    def range_of(self, unit: int) -> Range:
        """Elements of the axis that `unit` covers."""
        return unit * self.unit_size, min((unit + 1) * self.unit_size, self.size)

    def size_of(self, units: Sequence[int]) -> int:
        """Elements of the axis that `units` (ascending) cover."""
        if not units:
            return 0
        missing = self.num_units * self.unit_size - self.size
        return len(units) * self.unit_size - (missing if units[-1] == self.num_units - 1 else 0)

    def units_of_parent(self, parent_units: Iterable[int]) -> tuple[int, ...]:
        """Units of this kind that a holder of `parent_units` needs, ascending."""
        return tuple(sorted({unit // self.group for unit in parent_units}))


@dataclass(frozen=True)
class Segment:
    """The axis of `kind` starts at element `offset` of the parameter's partitioned dim."""

    kind: str
    offset: int


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the full model: its shape and how it is cut.

    `dim` is the partitioned tensor dim (None for replicated ones), `segments` lie in order along it and cover it.
    `order` is its position in the model's forward order; `matmuls` how often a forward multiplies by it (0 for
    embeddings and vectors); `decay` says whether weight decay applies.
    """

    name: str
    shape: tuple[int, ...]
    rule: Rule
    decay: bool
    order: int
    matmuls: int = 0
    dim: int | None = None
    segments: tuple[Segment, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return math.prod(self.shape)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of unit that it is cut into, in the order of its segments, each once; else `REPLICATED`."""
        return tuple(dict.fromkeys(segment.kind for segment in self.segments)) or (REPLICATED,)

    @property
    def is_looked_up(self) -> bool:
        """Whether it is a table of the vocabulary that is only looked up in: an embedding without a tied LM head."""
        return not self.matmuls and len(self.shape) > 1 and any(segment.kind == "vocab" for segment in self.segments)

    @property
    def row_numel(self) -> int:
        """Elements per index of the partitioned dim."""
        assert self.dim is not None
        return self.numel // self.shape[self.dim]


@dataclass(frozen=True)
class ModelSpec:
    """All that planning needs to know of a model. The sizes below `params` serve costs only (`plan/cost.py`)."""

    name: str
    kinds: tuple[Kind, ...]
    params: tuple[ParamSpec, ...]
    hidden_size: int
    num_layers: int
    head_dim: int

    def kind(self, name: str) -> Kind:
        """The kind called `name`."""
        return next(kind for kind in self.kinds if kind.name == name)

    @property
    def assigned_kinds(self) -> tuple[Kind, ...]:
        """Kinds that have an assignment of their own (no parent)."""
        return tuple(kind for kind in self.kinds if kind.parent is None)

    @cached_property
    def rows_by_kind(self) -> Mapping[str, int]:
        """Per kind: parameter elements that one element of its axis stands for, over all parameters."""
        rows = dict.fromkeys((kind.name for kind in self.kinds), 0)
        for param in self.params:
            for segment in param.segments:
                rows[segment.kind] += param.row_numel
        return rows

    @cached_property
    def multiplied_by_kind(self) -> Mapping[str, int]:
        """Per kind: multiply-adds of a forward pass, per token and element of its axis."""
        rows = dict.fromkeys((kind.name for kind in self.kinds), 0)
        for param in self.params:
            for segment in param.segments:
                rows[segment.kind] += param.matmuls * param.row_numel
        return rows

    @cached_property
    def replicated_numel(self) -> int:
        """Elements of the parameters that every device holds whole."""
        return sum(param.numel for param in self.params if param.dim is None)

    @cached_property
    def by_name(self) -> Mapping[str, ParamSpec]:
        """The parameters by full-model name."""
        return {param.name: param for param in self.params}

    @property
    def num_params(self) -> int:
        """Parameters of the full model; tied weights count once."""
        return sum(param.numel for param in self.params)


def block_size(size: int, tp_full: int, largest: int = 64, blocks_per_slot: int = 16) -> int:
    """The largest power of two <= `largest` that leaves `blocks_per_slot` or more blocks for each slot (at least 1)."""
    block = largest
    while block > 1 and size // block < blocks_per_slot * tp_full:
        block //= 2
    return block


def merge_ranges(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same elements as `ranges` (ascending, disjoint), with neighbours joined."""
    merged: list[Range] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def axis_ranges(kind: Kind, units: Iterable[int]) -> tuple[Range, ...]:
    """Elements of the kind's axis that `units` (ascending) cover, neighbours joined."""
    return merge_ranges(kind.range_of(unit) for unit in units)


def param_ranges(spec: ModelSpec, param: ParamSpec, held: Mapping[str, Sequence[int]]) -> tuple[Range, ...]:
    """Ranges of the full parameter's partitioned dim that a device with the units `held` stores, in storage order.

    Storage order is the segments' order and, inside a segment, ascending units: the same rule on every device, so that
    a column-split weight and the row-split one that consumes it always agree.
    """
    ranges: list[Range] = []
    for segment in param.segments:
        for start, stop in axis_ranges(spec.kind(segment.kind), held[segment.kind]):
            ranges.append((segment.offset + start, segment.offset + stop))
    return merge_ranges(ranges)


def ranges_size(ranges: Iterable[Range]) -> int:
    """Number of elements in `ranges`."""
    return sum(stop - start for start, stop in ranges)


@dataclass(frozen=True)
class Piece:
    """One unit's elements inside a local shard: [start, stop) of the shard's partitioned dim."""

    kind: str
    unit: int
    segment: int
    start: int
    stop: int


def shard_pieces(spec: ModelSpec, param: ParamSpec, held: Mapping[str, Sequence[int]]) -> tuple[Piece, ...]:
    """Where each held unit lies in the local shard of `param`, in storage order."""
    pieces: list[Piece] = []
    position = 0
    for index, segment in enumerate(param.segments):
        kind = spec.kind(segment.kind)
        for unit in held[segment.kind]:
            start, stop = kind.range_of(unit)
            pieces.append(Piece(segment.kind, unit, index, position, position + stop - start))
            position += stop - start
    return tuple(pieces)


def shard_shape(spec: ModelSpec, param: ParamSpec, held: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """Shape of the local shard of `param` on a device with the units `held`."""
    if param.dim is None:
        return param.shape
    size = ranges_size(param_ranges(spec, param, held))
    return tuple(size if index == param.dim else length for index, length in enumerate(param.shape))


def unit_bytes(spec: ModelSpec, kind_name: str, unit: int, bytes_per_element: int) -> int:
    """Bytes of one unit over all parameters that have it, at `bytes_per_element`."""
    if kind_name == REPLICATED:
        return sum(math.prod(param.shape) for param in spec.params if param.dim is None) * bytes_per_element
    return spec.kind(kind_name).size_of((unit,)) * spec.rows_by_kind[kind_name] * bytes_per_element


def parse_slot(text: str) -> tuple[int, int]:
    """(replica, slot) of a device id such as "1:3"; PlanError says what is wrong with anything else."""
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
        raise PlanError(f"'{text}' is not a place: write replica:slot with two numbers, for example 1:3.")
    return int(parts[0]), int(parts[1])
