"""`runflat train`: prepare the data and the plan, start the workers, keep the books, say where everything is."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from runflat.commands.progress import ProgressView
from runflat.config import TrainConfig, flag_rules, load_config
from runflat.errors import CheckpointError, ConfigError, RunError

if TYPE_CHECKING:
    from runflat.plan.plan import Plan
    from runflat.plan.units import ModelSpec
    from runflat.train.checkpoint import Checkpoint
    from runflat.train.data import Corpus
    from runflat.train.worker import Job

DESCRIPTION = """Train a causal language model with replicas of different tensor-parallel degree.

runflat train [CONFIG.toml] [flags]; a flag wins over the file. With nothing given, a tiny Llama learns the source code
of this Python's standard library.

Example: runflat train examples/demo.toml --run runs/demo --layout.dead 0:1
"""
INTERRUPTED = 130


def parse(argv: Sequence[str]) -> TrainConfig:
    """The configuration that `argv` asks for: a file (or the run to resume) first, flags on top.

    Raises:
        ConfigError: a file or a value that is not valid.
    """
    rest = list(argv)
    default = load_config(Path(rest.pop(0)) if rest and not rest[0].startswith("-") else None)
    resume = _flag(rest, "--resume")
    if resume is not None and len(rest) == len(argv):
        default = _resumed_config(Path(resume))
    with flag_rules():
        return tyro.cli(TrainConfig, args=rest, default=default, prog="runflat train", description=DESCRIPTION)


def _flag(argv: Sequence[str], name: str) -> str | None:
    for index, text in enumerate(argv):
        if text == name and index + 1 < len(argv):
            return argv[index + 1]
        if text.startswith(f"{name}="):
            return text.partition("=")[2]
    return None


def _resumed_config(run: Path) -> TrainConfig:
    """The configuration of the run that is resumed, its dead slots left to the new flags."""
    path = run / "config.json"
    try:
        saved = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{run} cannot be resumed: {path} is not readable ({error}). Name a run's folder."
        ) from error
    saved["layout"]["dead"] = []
    return TrainConfig.model_validate(saved | {"resume": str(run), "run": None})


@dataclass(frozen=True)
class Prepared:
    """Everything that is known before the first worker starts."""

    config: TrainConfig
    run: Path
    spec: ModelSpec
    plan: Plan
    corpus: Corpus
    checkpoint: Checkpoint | None
    job: Job


def prepare(config: TrainConfig, view_warning: Any) -> Prepared:
    """Check everything that can be checked, read the data, make the plan; nothing of an older run is touched.

    Raises:
        UserError: the model, layout, data or checkpoint cannot be used.
    """
    import torch

    from runflat.commands.models import section_config
    from runflat.parallel.tp_plan import build_meta_model, read_rules
    from runflat.plan.planner import build_plan, live_devices
    from runflat.train.checkpoint import check_model, newest_checkpoint
    from runflat.train.data import prepare as prepare_data
    from runflat.train.worker import DTYPES, Job

    run = _run_folder(config)
    checkpoint = newest_checkpoint(config.resume, view_warning) if config.resume else None
    hf_config = section_config(config.model)
    attention = None if config.model.attention == "auto" else config.model.attention
    model = build_meta_model(hf_config, DTYPES[config.train.dtype], attention)
    spec = read_rules(model, config.layout.tp).spec
    devices = live_devices(config.layout.tp, config.layout.replicas, config.layout.dead_slots)
    generation = checkpoint.generation + 1 if checkpoint else 0
    plan = build_plan(
        spec, devices, config.layout.tp, config.train.global_batch, config.data.seq_len, generation=generation
    )
    if checkpoint:
        check_model(checkpoint, spec)
        if checkpoint.progress.step >= config.train.steps:
            raise ConfigError(
                f"the run is at step {checkpoint.progress.step} and train.steps is {config.train.steps}: nothing is "
                f"left to do. Raise train.steps to train longer."
            )
    corpus = prepare_data(
        config.data.paths,
        cache_dir=run / "tokens",
        seq_len=config.data.seq_len,
        seed=config.data.seed,
        tokenizer=config.data.tokenizer,
        holdout_fraction=config.data.holdout_fraction,
        max_holdout_sequences=config.data.holdout_sequences,
        model_vocab_size=spec.kind("vocab").size,
    )
    job = Job(
        hf_config=json.loads(hf_config.to_json_string(use_diff=False)),
        attention=attention,
        plan=plan.to_json(),
        corpus=corpus.to_json(),
        train=config.train,
        run=str(run),
        from_dir=str(config.model.from_dir) if config.model.from_dir else None,
        checkpoint=str(checkpoint.folder) if checkpoint else None,
    )
    torch.set_num_threads(1)
    return Prepared(config, run, spec, plan, corpus, checkpoint, job)


def _run_folder(config: TrainConfig) -> Path:
    """The folder of the run, made if need be; a folder that holds another run is refused."""
    run = config.run or config.resume or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    if (run / "steps.jsonl").exists() and run != config.resume:
        raise ConfigError(
            f"{run} holds a run already: give another folder with --run, or go on with it by --resume {run}."
        )
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {run} cannot be made: {error}. Give another with --run.") from error
    return run


def _write_config(prepared: Prepared) -> None:
    """Record the configuration, and drop the steps that a resumed run will do again."""
    run, config = prepared.run, prepared.config
    (run / "config.json").write_text(config.model_dump_json(indent=2) + "\n")
    steps = run / "steps.jsonl"
    start = prepared.checkpoint.progress.step if prepared.checkpoint else 0
    lines = steps.read_text().splitlines() if steps.exists() else []
    steps.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] < start))


def _describe(prepared: Prepared, view: ProgressView) -> None:
    config, plan = prepared.config, prepared.plan
    replicas = ", ".join(f"replica {r.replica}: TP {r.tp}, {r.num_sequences} sequences" for r in plan.replicas)
    view.say(
        f"model: {prepared.spec.name}, {prepared.spec.num_params / 1e6:.2f} M parameters, {config.train.dtype}\n"
        f"data: {prepared.corpus.source}\n"
        f"plan: {len(plan.places)} workers ({replicas})\n"
        f"run: {prepared.run}"
    )
    if prepared.checkpoint:
        view.say(f"resuming at step {prepared.checkpoint.progress.step} from {prepared.checkpoint.folder}")


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    config = parse(argv)
    from runflat.elastic.controller import Controller
    from runflat.elastic.launch_local import LocalWorkers
    from runflat.train.checkpoint import Progress

    warnings: list[str] = []
    prepared = prepare(config, warnings.append)
    _write_config(prepared)
    start = prepared.checkpoint.progress if prepared.checkpoint else Progress(0, 0, 0, "")
    plan = prepared.plan
    with ProgressView(config.train.steps, start.step) as view:
        for warning in warnings:
            view.say(f"warning: {warning}")
        _describe(prepared, view)
        controller = Controller(prepared.run, prepared.spec, plan, prepared.corpus, view, start, config.train.timeout_s)
        workers = LocalWorkers(prepared.job, [plan.device(place) for place in plan.places])
        try:
            controller.supervise(workers)
        except KeyboardInterrupt as error:
            raise RunError("interrupted twice: stopped at once, the step in flight is lost.") from error
    summary = controller.summary()
    (prepared.run / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    _conclude(prepared, summary, view)
    return INTERRUPTED if controller.stopped else 0


def _conclude(prepared: Prepared, summary: dict[str, Any], view: ProgressView) -> None:
    run = prepared.run
    outcome = "stopped" if summary["stopped"] else "finished"
    loss = f"loss {summary['loss']:.4f}" if summary["loss"] is not None else "no step was done"
    held = summary["holdout_loss"]
    unit = "byte" if prepared.config.data.tokenizer is None else "token"
    view.say(
        f"{outcome} at step {summary['step']} after {summary['wall_s']:.0f} s: {loss}"
        + (f", held-out loss {held:.4f} nats per {unit}" if held is not None else "")
    )
    view.say(
        f"steps:      {run / 'steps.jsonl'}\n"
        f"summary:    {run / 'summary.json'}\n"
        f"checkpoint: {summary['checkpoint']}\n"
        f"go on with: runflat train --resume {run} --train.steps {2 * summary['step']}"
    )
