"""Seconds of a training step, part by part, for replicas in any state of health.

How a step's time comes about
    stage     one micro-batch forward and backward on the most loaded device of a pipeline stage (`layer_time`)
    replica   m micro-batches on its slowest stage, plus the time to fill and drain the others (bubble)
    step      the slowest replica, then gradient sync as far as the last backward does not hide it, then the optimizer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from runflat.cluster.hardware import Hardware
from runflat.errors import PlanError
from runflat.perf.comm_time import Fabric
from runflat.perf.device_time import Device
from runflat.perf.efficiency import Efficiencies, load_efficiencies
from runflat.perf.layer_time import LayerTimer, Share, Work, share_of
from runflat.perf.layout import Layout, stage_layers
from runflat.perf.shape import ModelShape

_ELEMENT_BYTES = 2
_OPTIMIZER_BYTES = 30
"""Bytes moved per parameter by mixed-precision Adam: reads gradient, two moments, master copy (16), writes the last
three and the 16-bit parameter (14)."""


@dataclass(frozen=True)
class Stage:
    """State of one pipeline stage of a replica: devices alive, and their clock relative to nominal (power)."""

    live: int
    speed: float = 1.0


@dataclass(frozen=True)
class Replica:
    """State of one replica: its stages in order, and the sequences that it gets per step."""

    stages: tuple[Stage, ...]
    num_sequences: int


@dataclass(frozen=True)
class StepTime:
    """Parts of a step in seconds; they add up to `total_s`.

    `matmul_s` to `cp_comm_s` are spent on the slowest stage of the slowest replica; communication counts only where
    no compute hides it.
    """

    matmul_s: float
    attention_s: float
    memory_s: float
    tp_comm_s: float
    cp_comm_s: float
    pp_comm_s: float
    bubble_s: float
    dp_comm_s: float = 0.0
    reshard_s: float = 0.0
    optimizer_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Seconds by part, in the order in which they are declared."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


class StepTimeModel:
    """Predicts step times of one job: a model and a layout on one kind of hardware.

    Results are cached by state, so that a simulator may ask for each event.
    """

    def __init__(
        self, hardware: Hardware, shape: ModelShape, layout: Layout, efficiencies: Efficiencies | None = None
    ) -> None:
        self.hardware = hardware
        self.shape = shape
        self.layout = layout
        self.efficiencies = efficiencies or load_efficiencies()
        self._fabric = Fabric(hardware, self.efficiencies)
        self.layers = stage_layers(shape.num_layers, layout)
        self._work = lru_cache(maxsize=4096)(self._stage_work)
        self._replica = lru_cache(maxsize=65536)(self._replica_time)

    @property
    def healthy(self) -> Replica:
        """A replica with all devices alive at nominal speed and an even share of the batch."""
        stages = (Stage(self.layout.tp),) * self.layout.pp
        return Replica(stages, self.layout.sequences_per_replica)

    def replica(self, replica: Replica) -> StepTime:
        """Parts of the time from the step's begin to the end of the replica's last backward; no sync, no optimizer.

        Raises:
            PlanError: a wrong number of stages, a stage without devices, or one that holds more than its full degree.
        """
        return self._replica(replica)

    def step(self, replicas: Sequence[Replica] | None = None) -> StepTime:
        """Parts of a whole step; by default with all replicas healthy.

        `replicas` may leave out repeated ones: only the distinct states matter. The number of devices that meet in a
        sync group stays that of the layout.
        """
        states = tuple(dict.fromkeys(replicas or (self.healthy,)))
        slowest = max((self.replica(state) for state in states), key=lambda time: time.total_s)
        dp_comm_s, reshard_s = self._sync(states)
        parts = slowest.parts()
        parts.update(dp_comm_s=dp_comm_s, reshard_s=reshard_s, optimizer_s=self._optimizer(states))
        return StepTime(**parts)

    def sequences_within(self, stages: tuple[Stage, ...], seconds: float) -> int:
        """The most sequences that a replica with `stages` can do in `seconds` up to its last backward (0 if none)."""
        one, two = (self.replica(Replica(stages, count)).total_s for count in (1, 2))
        per_sequence = two - one
        # A last sequence that is late by rounding only is in time.
        return max(0, int((seconds - one) / per_sequence * (1 + 1e-12) + 1e-9) + 1) if seconds >= one else 0

    def params_per_device(self, stage: int, live: int) -> int:
        """Parameters on the most loaded device of a stage with `live` devices."""
        share, shape = self.share(live), self.shape
        heads = shape.hidden_size * shape.head_dim * (2 * share.heads + 2 * share.kv_heads)
        mlp = shape.hidden_size * share.ffn * (3 if shape.gated else 2)
        vocab = (stage == 0) + (stage == self.layout.pp - 1 and not (self.layout.pp == 1 and shape.tied))
        return self.layers[stage] * (heads + mlp) + vocab * share.vocab * shape.hidden_size

    def utilisation(self, step: StepTime) -> float:
        """Model FLOPs per second of all devices over their data-sheet peak (0..1)."""
        layout = self.layout
        flops = self.shape.model_flops(layout.global_batch * layout.seq_len, layout.seq_len)
        peak = self.hardware.peak_flops_per_s(layout.precision) * layout.num_devices
        return flops / step.total_s / peak

    def share(self, live: int) -> Share:
        """The largest share of a stage with `live` devices."""
        return share_of(self.shape, self.layout.tp, tuple(range(live, self.layout.tp)))

    def _stage_work(self, stage: int, live: int, speed: float) -> tuple[Work, Work]:
        """Forward and backward of one micro-batch on `stage`."""
        device = Device(self.hardware, self.efficiencies, speed)
        timer = LayerTimer(self.shape, self.layout, device, self._fabric, self.share(live), live)
        forward, backward = (work.times(self.layers[stage]) for work in timer.layer())
        for here, extra in ((stage == 0, timer.embedding), (stage == self.layout.pp - 1, timer.head)):
            if here:
                more_forward, more_backward = extra()
                forward, backward = forward + more_forward, backward + more_backward
        if not self.layout.fused_grads:
            # A pass reads the new gradient (2 bytes), reads the sum and writes it, once per micro-batch.
            num_bytes = self.params_per_device(stage, live) * (_ELEMENT_BYTES + 2 * self.layout.grad_bytes)
            backward += Work(memory_s=device.memory_s(num_bytes))
        return forward, backward

    def _works(self, replica: Replica) -> list[tuple[Work, Work]]:
        layout = self.layout
        if len(replica.stages) != layout.pp:
            raise PlanError(
                f"a replica has {len(replica.stages)} stages, the layout {layout.pp}: give one state per stage."
            )
        for index, stage in enumerate(replica.stages):
            if not 1 <= stage.live <= layout.tp or stage.speed <= 0:
                raise PlanError(
                    f"stage {index} has {stage.live} live devices at speed {stage.speed:g}: "
                    f"give 1 to {layout.tp} devices and a positive speed."
                )
        # Inner stages with equal layers are alike: the first of them stands for all.
        first_like: dict[tuple[int, bool, bool], int] = {}
        works = []
        for index, stage in enumerate(replica.stages):
            key = (self.layers[index], index == 0, index == layout.pp - 1)
            works.append(self._work(first_like.setdefault(key, index), stage.live, stage.speed))
        return works

    def _replica_time(self, replica: Replica) -> StepTime:
        layout = self.layout
        works = self._works(replica)
        sends = [self._send(a.live, b.live) for a, b in zip(replica.stages, replica.stages[1:], strict=False)]
        num_micro = replica.num_sequences / layout.micro_batch
        totals = [forward.total_s + backward.total_s for forward, backward in works]
        slowest = max(range(layout.pp), key=totals.__getitem__)
        steady = (works[slowest][0] + works[slowest][1]).times(num_micro)
        bubble_s = (sum(totals) - totals[slowest]) / layout.virtual if num_micro else 0.0
        visible = 0 if layout.overlap_pp else num_micro * layout.virtual
        pp_comm_s = 2 * (visible * max(sends, default=0.0) + sum(sends)) if num_micro else 0.0
        return StepTime(
            steady.matmul_s,
            steady.attention_s,
            steady.memory_s,
            steady.tp_comm_s,
            steady.cp_comm_s,
            pp_comm_s,
            bubble_s,
        )

    def _send(self, live: int, next_live: int) -> float:
        """Seconds to hand one micro-batch's activations on; each device sends its part, the others get it by links."""
        layout = self.layout
        num_bytes = layout.micro_batch * layout.seq_len / layout.cp * self.shape.hidden_size * _ELEMENT_BYTES
        stride = layout.tp * layout.cp * layout.dp
        return self._fabric.send_s(num_bytes / min(live, next_live), stride, layout.num_devices)

    def _sync(self, states: tuple[Replica, ...]) -> tuple[float, float]:
        """Visible seconds of gradient sync (with the parameter gather of zero1) and of resharding."""
        layout, worst, worst_reshard = self.layout, 0.0, 0.0
        works = self._works(max(states, key=lambda state: self.replica(state).total_s))
        # The last micro-batches of an interleaved schedule pass chunk by chunk, so early chunks sync under later ones.
        window = (layout.pp * (layout.virtual - 1) + 1) / layout.virtual
        slack_s = 0.0
        for stage, (forward, backward) in enumerate(works):
            live = min(state.stages[stage].live for state in states)
            gather_s, reduce_s = self._stage_sync(stage, live)
            reshard_s = self._reshard(stage, live)
            if layout.overlap_dp:
                least = 1 - self.efficiencies.dp_hidden
                reduce_s = (
                    max(reduce_s + reshard_s - window * backward.total_s, (reduce_s + reshard_s) * least) - reshard_s
                )
                gather_s = max(gather_s - window * forward.total_s, gather_s * least)
            # A later stage ends its last backward earlier, by the backward passes of the stages before it.
            visible_s = max(0.0, reduce_s + reshard_s - slack_s) + gather_s
            if visible_s > worst:
                worst, worst_reshard = visible_s, min(reshard_s, visible_s)
            slack_s += backward.total_s / layout.virtual
        return worst - worst_reshard + self._tied_embedding(), worst_reshard

    def _stage_sync(self, stage: int, live: int) -> tuple[float, float]:
        """Seconds of the parameter gather and of the gradient reduction of one stage, nothing hidden."""
        layout = self.layout
        numel = self.params_per_device(stage, live)
        members = layout.dp * layout.cp
        if not layout.zero1:
            return 0.0, self._fabric.all_reduce_s(numel * layout.grad_bytes, members, layout.tp)
        reduce_s = self._fabric.reduce_scatter_s(numel * layout.grad_bytes, members, layout.tp)
        return self._fabric.reduce_scatter_s(numel * _ELEMENT_BYTES, members, layout.tp), reduce_s

    def _tied_embedding(self) -> float:
        """Seconds in which first and last stage add up the gradients of a shared embedding."""
        layout = self.layout
        if layout.pp == 1 or not self.shape.tied:
            return 0.0
        num_bytes = self.share(layout.tp).vocab * self.shape.hidden_size * layout.grad_bytes
        return self._fabric.all_reduce_s(num_bytes, 2, layout.num_devices // 2)

    def _reshard(self, stage: int, live: int) -> float:
        """Seconds in which healthy replicas bring a stage's gradients to a reduced degree and back (sync = reshard).

        The busiest device is one that does not take part in sync: it sends its whole shard before and gets it back
        after. Below half of the full degree it is one that does: it gets more than a shard, and sends it back.
        """
        layout = self.layout
        if layout.sync == "direct" or live == layout.tp:
            return 0.0
        shard = self.params_per_device(stage, layout.tp)
        moved = max(shard, self.params_per_device(stage, live) - shard)
        return 2 * self._fabric.exchange_s(moved * layout.grad_bytes, layout.tp)

    def _optimizer(self, states: tuple[Replica, ...]) -> float:
        layout = self.layout
        numel = max(
            self.params_per_device(stage, state.stages[stage].live) for state in states for stage in range(layout.pp)
        )
        # Gradients are read once for their norm and cleared once; the rest is split over replicas by zero1.
        num_bytes = 2 * layout.grad_bytes * numel + _OPTIMIZER_BYTES * numel / (
            layout.dp * layout.cp if layout.zero1 else 1
        )
        return Device(self.hardware, self.efficiencies).memory_s(num_bytes)
