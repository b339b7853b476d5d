"""A training run from its configuration to its summary, whoever starts the workers."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from runflat.commands.boosting import calibration_setting, power_setting
from runflat.commands.origin import origin
from runflat.commands.plan_zero import opening_lines
from runflat.commands.prepare import Prepared, claimed, prepare, run_folder, tokenizer_of, write_config
from runflat.commands.progress import ProgressView, ReadingView
from runflat.commands.watching import Watching, watched
from runflat.config import TrainConfig
from runflat.errors import INTERRUPTED, CheckpointError, RunError
from runflat.plan.batch import BatchRule

if TYPE_CHECKING:
    from runflat.elastic.controller import Controller
    from runflat.elastic.workers import Workers
    from runflat.plan.plan import Plan
    from runflat.power.calibrate import Walk
    from runflat.train.job import Job

    Launch = Callable[[Job, Callable[[str], None]], Workers]

MEBI = 2**20
NO_GOODPUT = "workers share this machine's cores, so that they run faster when others die; use emulated devices"


def train(
    config: TrainConfig,
    loop: str | None = None,
    watching: Watching | None = None,
    walk: Walk | None = None,
    launch: Launch | None = None,
) -> tuple[int, dict[str, Any]]:
    """Train as `config` says, with runflat's loop or the user's `loop`; returns the exit code and the summary.

    With a `walk` the run is for a calibration of power, and ends with it. `launch` gives the workers, for a job and
    somebody to whom it may say what it does; None: processes of this machine.
    """
    run = run_folder(config)
    try:
        with claimed(run):
            warnings: list[str] = []
            with ReadingView() as view:
                prepared = prepare(config, run, warnings.append, loop, view.told)
            return _run(prepared, warnings, watching or Watching(), walk, launch or _launch_here)
    except OSError as error:
        from runflat.train.publishing import how_to_go_on

        raise CheckpointError(
            f"the files of the run under {run} cannot be written: {error}. {how_to_go_on(run)}"
        ) from error


def _launch_here(job: Job, say: Callable[[str], None]) -> Workers:
    from runflat.elastic.launch_local import LocalWorkers

    return LocalWorkers(job)


def _describe(prepared: Prepared, view: ProgressView) -> None:
    config, plan = prepared.config, prepared.plan
    replicas = ", ".join(f"replica {r.replica}: TP {r.tp}, {r.num_sequences} sequences" for r in plan.replicas)
    view.say(
        f"model: {prepared.spec.name}, {prepared.spec.num_params / 1e6:.2f} M parameters, {config.train.dtype}\n"
        f"data: {prepared.corpus.source if prepared.corpus else 'brought by the loop'}\n{_learnt(prepared)}"
        f"plan: {len(plan.places)} workers ({replicas})\n{_sharded(prepared)}"
        f"run: {prepared.run}"
    )
    if prepared.checkpoint:
        view.say(f"resuming at step {prepared.checkpoint.progress.step} from {prepared.checkpoint.folder}")


def _sharded(prepared: Prepared) -> str:
    """The lines that say who keeps what of the optimizer's state, where not every holder does."""
    from runflat.train.job import job_ownership, state_dtype

    job = prepared.job
    if job.train.optimizer != "zero1":
        return ""
    owned = job_ownership(job, prepared.spec, prepared.plan)
    lines = opening_lines(
        owned, prepared.plan, state_dtype(job.train.dtype).itemsize, lambda size: f"{size / MEBI:.4g}"
    )
    return "".join(f"{line}\n" for line in lines)


def _learnt(prepared: Prepared) -> str:
    """The line that says what the run's tokenizer was learnt from, if it was."""
    learnt = prepared.learnt
    if learnt is None:
        return ""
    what = f"{learnt.num_bytes / 1e6:.1f} MB of text"
    if learnt.is_sample:
        what = f"a sample of {what} out of {learnt.all_bytes / 1e6:.1f} (seed {prepared.config.data.seed})"
    return f"tokenizer: {learnt.num_ids} ids, learnt from {what}\n"


