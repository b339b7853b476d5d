"""How a job is laid out over devices, and what its software overlaps and stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runflat.errors import PlanError
from runflat.plan.batch import micro_batches
from runflat.plan.sync_groups import Sync

Recompute = Literal["none", "selective", "full"]
Precision = Literal["bf16", "fp16", "fp8"]
Attention = Literal["flash", "eager"]
Overlap = Literal["none", "backward", "full"]


@dataclass(frozen=True)
class Layout:
    """Parallel degrees, batch and software of a job.

    Attributes:
        tp: full tensor-parallel degree of a replica.
        pp: pipeline stages.
        dp: replicas.
        global_batch: sequences per step.
        seq_len: tokens per sequence.
        micro_batch: sequences per micro-batch.
        virtual: chunks of layers per stage (1: plain 1F1B; more: the interleaved schedule).
        cp: context-parallel degree.
        sequence_parallel: norms, dropout and residuals are split over the tensor-parallel group.
        recompute: what backward computes again: nothing, the attention core, or the whole layer.
        precision: of the layers' matrix products; the head and attention stay in 16 bits.
        attention: `flash` (fused, causal blocks skipped) or `eager` (scores are stored, all of them).
        zero1: optimizer state is split over the replicas.
        grad_bytes: bytes per gradient element as it is accumulated and reduced.
        fused_grads: weight-gradient products add into the accumulated gradient themselves, without a pass of their own.
        overlap_tp: which tensor-parallel collectives may run under matrix products.
        overlap_dp: gradient sync runs under the last backward (and the parameter gather under the first forward).
        overlap_pp: stage-to-stage sends run under compute.
        sync: how replicas of different degree meet.
    """

    tp: int
    pp: int
    dp: int
    global_batch: int
    seq_len: int
    micro_batch: int = 1
    virtual: int = 1
    cp: int = 1
    sequence_parallel: bool = True
    recompute: Recompute = "none"
    precision: Precision = "bf16"
    attention: Attention = "flash"
    zero1: bool = True
    grad_bytes: int = 4
    fused_grads: bool = True
    overlap_tp: Overlap = "full"
    overlap_dp: bool = True
    overlap_pp: bool = True
    sync: Sync = "direct"

    def __post_init__(self) -> None:
        for field in ("tp", "pp", "dp", "cp", "global_batch", "seq_len", "micro_batch", "virtual", "grad_bytes"):
            if getattr(self, field) < 1:
                raise PlanError(f"{field} is {getattr(self, field)}: give a number of at least 1.")
        if self.global_batch < self.dp:
            raise PlanError(
                f"a global batch of {self.global_batch} sequences leaves some of {self.dp} replicas without one: "
                "use a larger batch or fewer replicas."
            )
        if self.virtual > 1 and self.pp == 1:
            raise PlanError(f"{self.virtual} chunks per stage need a pipeline: use virtual = 1 with pp = 1.")

    @property
    def num_devices(self) -> int:
        """Devices of the whole job."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def sequences_per_replica(self) -> int:
        """Sequences of the fullest replica when all have the same speed."""
        return -(-self.global_batch // self.dp)

    def num_micro_batches(self, num_sequences: int) -> int:
        """Micro-batches that a replica with `num_sequences` runs."""
        return len(micro_batches(num_sequences, self.micro_batch))


def stage_layers(num_layers: int, layout: Layout) -> tuple[int, ...]:
    """Layers per pipeline stage, as even as possible; inner stages first, as the outer ones have embedding and head.

    Raises:
        PlanError: fewer layers than chunks.
    """
    chunks = layout.pp * layout.virtual
    if num_layers < chunks:
        raise PlanError(
            f"{num_layers} layers cannot be cut into {layout.pp} stages x {layout.virtual} chunks = {chunks}: "
            "use fewer stages or chunks."
        )
    size, larger = divmod(num_layers, layout.pp)
    middle = (layout.pp - 1) / 2
    inner = set(sorted(range(layout.pp), key=lambda stage: (abs(stage - middle), stage))[:larger])
    return tuple(size + (stage in inner) for stage in range(layout.pp))
