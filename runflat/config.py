"""Configuration of a training run: one frozen pydantic model per section, read from TOML and from flags.

The docstring under a field is its help text on the command line. Only `cli` sees `TrainConfig` whole; the rooms get
the values that they need. Every way in (file, flag, constructor) makes the same checks, and `ConfigError` names the
key as `section.field`, which is also the flag.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro
from pydantic import Field, field_validator, model_validator

from runflat.errors import ConfigError
from runflat.plan.strategies import Strategy, parse_chain
from runflat.plan.sync_groups import Sync
from runflat.plan.zero import OptimizerMode
from runflat.power.sections import DeviceSection, PowerSection, Section, check_curves, check_power


class ModelSection(Section):
    """The model: a preset, a model directory, or an architecture, with single sizes changed."""

    preset: Literal["tiny", "demo"] | None = None
    """Small Llama that ships with runflat: tiny (0.1 M parameters) or demo (2.8 M). Where preset, dir, arch and
    from_dir are all left out: tiny."""
    dir: Path | None = None
    """Directory of a Hugging Face model (config.json); its weights are not read."""
    from_dir: Annotated[Path | None, tyro.conf.arg(aliases=("--from",))] = None
    """Directory of safetensors to start from instead of random weights; gives the shape too (its config.json) unless
    preset, dir or arch does."""
    arch: str | None = None
    """A transformers model type such as llama or qwen2, with that library's default sizes, or a named shape
    (llama3-8b, llama3-70b, llama3-405b, qwen2-7b)."""
    num_layers: int | None = Field(default=None, ge=1)
    """Layers, instead of what the model says."""
    hidden_size: int | None = Field(default=None, ge=1)
    """Width of the residual stream, instead of what the model says."""
    num_heads: int | None = Field(default=None, ge=1)
    """Query heads, instead of what the model says."""
    num_kv_heads: int | None = Field(default=None, ge=1)
    """Key and value heads, instead of what the model says; must divide the query heads."""
    head_dim: int | None = Field(default=None, ge=1)
    """Width of one head, instead of what the model says."""
    ffn_size: int | None = Field(default=None, ge=1)
    """Width of the feed-forward layer, instead of what the model says."""
    vocab_size: int | None = Field(default=None, ge=1)
    """Rows of the embedding, instead of what the model says; not fewer than the tokenizer has ids (bytes: 257)."""
    tie_embeddings: bool | None = None
    """Whether the LM head is the embedding, instead of what the model says."""
    attention: Literal["auto", "eager", "sdpa"] = "auto"
    """Attention implementation; auto: sdpa where the model supports it, else eager."""

    @model_validator(mode="after")
    def _one_shape(self) -> ModelSection:
        given = [f"model.{name}" for name in ("preset", "dir", "arch") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given together, but each is a whole model; keep one")
        if self.num_heads and self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads is {self.num_heads}, not a multiple of model.num_kv_heads, {self.num_kv_heads}; "
                f"each KV head serves the same number of query heads"
            )
        return self

    @property
    def overrides(self) -> dict[str, int | bool]:
        """Sizes that replace the model's own, under the names that a Hugging Face config.json gives them."""
        names = {
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn_size,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.tie_embeddings,
        }
        return {name: value for name, value in names.items() if value is not None}


