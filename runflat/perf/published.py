"""Published measurements of training steps, and the rules that turn a row into a layout.

A table is a CSV file with the columns that `_read_row` names (others are ignored). The rules are the same for all rows:

* software follows from what the publication says of itself and from the row's recompute column: `SOFTWARE`, one entry
  per publication, none per row;
* a row without a micro-batch size or a number of chunks was tuned by its authors, so it gets the combination that is
  predicted to be fastest among those that fit into memory: micro-batches of 1, 2, 4 or 8 sequences; one or two chunks
  of layers per stage (two only if the micro-batches come in whole groups of one per stage, as the schedule wants them).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from runflat.cluster.hardware import Hardware, load_hardware
from runflat.errors import ConfigError
from runflat.perf.efficiency import Efficiencies
from runflat.perf.layout import Layout, Precision
from runflat.perf.memory import device_memory
from runflat.perf.shape import ModelShape
from runflat.perf.step_time import StepTimeModel

_MEGATRON_2021: Mapping[str, Any] = {
    "attention": "eager", "zero1": False, "sequence_parallel": False,
    "overlap_tp": "none", "overlap_dp": False, "overlap_pp": False, "fused_grads": False,
}  # fmt: skip
_MODERN: Mapping[str, Any] = {}

SOFTWARE: Mapping[str, Mapping[str, Any]] = {
    "sc21": _MEGATRON_2021,
    "mtnlg": _MEGATRON_2021,
    "korth": {**_MEGATRON_2021, "overlap_tp": "backward", "fused_grads": True},
    "mcore": _MODERN,
}
"""Fields of `Layout` by publication; one that is not listed is taken to be like Megatron-Core (fused attention, all
communication overlapped, sharded optimizer), which are `Layout`'s defaults."""

_MICRO_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Row:
    """One published step: `seconds` as measured or as derived from the published rate."""

    name: str
    publication: str
    hardware: Hardware
    shape: ModelShape
    layout: Layout
    known_micro_batch: bool
    known_virtual: bool
    seconds: float


def publication_of(name: str) -> str:
    """The publication that a row's id begins with; both tables of one paper count as one."""
    for known in ("korth", "sc21", "mtnlg", "mcore"):
        if name.startswith(known):
            return known
    return name.split("-")[0]


def read_rows(path: Path) -> tuple[Row, ...]:
    """The rows of the table at `path`.

    Raises:
        ConfigError: no such file, or a row with a missing or unreadable value.
    """
    if not path.is_file():
        raise ConfigError(f"there is no table of published steps at '{path}': give the path of the CSV file.")
    with path.open(newline="", encoding="utf-8") as file:
        return tuple(_read_row(record, path) for record in csv.DictReader(file))


def _read_row(record: Mapping[str, str], path: Path) -> Row:
    try:
        name = record["id"]
        number = {key: int(record[key]) for key in _INTEGERS}
        micro_batch, virtual = record["mbs"], record["vp"]
        seconds = float(record["step_s_measured"] or record["step_s_derived"])
        publication = publication_of(name)
        recompute, precision = record["recompute"], _PRECISIONS[record["precision"]]
        software = dict(SOFTWARE.get(publication, _MODERN))
        software["grad_bytes"] = 2 if precision == "fp16" else 4
        software["recompute"] = next((word for word in ("full", "selective") if recompute.startswith(word)), "none")
        if "sequence" in recompute:
            software["sequence_parallel"] = True
        gated = record.get("gated", "") in {"1", "true", "yes"} or record["model"].lower().startswith("llama")
        shape = ModelShape(
            record["model"], number["layers"], number["hidden"], number["heads"], number["kv_heads"],
            number["hidden"] // number["heads"], number["ffn_hidden"], number["vocab"], gated, tied=not gated,
        )  # fmt: skip
        layout = Layout(
            tp=number["tp"], pp=number["pp"], dp=number["dp"], cp=number["cp"], global_batch=number["gbs_seqs"],
            seq_len=number["seq"], micro_batch=int(micro_batch or 1), virtual=int(virtual or 1),
            precision=precision, **software,
        )  # fmt: skip
    except (KeyError, ValueError) as error:
        raise ConfigError(f"'{path}', row '{record.get('id', '?')}': {error!r}: correct the table.") from error
    hardware = load_hardware(record["gpu"].split("-")[0].split(" ")[0].lower())
    return Row(name, publication, hardware, shape, layout, bool(micro_batch), bool(virtual), seconds)


_PRECISIONS: Mapping[str, Precision] = {"fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
_INTEGERS = (
    "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq", "tp", "pp", "cp", "dp", "gbs_seqs",
)  # fmt: skip


def candidates(row: Row) -> Iterator[Layout]:
    """Layouts that agree with what a row says and fit into memory; the plain one if none fits."""
    sizes = (row.layout.micro_batch,) if row.known_micro_batch else _MICRO_BATCHES
    layers = row.shape.num_layers // row.layout.pp
    chunks = (1, 2) if row.layout.pp > 1 and layers > 1 else (1,)
    found = False
    for size in sizes:
        if row.layout.sequences_per_replica % size:
            continue
        num_micro = row.layout.sequences_per_replica // size
        for count in (row.layout.virtual,) if row.known_virtual else chunks:
            # Megatron's interleaved schedule wants micro-batches in groups of one per stage.
            if count > 1 and num_micro % row.layout.pp and not row.known_virtual:
                continue
            layout = replace(row.layout, micro_batch=size, virtual=count)
            if _fits(row.hardware, row.shape, layout):
                found = True
                yield layout
    if not found:
        yield row.layout


_ANY = Efficiencies(1, 1, 1, 1, 0)
"""Memory does not depend on efficiencies; a model needs some."""


@lru_cache(maxsize=4096)
def _fits(hardware: Hardware, shape: ModelShape, layout: Layout) -> bool:
    model = StepTimeModel(hardware, shape, layout, _ANY)
    return device_memory(model).total_bytes < hardware.memory_bytes


def predict(row: Row, efficiencies: Efficiencies) -> tuple[float, Layout]:
    """Predicted seconds of a row's step, and the layout that the rules gave it."""
    best: tuple[float, Layout] | None = None
    for layout in candidates(row):
        seconds = StepTimeModel(row.hardware, row.shape, layout, efficiencies).step().total_s
        if best is None or seconds < best[0]:
            best = (seconds, layout)
    assert best is not None  # candidates always yields one
    return best
