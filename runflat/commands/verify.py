"""`runflat verify`: the proof on the user's own model that a step with dead slots equals the unsharded step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from runflat.commands.models import model_config
from runflat.errors import ConfigError
from runflat.plan.sync_groups import Sync
from runflat.plan.units import parse_slot
from runflat.plan.zero import OptimizerMode

if TYPE_CHECKING:
    from rich.table import Table

    from runflat.check.verify import Case, Errors

DESCRIPTION = """Prove on your model that training with dead slots equals training on one device.

Three steps of the unmodified transformers model in one process are compared with the same three steps under the plan,
one thread per device, in float64. The exit code is 1 if any relative error is above 1e-9.

Example: runflat verify --model llama --tp 4 --dead 0:2 --dead 1:1
"""
WIDTH = 110
"""Columns of the tables where the output is no terminal."""


@dataclass(frozen=True)
class VerifyArgs:
    """What to verify."""

    model: str
    """Directory with a config.json, a transformers model type such as llama or qwen2, or a named shape."""
    tp: int = 8
    """Full tensor-parallel degree."""
    replicas: int | None = None
    """Data-parallel replicas; none: as many as the dead slots name, at least 2."""
    dead: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A dead slot as replica:slot, such as 1:3; may be repeated."""
    sync: Sync = "direct"
    """How the planned side sums gradients: direct, or reshard."""
    optimizer: OptimizerMode = "replicated"
    """Who keeps the optimizer's state on the planned side: all holders of a unit, or (zero1) its owner and mirror."""
    sequence_parallel: bool = False
    """On the planned side each device of a replica has a part of the tokens between the split layers."""
    full: bool = False
    """Take the model's own sizes instead of a small model of the same architecture (needs memory for all devices)."""
    seed: int = 0
    """Seed of weights and tokens."""
    json: bool = False
    """Print one JSON object instead of tables."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code: 0 where the proof holds, 1 where it does not."""
    args = tyro.cli(
        VerifyArgs, args=argv, prog="runflat verify", description=DESCRIPTION, config=(tyro.conf.FlagCreatePairsOff,)
    )
    case = _case(args)
    import torch

    from runflat.check.small import small_batch, small_config
    from runflat.check.verify import TOLERANCE, verify

    torch.set_num_threads(1)  # the ranks are threads already
    config = model_config(args.model)
    if not args.full:
        config = small_config(config, args.tp)
    batch = small_batch(config.vocab_size, config.pad_token_id, case.num_sequences, case.seq_len, args.seed)
    lifted, as_is = (verify(config, case, batch, lift) for lift in (True, False))
    passed = lifted.largest <= TOLERANCE
    if args.json:
        print(json.dumps(_as_json(args, case, lifted, as_is, TOLERANCE), indent=2))
    else:
        _show(args, case, lifted, as_is, TOLERANCE)
    return 0 if passed else 1


def _case(args: VerifyArgs) -> Case:
    """The case that the flags ask for.

    Raises:
        ConfigError: a number out of range.
        PlanError: a dead slot that is not written as replica:slot.
    """
    if args.tp < 1:
        raise ConfigError(f"--tp is {args.tp}: a replica has at least one device, so give a number from 1 up.")
    if args.replicas is not None and args.replicas < 1:
        raise ConfigError(f"--replicas is {args.replicas}: a job has at least one replica, so give a number from 1 up.")
    if args.seed < 0:
        raise ConfigError(f"--seed is {args.seed}: it must be 0 or more.")
    dead = tuple(parse_slot(text) for text in args.dead)
    named = max((replica for replica, _ in dead), default=0) + 1
    replicas = args.replicas if args.replicas is not None else max(2, named)
    from runflat.check.verify import Case

    return Case(
        tp=args.tp,
        num_replicas=replicas,
        dead=dead,
        num_sequences=2 * replicas + 1,
        seed=args.seed,
        sync=args.sync,
        optimizer=args.optimizer,
        sequence_parallel=args.sequence_parallel,
    )


