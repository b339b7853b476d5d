"""From a configuration to everything that a run needs before its first worker starts."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runflat.config import TrainConfig, TrainSection
from runflat.errors import ConfigError
from runflat.power.sections import DeviceSection

if TYPE_CHECKING:
    from runflat.cluster.events import Event
    from runflat.plan.plan import Plan
    from runflat.plan.units import ModelSpec
    from runflat.train.checkpoint import Checkpoint
    from runflat.train.data import Corpus
    from runflat.train.emulate import DeviceModel
    from runflat.train.job import Job
    from runflat.train.mixture import Mixture
    from runflat.train.sources import Told
    from runflat.train.tokenizer import Learnt

GIGABYTE = 10**9
GIGABIT_BYTES = 10**9 / 8


@dataclass(frozen=True)
class Prepared:
    """Everything that is known before the first worker starts; `plan` is the one that the run will start with."""

    config: TrainConfig
    run: Path
    spec: ModelSpec
    plan: Plan
    corpus: Corpus | Mixture | None
    checkpoint: Checkpoint | None
    events: tuple[Event, ...]
    job: Job
    learnt: Learnt | None = None
    """What the run's tokenizer has just been learnt from."""


Heard = Callable[[str, int, int], object]
"""Hears what text is read for and how far: the work, bytes that are done (at least), bytes of all."""


def _unheard(work: str, done_bytes: int, all_bytes: int) -> None:
    """Tells nobody."""


def prepare(
    config: TrainConfig, run: Path, warn: Callable[[str], Any], loop: str | None = None, told: Heard = _unheard
) -> Prepared:
    """Check everything that can be checked, read the data, make the plan; nothing of an older run is touched.

    `run` is the claimed folder. `loop` ("file.py:function") replaces runflat's own training loop; such a loop brings
    its own data. `told` hears how far the text is read.

    Raises:
        UserError: the model, layout, data or checkpoint cannot be used.
    """
    from runflat.commands.models import section_config
    from runflat.elastic.inject import check_events, for_workers
    from runflat.elastic.leftovers import publish_leftovers
    from runflat.parallel.tp_plan import build_meta_model, read_rules
    from runflat.plan.planner import build_plan, live_devices
    from runflat.train.checkpoint import newest_checkpoint
    from runflat.train.job import DTYPES, Job

    config = _with_vocabulary(config)
    hf_config = section_config(config.model)
    attention = None if config.model.attention == "auto" else config.model.attention
    model = build_meta_model(hf_config, DTYPES[config.train.dtype], attention)
    spec = read_rules(model, config.layout.tp, sequence_parallel=config.train.sequence_parallel).spec
    if config.resume:
        publish_leftovers(config.resume, spec, warn)
    checkpoint = newest_checkpoint(config.resume, warn) if config.resume else None
    devices = live_devices(config.layout.tp, config.layout.replicas, config.layout.dead_slots)
    plan = build_plan(spec, devices, config.layout.tp, config.train.global_batch, config.data.seq_len)
    if checkpoint:
        _check_resume(config, checkpoint, spec)
    learnt = None if loop or config.resume else _learn(config, run, partial(told, "learning a tokenizer"))
    corpus = None if loop else _corpus(config, run, spec, partial(told, "tokenising"))
    events = _events(config)
    check_events(events, [*config.layout.places, *config.spare_devices])
    job = Job(
        hf_config=json.loads(hf_config.to_json_string(use_diff=False)),
        attention=attention,
        tp_full=config.layout.tp,
        replicas=config.layout.replicas,
        seq_len=config.data.seq_len,
        corpus=corpus.to_json() if corpus else None,
        train=config.train,
        run=str(run),
        from_dir=str(config.model.from_dir) if config.model.from_dir else None,
        emulated=_device_model(config.device, config.train) if config.devices == "emulated" else None,
        memory_bytes=int(config.device.memory_gb * GIGABYTE) if config.device.memory_gb else None,
        inject=_event_rows(for_workers(events)),
        loop=loop,
    )
    return Prepared(config, run, spec, plan, corpus, checkpoint, events, job, learnt)


def _check_resume(config: TrainConfig, checkpoint: Checkpoint, spec: ModelSpec) -> None:
    from runflat.train.checkpoint import check_model

    check_model(checkpoint, spec)
    end = config.train.end
    if checkpoint.progress.step >= end:
        raise ConfigError(
            f"the run is at step {checkpoint.progress.step} and is to end at step {end}: nothing is left to do. Raise "
            f"train.steps to train longer."
        )


def _learn(config: TrainConfig, run: Path, told: Told) -> Learnt | None:
    """Learn the run's tokenizer, where one is asked for."""
    from runflat.train import formats
    from runflat.train.sources import find_text_files
    from runflat.train.tokenizer import train_tokenizer

    data = config.data
    if not data.train_tokenizer:
        return None
    reading = formats.Reading(data.field, data.id_type)
    files = find_text_files(data.paths)
    return train_tokenizer(files, reading, data.train_tokenizer, run / "model", seed=data.seed, told=told)


