"""Puts a controller together: planner, limits, first state, books."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from runflat.cluster.events import Event
from runflat.elastic.books import Books, RunFacts, SampleHash, View
from runflat.elastic.boost import Boost
from runflat.elastic.controller import Controller, Setting
from runflat.elastic.inject import check_events, told_to_return
from runflat.elastic.journal import plan_path
from runflat.elastic.planning import Planner
from runflat.elastic.protocol import first_state
from runflat.elastic.state import Limits
from runflat.plan.batch import BatchRule
from runflat.plan.plan import Plan, plan_from_json
from runflat.plan.sharded_state import Keeping, ShardedState
from runflat.plan.strategies import Chain, JobFacts, parse_chain
from runflat.plan.units import TENSORS, ModelSpec
from runflat.train.checkpoint import Checkpoint, Progress

KEPT_OWNERSHIPS = 8
"""Plans of which the controller remembers who keeps what."""


def layout_planner(
    spec: ModelSpec,
    *,
    tp: int,
    replicas: int,
    num_sequences: int,
    seq_len: int,
    element_bytes: int,
    chain: Chain | str = "ntp,drop",
    spares: Sequence[str] = (),
    rule: BatchRule = BatchRule.CONSTANT,
    cap: int | None = None,
    ownership: Callable[[Plan], Keeping] | None = None,
) -> Planner:
    """The planner of a job of `replicas` times `tp` devices and `num_sequences` sequences a step.

    `ownership` says who keeps which optimizer state under a plan, where it is sharded.
    """
    placement = tuple(((r, slot), f"{r}:{slot}") for r in range(replicas) for slot in range(tp))
    return Planner(
        spec=spec,
        job=JobFacts(num_replicas=replicas, tp_full=tp, num_sequences=num_sequences, rule=rule, cap=cap),
        placement=placement,
        seq_len=seq_len,
        bytes_per_element=len(TENSORS) * element_bytes,
        chain=parse_chain(chain) if isinstance(chain, str) else chain,
        spares=tuple(spares),
        sharded=ShardedState(spec, element_bytes, lru_cache(KEPT_OWNERSHIPS)(ownership)) if ownership else None,
    )


def assemble(
    run: Path,
    planner: Planner,
    view: View,
    *,
    limits: Limits,
    sample_hash: SampleHash,
    learning_rate: Callable[[int], float],
    secret: str,
    checkpoint: Checkpoint | None = None,
    dead: Collection[str] = (),
    events: Sequence[Event] = (),
    no_goodput: str | None = None,
    declared_step_s: float | None = None,
    boost: Boost | None = None,
    network: dict[str, Any] | None = None,
    peak_flops: float | None = None,
    keep_checkpoints: int = 0,
    token: str = "token",
    clock: Callable[[], float] = time.monotonic,
) -> Controller:
    """A controller that has started nothing yet.

    Args:
        run: folder of the run; it exists.
        planner: the job.
        view: who watches.
        limits: times and counts.
        sample_hash: continues the hash over the samples of a step.
        learning_rate: of a step.
        secret: random text by which feeds prove that they are ours.
        checkpoint: what the run resumes.
        dead: devices that are not there from the start.
        events: faults to inject.
        no_goodput: why goodput means nothing here, if so.
        declared_step_s: seconds of a step in health, where they are declared.
        boost: steers power, if anybody does.
        network: passed to the workers with each plan.
        peak_flops: FLOP/s of a device on its data sheet.
        keep_checkpoints: how many of the newest are kept, 0 for all.
        token: what a token is, in words that people read: byte, say.
        clock: gives seconds.

    Raises:
        TraceError: an event that nobody could execute.
    """
    check_events(events, planner.devices)
    slow_factor = limits.slow_factor if no_goodput is None else math.inf  # who shares cores has no pace of its own
    state = first_state(
        planner,
        replace(limits, slow_factor=slow_factor),
        secret=secret,
        dead=dead,
        **_beginning(run, checkpoint),
        scripted=told_to_return(events),
        network=network,
    )
    facts = _facts(run, planner, sample_hash, learning_rate, boost, peak_flops, keep_checkpoints, token)
    setting = Setting(run, state, tuple(events), no_goodput, declared_step_s, boost)
    return Controller(setting, _books(facts, checkpoint, view), view, clock)


def _facts(
    run: Path,
    planner: Planner,
    sample_hash: SampleHash,
    learning_rate: Callable[[int], float],
    boost: Boost | None,
    peak_flops: float | None,
    keep_checkpoints: int,
    token: str,
) -> RunFacts:
    num_places, power = len(planner.placement), boost.books.record if boost else None
    known = (run, planner.spec, planner.seq_len, num_places, sample_hash, learning_rate, planner.step_work)
    return RunFacts(*known, power, peak_flops, keep_checkpoints, token)


def _books(facts: RunFacts, checkpoint: Checkpoint | None, view: View) -> Books:
    """The books of a run that resumes `checkpoint`, with the steps since an earlier life's last line."""
    books = Books(facts, checkpoint.progress if checkpoint else Progress(0, 0, 0, ""), view)
    if checkpoint is not None and checkpoint.folder.resolve().is_relative_to(facts.run.resolve()):
        books.catch_up(_plan_of(facts.run, checkpoint.generation))
    return books


def _plan_of(run: Path, generation: int) -> Plan:
    """A plan of an earlier life of the run; one without replicas if that did not live to write it down."""
    path = plan_path(run, generation)
    return plan_from_json(path.read_text()) if path.exists() else Plan(generation, 0, ())


def _beginning(run: Path, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """What the first state takes over from an earlier life of the run."""
    generation = _next_generation(run, checkpoint)
    if checkpoint is None:
        return {"generation": generation, "start_step": 0, "checkpoint": None}
    return {"generation": generation, "start_step": checkpoint.progress.step, "checkpoint": str(checkpoint.folder)}


def _next_generation(run: Path, checkpoint: Checkpoint | None) -> int:
    """A number that no earlier life of the run has given out: its late workers must not be taken for ours."""
    given = [int(path.stem.rpartition("-")[2]) for path in (run / "plans").glob("generation-*.json")]
    return max([*given, checkpoint.generation if checkpoint else -1], default=-1) + 1