class LayoutSection(Section):
    """Which devices there are: replicas, their tensor-parallel degree, and slots that are dead from the start."""

    tp: int = Field(default=1, ge=1)
    """Full tensor-parallel degree: devices per replica when none is dead."""
    replicas: int = Field(default=1, ge=1)
    """Data-parallel replicas."""
    dead: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A dead slot as replica:slot, from 0, such as 1:3; repeat the flag for more. Flags add to those in the file."""

    @field_validator("dead")
    @classmethod
    def _well_formed(cls, dead: tuple[str, ...]) -> tuple[str, ...]:
        for text in dead:
            replica, _, slot = text.partition(":")
            if not (replica.isascii() and replica.isdigit() and slot.isascii() and slot.isdigit()):
                raise ValueError(f"layout.dead has {text!r}; a dead slot is written replica:slot, such as 1:3")
        slots = [_parse_slot(text) for text in dead]
        for slot_pair in slots:
            if slots.count(slot_pair) > 1:
                raise ValueError(f"layout.dead names slot {slot_pair[0]}:{slot_pair[1]} more than once; name it once")
        return tuple(f"{replica}:{slot}" for replica, slot in slots)

    @model_validator(mode="after")
    def _slots_exist(self) -> LayoutSection:
        for replica, slot in self.dead_slots:
            if replica >= self.replicas or slot >= self.tp:
                raise ValueError(
                    f"layout.dead names {replica}:{slot}, but with layout.replicas {self.replicas} and layout.tp "
                    f"{self.tp} the slots are 0:0 to {self.replicas - 1}:{self.tp - 1}; name one of these"
                )
        for replica in range(self.replicas):
            if sum(dead_replica == replica for dead_replica, _ in self.dead_slots) == self.tp:
                raise ValueError(
                    f"layout.dead names all {self.tp} slots of replica {replica}, so nothing is left of it; lower "
                    f"layout.replicas instead"
                )
        return self

    @property
    def dead_slots(self) -> tuple[tuple[int, int], ...]:
        """Dead slots as (replica, slot)."""
        return tuple(_parse_slot(text) for text in self.dead)

    @property
    def places(self) -> tuple[str, ...]:
        """All slots as "replica:slot", dead ones included."""
        return tuple(f"{replica}:{slot}" for replica in range(self.replicas) for slot in range(self.tp))

    @property
    def num_devices(self) -> int:
        """Live devices, one worker process each."""
        return self.replicas * self.tp - len(self.dead)


class DataSection(Section):
    """The text, its tokens, and what is held out."""

    paths: tuple[str, ...] = ()
    """Files of text or of token ids (.bin), folders that are searched for text or that `datasets` saved, glob patterns;
    none: the source code of Python's library."""
    weights: tuple[float, ...] = ()
    """Share of the samples that comes from each entry of paths, in any unit, to a thousandth; none: all text is one
    source."""
    cache: Path | None = None
    """Folder of token files, which runs may share; none: the run's own."""
    tokenizer: Path | None = None
    """A tokenizer.json or a directory that has one; none: that of the model to start from, else each byte is a token
    (257 ids)."""
    train_tokenizer: Annotated[int | None, tyro.conf.arg(aliases=("--train-tokenizer",))] = Field(default=None, ge=257)
    """Learn a tokenizer of this many ids (byte-level BPE) from the text; the model's vocabulary follows it."""
    field: str | None = None
    """Field of the lines of .jsonl files that holds the text, each a document; none: .jsonl is plain text. Of a
    table that `datasets` saved the column; none: text."""
    id_type: Literal["uint16", "uint32"] = "uint16"
    """Type of the token ids in .bin files, which are taken as they are."""
    seq_len: int = Field(default=128, ge=2)
    """Tokens per sequence."""
    holdout_fraction: float = Field(default=0.01, ge=0, lt=1)
    """Part of the sequences that is held out to measure the loss on; 0 holds out nothing."""
    holdout_sequences: int = Field(default=64, ge=1)
    """Most sequences to hold out."""
    seed: int = Field(default=0, ge=0)
    """Seed of the held-out selection and of the order of sequences."""

    @model_validator(mode="after")
    def _one_tokenizer(self) -> DataSection:
        if self.train_tokenizer and self.tokenizer:
            raise ValueError("data.tokenizer and data.train_tokenizer are given together; keep one")
        return self

    @model_validator(mode="after")
    def _weighted(self) -> DataSection:
        if self.weights and len(self.weights) != len(self.paths):
            raise ValueError(
                f"data.weights has {len(self.weights)} numbers for {len(self.paths)} entries of data.paths; give one "
                f"for each, or none"
            )
        if any(weight <= 0 for weight in self.weights):
            raise ValueError(f"data.weights has {min(self.weights)}; a source that is not to be used is left out")
        return self


