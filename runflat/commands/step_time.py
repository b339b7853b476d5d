"""`runflat step-time`: how long a step takes on given hardware, part by part."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import tyro

from runflat.errors import PlanError
from runflat.perf.layout import Attention, Layout, Overlap, Precision, Recompute
from runflat.plan.sync_groups import Sync

if TYPE_CHECKING:
    from rich.table import Table

    from runflat.perf.step_time import Replica, StepTime, StepTimeModel

DESCRIPTION = """Predict a training step on given hardware: its parts in seconds, utilisation, and memory per device.

With --lost one replica has lost devices: its own column shows it, and how many sequences it keeps.

Example: runflat step-time --model llama3-70b --hardware h100 --tp 8 --pp 4 --dp 16 --lost 1
"""


@dataclass(frozen=True)
class StepTimeArgs:
    """A model, a layout and hardware."""

    model: str
    """Name of a known model, or the path of a transformers config.json."""
    hardware: str
    """Name of a known device, or the path of a hardware file."""
    tp: int
    """Tensor-parallel degree of a healthy replica."""
    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Replicas."""
    cp: int = 1
    """Context-parallel degree."""
    global_batch: int | None = None
    """Sequences per step; none: 8 per replica and stage."""
    seq_len: int = 4096
    """Tokens per sequence."""
    micro_batch: int = 1
    """Sequences per micro-batch."""
    virtual: int = 1
    """Chunks of layers per stage; more than 1 is the interleaved schedule."""
    sequence_parallel: bool = True
    """Split norms and residuals over the tensor-parallel group."""
    recompute: Recompute = "none"
    """What backward computes again."""
    precision: Precision = "bf16"
    """Of the layers' matrix products."""
    attention: Attention = "flash"
    """Fused attention, or stored scores."""
    zero1: bool = True
    """Split the optimizer state over the replicas."""
    grad_bytes: int = 4
    """Bytes per gradient element in the sync."""
    fused_grads: bool = True
    """Weight-gradient products add into the accumulated gradient."""
    overlap_tp: Overlap = "full"
    """Which tensor-parallel collectives run under compute."""
    overlap_dp: bool = True
    """Gradient sync runs under the backward pass."""
    overlap_pp: bool = True
    """Stage-to-stage sends run under compute."""
    sync: Sync = "direct"
    """How replicas of different degree meet."""
    lost: int = 0
    """Devices that one stage of one replica has lost."""
    speed: float = 1.0
    """Clock of that stage's survivors relative to nominal (power boost)."""
    json: bool = False
    """Print one JSON object instead of a table."""


def layout_of(args: StepTimeArgs) -> Layout:
    """The layout that the flags describe."""
    names = set(Layout.__dataclass_fields__) - {"global_batch"}
    batch = args.global_batch if args.global_batch is not None else 8 * args.dp * args.pp
    return Layout(global_batch=batch, **{name: getattr(args, name) for name in names})


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = tyro.cli(StepTimeArgs, args=argv, prog="runflat step-time", description=DESCRIPTION)
    if args.tp < 1:
        raise PlanError(f"--tp is {args.tp}: a stage has 1 device or more.")
    if not 0 <= args.lost < args.tp:
        raise PlanError(f"--lost is {args.lost}: a stage of {args.tp} devices can lose 0 to {args.tp - 1} of them.")
    if not (math.isfinite(args.speed) and args.speed > 0):
        raise PlanError(f"--speed is {args.speed}: give a finite number above 0, such as 1.07 for 7 % more.")
    from runflat.cluster.hardware import load_hardware
    from runflat.perf.memory import device_memory
    from runflat.perf.shape import load_model
    from runflat.perf.step_time import StepTimeModel

    model = StepTimeModel(load_hardware(args.hardware), load_model(args.model), layout_of(args))
    columns = {"healthy": model.step()}
    memory = {"healthy": device_memory(model)}
    hurt = _hurt_replica(model, args) if args.lost else None
    if hurt is not None:
        columns["hurt"] = model.step([hurt]) if args.dp == 1 else model.step([model.healthy, hurt])
        memory["hurt"] = device_memory(model, args.tp - args.lost)
    if args.json:
        found = {
            name: {
                **step.parts(), "total_s": step.total_s, "utilisation": model.utilisation(step), **asdict(memory[name])
            }
            for name, step in columns.items()
        }  # fmt: skip
        if hurt is not None:
            found["hurt"]["num_sequences"] = hurt.num_sequences
        print(json.dumps(found, indent=1))
        return 0
    from rich.console import Console

    console = Console()
    console.print(_table(model, columns))
    for name, need in memory.items():
        verdict = "fits" if need.total_bytes <= model.hardware.memory_bytes else "does NOT fit"
        console.print(
            f"memory ({name}): {need.total_bytes / 1e9:.1f} of {model.hardware.memory_bytes / 1e9:.0f} GB per device, "
            f"{verdict}: parameters {need.params_bytes / 1e9:.1f}, gradients {need.grads_bytes / 1e9:.1f}, "
            f"optimizer {need.optimizer_bytes / 1e9:.1f}, activations {need.activations_bytes / 1e9:.1f}"
        )
    if hurt is not None:
        console.print(
            f"the hurt replica ({args.tp - args.lost} of {args.tp} devices in one stage, speed {args.speed:g}) keeps "
            f"{hurt.num_sequences} of {model.layout.sequences_per_replica} sequences within a healthy replica's time"
        )
    return 0


def _hurt_replica(model: StepTimeModel, args: StepTimeArgs) -> Replica:
    """The replica with one hurt stage, with as many sequences as it can do in a healthy replica's time (at least 1)."""
    stage = replace(model.healthy.stages[0], live=args.tp - args.lost, speed=args.speed)
    stages = (*model.healthy.stages[:-1], stage) if args.pp == 1 else (stage, *model.healthy.stages[1:])
    hurt = replace(model.healthy, stages=stages)
    kept = min(model.sequences_within(stages, model.replica(model.healthy).total_s), hurt.num_sequences)
    return replace(hurt, num_sequences=max(1, kept))


def _table(model: StepTimeModel, columns: dict[str, StepTime]) -> Table:
    from rich.table import Table

    layout = model.layout
    table = Table(
        title=f"{model.shape.name} on {layout.num_devices} x {model.hardware.name}: TP {layout.tp} x PP {layout.pp} x "
        f"DP {layout.dp}, {layout.global_batch} sequences of {layout.seq_len}"
    )
    table.add_column("part of a step")
    for name in columns:
        table.add_column(f"{name}, s", justify="right")
        table.add_column("%", justify="right")
    for part in next(iter(columns.values())).parts():
        cells = [part.removesuffix("_s").replace("_", " ")]
        for step in columns.values():
            seconds = step.parts()[part]
            cells += [f"{seconds:.4f}", f"{100 * seconds / step.total_s:.1f}"]
        table.add_row(*cells)
    totals, rates = ["total"], ["model FLOPs utilisation"]
    for step in columns.values():
        totals += [f"{step.total_s:.4f}", "100.0"]
        rates += ["", f"{100 * model.utilisation(step):.1f}"]
    table.add_section()
    table.add_row(*totals)
    table.add_row(*rates)
    return table