def _corpus(config: TrainConfig, run: Path, spec: ModelSpec, told: Told) -> Corpus | Mixture:
    from runflat.train import formats
    from runflat.train.data import prepare as prepare_data
    from runflat.train.mixture import mix

    data = config.data
    reading = formats.Reading(data.field, data.id_type)

    def corpus(paths: Sequence[str], max_holdout: int) -> Corpus:
        return prepare_data(
            paths,
            cache_dir=data.cache or run / "tokens",
            seq_len=data.seq_len,
            seed=data.seed,
            tokenizer=tokenizer_of(config, run),
            reading=reading,
            holdout_fraction=data.holdout_fraction,
            max_holdout_sequences=max_holdout,
            model_vocab_size=spec.kind("vocab").size,
            told=told,
        )

    if not data.weights:
        return corpus(data.paths, data.holdout_sequences)
    return mix(data.paths, data.weights, seed=data.seed, max_holdout_sequences=data.holdout_sequences, prepare=corpus)


def tokenizer_of(config: TrainConfig, run: Path) -> Path | None:
    """The tokenizer that is asked for or trained, else that of the model to start from; None where bytes are tokens."""
    if config.data.train_tokenizer:
        return (config.resume or run) / "model"
    model = config.model.from_dir
    return config.data.tokenizer or (model if model and (model / "tokenizer.json").is_file() else None)


def _with_vocabulary(config: TrainConfig) -> TrainConfig:
    """The configuration, with a vocabulary of the size of the tokenizer that is to be trained."""
    size, model = config.data.train_tokenizer, config.model
    if size is None or model.vocab_size or model.from_dir or model.dir:
        return config
    return config.model_copy(update={"model": model.model_copy(update={"vocab_size": size})})


def _events(config: TrainConfig) -> tuple[Event, ...]:
    from runflat.cluster.events import read_events

    return tuple(read_events(config.inject)) if config.inject else ()


def _event_rows(events: tuple[Event, ...]) -> list[dict[str, Any]]:
    from runflat.cluster.events import event_to_json

    return [dict(event_to_json(event)) for event in events]


def _device_model(device: DeviceSection, train: TrainSection) -> DeviceModel:
    """What is declared of an emulated device."""
    from runflat.power.curve import curve_named
    from runflat.train.emulate import DeviceModel

    assert device.rate_tflops is not None
    return DeviceModel(
        rate_flops=device.rate_tflops * 1e12,
        domain_bytes=device.domain_link_gbps * GIGABIT_BYTES if device.domain_link_gbps else None,
        network_bytes=device.network_gbps * GIGABIT_BYTES if device.network_gbps else None,
        speed=curve_named(device.curve).ratio(device.power, 1.0),
        compute_bytes=2 if train.dtype == "bfloat16" else 4,
        recompute=train.activation_checkpointing,
        sequence_parallel=train.sequence_parallel,
    )


def run_folder(config: TrainConfig) -> Path:
    """The folder of the run, made if need be; a folder that holds another run is refused."""
    run = config.run or config.resume or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    try:
        held = (run / "steps.jsonl").exists()
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {run} cannot be made: {error}. Give another with --run.") from error
    if held and run != config.resume:
        raise ConfigError(
            f"{run} holds a run already: give another folder with --run, or go on with it by --resume {run}."
        )
    return run


@contextlib.contextmanager
def claimed(run: Path) -> Iterator[None]:
    """While this lasts no other process may train in the run's folder.

    Raises:
        ConfigError: another process trains there.
    """
    with (run / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"{run} is in use: another process trains there. Wait for its end, or stop it."
            ) from error
        yield


def write_config(prepared: Prepared) -> None:
    """Record the configuration and the model's, drop the steps that a resumed run will do again, mend what was cut."""
    run, config = prepared.run, prepared.config
    from runflat.train.export import keep_model

    loop = {"loop": prepared.job.loop} if prepared.job.loop else {}
    (run / "config.json").write_text(json.dumps(config.model_dump(mode="json") | loop, indent=2) + "\n")
    keep_model(run, prepared.job.hf_config, prepared.spec.name, tokenizer_of(config, run))
    steps = run / "steps.jsonl"
    start = prepared.checkpoint.progress.step if prepared.checkpoint else 0
    fresh = steps.with_suffix(".new")
    fresh.write_text("".join(f"{line}\n" for line in steps_before(steps, start)))
    fresh.replace(steps)
    end_line(run / "events.jsonl")


def end_line(path: Path) -> None:
    """End the last line of a file that a kill or a full disk has cut, so that the next one does not continue it."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def steps_before(steps: Path, start: int) -> list[str]:
    """Lines of steps.jsonl of steps before `start`, without the damaged ones."""
    lines = steps.read_text(errors="replace").splitlines() if steps.exists() else []
    return [line for line in lines if _step_of(line) < start]


def _step_of(line: str) -> float:
    """Step of a line of steps.jsonl; infinite for one that a kill, a full disk or a person has damaged."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, LookupError):
        return math.inf