class TrainSection(Section):
    """Steps, batch, optimizer and schedule."""

    steps: int = Field(default=100, ge=1)
    """Optimizer steps of the whole run."""
    stop_after: int = Field(default=0, ge=0)
    """End after this many steps although the schedule is that of train.steps; 0 does all of them."""
    global_batch: int = Field(default=8, ge=1)
    """Sequences per step over all replicas."""
    micro_batch: int = Field(default=8, ge=1)
    """Most sequences that a replica computes at once; a larger share is accumulated."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Type of weights, gradients and optimizer state; bfloat16: that of computation, all else is float32."""
    activation_checkpointing: bool = False
    """Keep only the inputs of layers for backward, and compute the layers again there: less memory, more work."""
    sequence_parallel: bool = False
    """Between the split layers each device of a replica has a part of the tokens: less memory, the same bytes sent."""
    lr: float = Field(default=3e-3, gt=0)
    """Peak learning rate."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Learning rate after the warm-up: cosine (falls all the way), wsd (falls in the last decay_steps) or constant."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end, as a part of the peak (cosine, wsd)."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly to its peak."""
    decay_steps: int = Field(default=0, ge=0)
    """Steps over which it falls at the end (wsd only)."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices; norms and biases have none."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW: decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW: decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW: added to the root of the second moment."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Largest norm of the whole gradient; 0 does not clip."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial weights."""
    lift_casts: bool = False
    """float64 only: skip the model's own roundings to float32 (norms, softmax, loss), for exact comparisons."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 writes one at the end only."""
    keep_checkpoints: int = Field(default=0, ge=0)
    """Checkpoints to keep, the newest ones; older ones are removed when a new one is complete; 0 keeps all."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between held-out losses; 0 takes one at the end only."""
    bucket_mb: float = Field(default=25.0, gt=0)
    """Size of a gradient bucket in MiB."""
    sync: Annotated[Sync, tyro.conf.arg(aliases=("--sync",))] = "direct"
    """How replicas of different degree sum gradients: direct (each unit among its holders) or reshard (inside each
    replica to the layout of the most reduced one, then one to one: no path between other devices is needed)."""
    optimizer: OptimizerMode = "replicated"
    """Who keeps AdamW's moments of a unit: each of its holders, or zero1: one owner, and one mirror in another replica
    (less memory per device, the same bytes sent)."""
    memory_every: int = Field(default=10, ge=0)
    """Steps between copies of each shard in another device's memory; 0 keeps none."""
    digest_every: int = Field(default=0, ge=0)
    """Steps between comparisons of all holders' bits, which find silent faults; 0: only when the plan changes."""
    profile: Annotated[int, tyro.conf.arg(aliases=("--profile",))] = Field(default=0, ge=0)
    """Steps to record, after two of warm-up, in the run's profile/trace.json (chrome://tracing, Perfetto); 0: none."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Longest wait for another device, in seconds."""

    @property
    def end(self) -> int:
        """The step after which training is over."""
        return min(self.steps, self.stop_after or self.steps)

    @model_validator(mode="after")
    def _sync_fits(self) -> TrainSection:
        if self.optimizer == "zero1" and self.sync != "direct":
            raise ValueError(
                f"train.optimizer is zero1 and train.sync is {self.sync}, with which the holders of a unit do not sum "
                f"its gradient themselves; use train.sync direct"
            )
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> TrainSection:
        if self.schedule == "wsd" and not self.decay_steps:
            raise ValueError(
                "train.schedule is wsd and train.decay_steps is 0, so the learning rate would never fall; set "
                "train.decay_steps (a fifth of the steps is usual) or choose the constant schedule"
            )
        if self.schedule != "wsd" and self.decay_steps:
            raise ValueError(
                f"train.decay_steps is {self.decay_steps}, but train.schedule is {self.schedule}, which does not use "
                f"it; leave it out or choose wsd"
            )
        if self.warmup_steps + self.decay_steps > self.steps:
            decay = f" and train.decay_steps {self.decay_steps}" if self.decay_steps else ""
            raise ValueError(
                f"train.warmup_steps {self.warmup_steps}{decay} exceed train.steps, {self.steps}; lower them or train "
                f"longer"
            )
        return self