def _run(
    prepared: Prepared, warnings: Sequence[str], watching: Watching, walk: Walk | None, launch: Launch
) -> tuple[int, dict[str, Any]]:
    """Start the workers, watch them to the end, write the summary."""
    config = prepared.config
    write_config(prepared)
    begun = {**origin(), "started": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    (prepared.run / "run.json").write_text(json.dumps(begun, indent=2) + "\n")
    start = prepared.checkpoint.progress.step if prepared.checkpoint else 0
    end = config.train.end
    with ProgressView(end, start) as view:
        for warning in warnings:
            view.say(f"warning: {warning}")
        _describe(prepared, view)
        workers = launch(prepared.job, view.say)  # which may wait for them; the clock starts with the controller
        with ExitStack() as stack:
            try:
                controller = _controller(prepared, view, walk)
                stack.enter_context(watched(watching, prepared.run, view.say))
            except BaseException:  # whatever it is, those who wait must not wait for ever
                workers.close()
                raise
            try:
                controller.supervise(workers)
            except KeyboardInterrupt as error:
                raise RunError(
                    "interrupted twice: stopped at once; what was done since the newest checkpoint is lost."
                ) from error
    summary = controller.summary()
    (prepared.run / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    _conclude(prepared, summary, view)
    return (INTERRUPTED if controller.stopped else 0), summary


def _controller(prepared: Prepared, view: ProgressView, walk: Walk | None) -> Controller:
    import torch

    from runflat.elastic.assemble import assemble, layout_planner
    from runflat.elastic.boost import Boost
    from runflat.elastic.state import Limits
    from runflat.parallel.optimizer import learning_rate
    from runflat.train.data import sample_hash
    from runflat.train.job import job_ownership, optimizer_settings, state_dtype

    config, corpus = prepared.config, prepared.corpus
    settings = optimizer_settings(config.train)
    planner = layout_planner(
        prepared.spec,
        tp=config.layout.tp,
        replicas=config.layout.replicas,
        num_sequences=config.train.global_batch,
        seq_len=config.data.seq_len,
        element_bytes=state_dtype(config.train.dtype).itemsize,
        chain=config.on_failure,
        spares=config.spare_devices,
        rule=BatchRule(config.rule),
        cap=config.cap,
        ownership=partial(job_ownership, prepared.job, prepared.spec) if config.train.optimizer == "zero1" else None,
    )
    steered = calibration_setting if walk else power_setting
    power = steered(config, planner.devices, prepared.run)
    if power is not None and power.raises and not power.dry_run:
        planner = replace(planner, power=power.limits)

    def numbered(previous: str, step: int, samples: Iterable[int]) -> str:
        return sample_hash(previous, step, [(number, number) for number in samples])

    return assemble(
        prepared.run,
        planner,
        view,
        limits=Limits(
            timeout_s=config.train.timeout_s,
            digest_every=config.train.digest_every,
            drain_slow=config.drain_slow,
        ),
        sample_hash=corpus.sample_hash if corpus else numbered,
        learning_rate=lambda step: learning_rate(settings, step),
        secret=secrets.token_hex(16),
        checkpoint=prepared.checkpoint,
        dead=config.layout.dead,
        events=prepared.events,
        boost=Boost(power, planner, walk.turn if walk else None) if power else None,
        keep_checkpoints=config.train.keep_checkpoints,
        token=_token(prepared),
        declared_step_s=_declared_step_s(prepared, planner.full_plan()),
        peak_flops=_peak_flops(config),
        no_goodput=None if config.devices == "emulated" or torch.cuda.is_available() else NO_GOODPUT,
    )


def _token(prepared: Prepared) -> str:
    """What a token is, in words that people read."""
    return "byte" if prepared.corpus and tokenizer_of(prepared.config, prepared.run) is None else "token"


def _peak_flops(config: TrainConfig) -> float | None:
    """FLOP/s of a device that MFU is counted against; None where nobody declares them."""
    import torch

    from runflat.cluster.hardware import hardware_names, load_hardware

    declared = config.device.peak_tflops or (config.device.rate_tflops if config.devices == "emulated" else None)
    if declared:
        return declared * 1e12
    if config.train.dtype != "bfloat16" or not torch.cuda.is_available():
        return None
    words = torch.cuda.get_device_name(0).lower().split()
    found = [name for name in hardware_names() if name in words]
    return load_hardware(found[0]).peak_flops_per_s("bf16") if found else None


def _declared_step_s(prepared: Prepared, plan: Plan) -> float | None:
    """Seconds that a step of emulated devices takes under `plan`; None for real ones."""
    from runflat.train.emulate import step_seconds
    from runflat.train.job import job_layout, job_ownership

    job = prepared.job
    if job.emulated is None:
        return None
    layout = job_layout(job, prepared.spec, plan)
    owned = job_ownership(job, prepared.spec, plan) if job.train.optimizer == "zero1" else None
    return max(
        step_seconds(job.emulated, prepared.spec, plan, layout, place, job.seq_len, job.train.micro_batch, owned)
        for place in plan.places
    )


def _conclude(prepared: Prepared, summary: dict[str, Any], view: ProgressView) -> None:
    from runflat.train.timing import FOLDER, merge_traces

    run = prepared.run
    outcome = "stopped" if summary["stopped"] else "finished"
    loss = f"loss {summary['loss']:.4f}" if summary["loss"] is not None else "no step was done"
    held = summary["holdout_loss"]
    view.say(
        f"{outcome} at step {summary['step']} after {summary['wall_s']:.0f} s: {loss}"
        + (f", held-out loss {held:.4f} nats per {_token(prepared)}" if held is not None else "")
    )
    emulated = summary["emulated"]
    if emulated and not emulated["valid"]:
        view.say(
            f"warning: the emulated devices fell {emulated['late_s']:.1f} s behind the {emulated['billed_s']:.1f} s "
            f"declared: the durations of this run are not valid. Declare slower devices, or free the machine."
        )
    profile = merge_traces(run / FOLDER)
    view.say(
        (f"profile:    {profile}\n" if profile else "") + f"steps:      {run / 'steps.jsonl'}\n"
        f"summary:    {run / 'summary.json'}\n"
        f"checkpoint: {summary['checkpoint']}\n"
        + (
            f"go on with: your loop, launched with resume={str(run)!r}"
            if prepared.job.loop
            else f"go on with: runflat train --resume {run}"
            + ("" if summary["stopped"] else f" --train.steps {2 * summary['step']}")
        )
    )