def _layout(args: VerifyArgs, case: Case) -> str:
    hurt = f"dead {', '.join(args.dead)}" if args.dead else "no dead slot"
    how = (", resharded" if case.sync == "reshard" else "") + (", zero1" if case.optimizer == "zero1" else "")
    how += ", sequence parallel" if case.sequence_parallel else ""
    return f"{case.num_replicas} replica{'s' if case.num_replicas > 1 else ''} at TP {case.tp}, {hurt}{how}"


def _verdict(args: VerifyArgs, case: Case, lifted: Errors, tolerance: float) -> str:
    passed = lifted.largest <= tolerance
    relation = "at most" if passed else "more than"
    return (
        f"{'PASS' if passed else 'FAIL'}: largest relative error {lifted.largest:.1e}, {relation} the tolerance of "
        f"{tolerance:.0e} ({args.model}, {_layout(args, case)})"
    )


def _moments(errors: Errors) -> dict[str, float]:
    return {kind: max(error, errors.second_moments[kind]) for kind, error in errors.first_moments.items()}


def _show(args: VerifyArgs, case: Case, lifted: Errors, as_is: Errors, tolerance: float) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    size = "as it is" if args.full else "built small, two layers"
    console.print(
        f"{args.model} ({size}) in float64: {_layout(args, case)}, against the unmodified transformers model in one "
        f"process. Largest relative errors (norm of the difference over norm of the reference, per tensor); gradients "
        f"are those of the first step, weights and moments those after {case.num_steps} steps."
    )
    console.print(
        "transformers rounds to float32 in norms, in eager attention's softmax and in the loss, also in a float64 "
        "model. 'Casts lifted': both sides run without these roundings, so that only the order of sums differs; this "
        "is what is judged. 'As is': both sides run with them."
    )
    console.print(_table(lifted, as_is))
    console.print(_verdict(args, case, lifted, tolerance), soft_wrap=True)


def _table(lifted: Errors, as_is: Errors) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column("parameter", overflow="fold")
    for side in ("lifted", "as is"):
        for column in ("gradient", "weight", "moments"):
            table.add_column(f"{column}\n{side}", justify="right")
    columns: list[Mapping[str, float]] = []
    for errors in (lifted, as_is):
        columns += [errors.grads, errors.weights, _moments(errors)]
    for kind in lifted.grads:
        table.add_row(kind, *_numbers(column[kind] for column in columns))
    table.add_section()
    for name in ("grad_norm", "loss"):
        first, second = _numbers((getattr(lifted, name), getattr(as_is, name)))
        table.add_row("clipped norm" if name == "grad_norm" else "loss", first, "", "", second)
    return table


def _numbers(values: Iterable[float]) -> list[str]:
    return [f"{value:.1e}" if math.isfinite(value) else "differs" for value in values]


def _as_json(args: VerifyArgs, case: Case, lifted: Errors, as_is: Errors, tolerance: float) -> dict[str, Any]:
    """The result for programs; an error that is not finite (holders differ, or not a number) is null."""

    def number(error: float) -> float | None:
        return error if math.isfinite(error) else None

    def side(errors: Errors) -> dict[str, Any]:
        tables = {name: getattr(errors, name) for name in ("grads", "weights", "first_moments", "second_moments")}
        return {
            "largest": number(errors.largest),
            "grad_norm": number(errors.grad_norm),
            "loss": number(errors.loss),
            **{name: {kind: number(error) for kind, error in table.items()} for name, table in tables.items()},
        }

    return {
        "model": args.model,
        "small": not args.full,
        "tp": case.tp,
        "replicas": case.num_replicas,
        "dead": list(args.dead),
        "seed": case.seed,
        "sync": case.sync,
        "optimizer": case.optimizer,
        "sequence_parallel": case.sequence_parallel,
        "steps": case.num_steps,
        "tolerance": tolerance,
        "passed": lifted.largest <= tolerance,
        "casts_lifted": side(lifted),
        "as_is": side(as_is),
    }
