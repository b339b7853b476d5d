"""Bytes that a layout needs on its fullest device, so that a prediction for an impossible job is not believed."""

from __future__ import annotations

from dataclasses import dataclass

from runflat.perf.step_time import StepTimeModel


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the fullest device of the fullest stage."""

    params_bytes: float
    grads_bytes: float
    optimizer_bytes: float
    activations_bytes: float

    @property
    def total_bytes(self) -> float:
        """Sum of the parts."""
        return self.params_bytes + self.grads_bytes + self.optimizer_bytes + self.activations_bytes


def device_memory(model: StepTimeModel, live: int | None = None) -> DeviceMemory:
    """Memory of the fullest device of any stage, with `live` devices in each stage (default: all).

    Parameters take 2 bytes, Adam with a float32 master copy 12. Activations per layer and token follow Korthikanti et
    al. (arXiv 2205.05198, section 4: 34 h and 5 a s bytes), split by tensor and sequence parallelism; fused attention
    and selective recomputation keep no scores, full recomputation only the layer's input. A 1F1B schedule holds as many
    micro-batches as stages follow, an interleaved one (1 + (p-1)/(p v)) times as many.
    """
    layout = model.layout
    live = layout.tp if live is None else live
    found = []
    for stage in range(layout.pp):
        numel = model.params_per_device(stage, live)
        optimizer = 12.0 * numel / (layout.dp * layout.cp if layout.zero1 else 1)
        found.append(DeviceMemory(2.0 * numel, layout.grad_bytes * numel, optimizer, _activations(model, stage, live)))
    return max(found, key=lambda memory: memory.total_bytes)


def _activations(model: StepTimeModel, stage: int, live: int) -> float:
    layout, shape = model.layout, model.shape
    share = model.share(live)
    tokens = layout.micro_batch * layout.seq_len / layout.cp
    group = live if layout.sequence_parallel else 1
    if layout.recompute == "full":
        layer = 2.0 * tokens * shape.hidden_size / group
    else:
        split = 2.0 * (share.heads * 2 + share.kv_heads * 2) * shape.head_dim + 2.0 * share.ffn * (
            3 if shape.gated else 2
        )
        layer = tokens * (14.0 * shape.hidden_size / group + split)
        if layout.attention == "eager" and layout.recompute == "none":
            layer += 5.0 * tokens * share.heads * layout.seq_len
    in_flight = float(min(layout.pp - stage, layout.num_micro_batches(layout.sequences_per_replica)))
    if layout.virtual > 1:
        in_flight = layout.pp * (1 + (layout.pp - 1) / (layout.pp * layout.virtual))
    logits = 10.0 * tokens * share.vocab if stage == layout.pp - 1 else 0.0
    return layer * model.layers[stage] * in_flight + logits
