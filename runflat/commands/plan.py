"""`runflat plan`: what each device holds, sends and needs, for a model and its dead slots."""

from __future__ import annotations

import json
import math

import tyro

from runflat.commands.plan_report import PlanArgs, as_json, report
from runflat.errors import ConfigError
from runflat.plan.planner import live_devices
from runflat.plan.units import ModelSpec, parse_slot

DESCRIPTION = """Say what each device holds, sends and needs, for a model and its dead slots. Nothing is trained.

Example: runflat plan --model llama3-70b --tp 8 --replicas 4 --dead 1:3 --dead 2:0 --dead 2:5
"""
MAX_DEVICES = 65_536
"""Devices that a plan may have; its tables and its JSON grow with them."""
LONGEST_DEFAULT = 4096


def main(argv: list[str]) -> int:
    """Print the plan that the flags ask for; returns 0."""
    args = tyro.cli(
        PlanArgs, args=argv, prog="runflat plan", description=DESCRIPTION, config=(tyro.conf.FlagCreatePairsOff,)
    )
    _check(args)
    live = live_devices(args.tp, args.replicas, map(parse_slot, args.dead))
    spec, longest = _read_model(args)
    found = report(args, spec, args.seq_len or min(LONGEST_DEFAULT, longest), live)
    if args.json:
        print(json.dumps(as_json(found)))
    else:
        from runflat.commands.plan_tables import show

        show(found)
    return 0


def _check(args: PlanArgs) -> None:
    if args.domain_size is not None and args.topology is not None:
        raise ConfigError("--domain-size and --topology both say where devices are: give one of them.")
    for name, value, least in (
        ("tp", args.tp, 1),
        ("replicas", args.replicas, 1),
        ("seq-len", args.seq_len, 2),
        ("micro-batch", args.micro_batch, 1),
        ("domain-size", args.domain_size, 1),
    ):
        if value is not None and value < least:
            raise ConfigError(f"--{name} is {value}, but it must be {least} or more.")
    if args.tp * args.replicas > MAX_DEVICES:
        raise ConfigError(
            f"--tp {args.tp} times --replicas {args.replicas} is {args.tp * args.replicas} devices, more than the "
            f"{MAX_DEVICES} that can be planned at once: plan with fewer replicas, equal ones cost the same."
        )
    if args.sequences is not None and args.sequences < args.replicas:
        raise ConfigError(
            f"--sequences is {args.sequences}, but there are {args.replicas} replicas and each needs a sequence in "
            f"every step: raise --sequences or lower --replicas."
        )
    if not (math.isfinite(args.bucket_mb) and args.bucket_mb > 0):
        raise ConfigError(f"--bucket-mb is {args.bucket_mb}, but a bucket's size must be a number above 0.")


def _read_model(args: PlanArgs) -> tuple[ModelSpec, int]:
    """The model's spec, and the longest sequence that it allows."""
    import torch

    from runflat.commands.models import model_config
    from runflat.parallel.tp_plan import build_meta_model, read_rules

    config = model_config(args.model)
    model = build_meta_model(config, getattr(torch, args.dtype))
    return read_rules(model, args.tp).spec, int(getattr(config, "max_position_embeddings", None) or LONGEST_DEFAULT)