class TrainConfig(Section):
    """Everything that `runflat train` can be told."""

    model: ModelSection = ModelSection()
    layout: LayoutSection = LayoutSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    devices: Literal["auto", "emulated"] = "auto"
    """auto: GPUs where there are any, else this machine's CPU; emulated: the CPU, with declared durations."""
    device: DeviceSection = DeviceSection()
    boost: bool = False
    """Give the survivors of a loss more power, as far as power.* and device.* allow (needs ntp in on_failure)."""
    power: PowerSection = PowerSection()
    inject: Path | None = None
    """File of failures to inject (JSON list or lines, the format of events.jsonl)."""
    on_failure: str = "ntp,drop"
    """What to do when devices are lost, tried in this order, separated by commas."""
    spares: int = Field(default=0, ge=0)
    """Further devices, s0 and so on, that wait for the slot of one that is lost."""
    rule: Literal["constant", "capped", "flexible"] = "constant"
    """What becomes of the batch: constant, capped (training pauses where the caps do not reach it) or flexible."""
    cap: int | None = Field(default=None, ge=1)
    """Rule capped: most sequences of a full replica; none: its even share."""
    drain_slow: bool = False
    """Have a device leave that makes its replica slow; else the replica gets fewer sequences."""
    run: Path | None = None
    """Directory for everything that the run writes; none: a new one under runs/, named by the time."""
    resume: Path | None = None
    """Run directory to go on from, under any layout: its newest complete checkpoint."""

    @field_validator("on_failure")
    @classmethod
    def _known_strategies(cls, chain: str) -> str:
        try:
            parse_chain(chain)
        except ConfigError as error:
            raise ValueError(f"on_failure: {error}") from None  # so that the file is named in front of it
        return chain

    @model_validator(mode="after")
    def _spares_are_used(self) -> TrainConfig:
        if self.spares and Strategy.SPARE not in parse_chain(self.on_failure):
            raise ValueError(
                f"spares is {self.spares}, but on_failure is {self.on_failure!r}, which never uses a spare; write "
                f"spare,{self.on_failure}, or leave spares out"
            )
        return self

    @model_validator(mode="after")
    def _cap_reaches_the_batch(self) -> TrainConfig:
        if self.cap is not None and self.rule != "capped":
            raise ValueError(
                f"cap is {self.cap}, but rule is {self.rule}, which has no cap; set rule to capped, or leave cap out"
            )
        if self.cap is not None and self.cap * self.layout.replicas < self.train.global_batch:
            raise ValueError(
                f"cap is {self.cap}, so that {self.layout.replicas} replicas do at most "
                f"{self.cap * self.layout.replicas} sequences, but train.global_batch is {self.train.global_batch}: "
                f"training would always pause; raise cap or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _restart_finds_a_checkpoint(self) -> TrainConfig:
        first = parse_chain(self.on_failure)[0]
        if first is Strategy.RESTART and not (self.train.checkpoint_every or self.train.memory_every):
            raise ValueError(
                f"on_failure is {self.on_failure!r}, but train.checkpoint_every and train.memory_every are both 0, so "
                f"that there is never a checkpoint to start again from; set one of them"
            )
        return self

    @property
    def spare_devices(self) -> tuple[str, ...]:
        """Ids of the spares."""
        return tuple(f"s{number}" for number in range(self.spares))

    @model_validator(mode="after")
    def _emulated_has_a_rate(self) -> TrainConfig:
        if self.devices == "emulated" and self.device.rate_tflops is None:
            raise ValueError("devices is emulated, but device.rate_tflops is missing; declare how fast a device is")
        return self

    @model_validator(mode="after")
    def _power_can_be_steered(self) -> TrainConfig:
        steered = self.boost or self.power.save
        check_curves(steered, self.devices == "emulated", self.device, self.power)
        if steered:
            check_power(self.boost, self.devices == "emulated", self.device, self.power)
            if self.power.module_budget_w is not None and self.layout.tp % self.power.module_devices:
                raise ValueError(
                    f"power.module_devices is {self.power.module_devices}, but layout.tp is {self.layout.tp}: a module "
                    f"belongs to one replica, so layout.tp must be a multiple of it"
                )
            if Strategy.NTP not in parse_chain(self.on_failure):
                raise ValueError(
                    f"on_failure is {self.on_failure!r}, but power is for replicas that go on at a lower degree; put "
                    f"ntp into on_failure, or leave boost and power.save out"
                )
        return self

    @model_validator(mode="after")
    def _batch_reaches_all(self) -> TrainConfig:
        if self.train.global_batch < self.layout.replicas:
            raise ValueError(
                f"train.global_batch is {self.train.global_batch}, but there are {self.layout.replicas} replicas and "
                f"each needs a sequence in every step; raise train.global_batch or lower layout.replicas"
            )
        return self


def _parse_slot(text: str) -> tuple[int, int]:
    replica, _, slot = text.partition(":")
    return int(replica), int(slot)
