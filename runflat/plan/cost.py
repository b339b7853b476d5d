"""What a plan costs each device: FLOPs, bytes held, bytes sent. Counts only; seconds are `perf`'s business."""

from __future__ import annotations

from dataclasses import dataclass

from runflat.plan.batch import even_shares, micro_batches
from runflat.plan.plan import Place, Plan, ReplicaPlan
from runflat.plan.sync_groups import SyncLayout
from runflat.plan.units import ModelSpec
from runflat.plan.zero import Ownership

NUM_SCALARS = 7
"""Float64 values of the all-reduce that ends a step: ones, loss sum, tokens, squared norm, non-finite, stop, switch."""
SCALAR_BYTES = 8


def held_numel(spec: ModelSpec, replica: ReplicaPlan, slot: int) -> int:
    """Parameter elements that the device at `slot` stores."""
    held = replica.held(spec.kinds, slot)
    sharded = sum(kind.size_of(held[kind.name]) * spec.rows_by_kind[kind.name] for kind in spec.kinds)
    return sharded + spec.replicated_numel


def copied_numel(spec: ModelSpec, replica: ReplicaPlan, slot: int) -> int:
    """Parameter elements that the device at `slot` stores a second time where layers compute in a narrower type.

    All but those of an embedding that only looks up: it reads the parameter itself.
    """
    kind = spec.kind("vocab")
    own = sum(param.row_numel for param in spec.params if param.is_looked_up)
    held = replica.held(spec.kinds, slot)
    return held_numel(spec, replica, slot) - kind.size_of(held[kind.name]) * own


def sequence_flops(spec: ModelSpec, replica: ReplicaPlan, slot: int, seq_len: int) -> int:
    """Matrix-product FLOPs of one sequence, forward and backward, on the device at `slot`.

    A multiply-add is two FLOPs; backward costs twice the forward; attention is counted dense (seq_len squared), as
    torch's FLOP counter does for the eager implementation.
    """
    held = replica.held(spec.kinds, slot)
    multiplied = sum(kind.size_of(held[kind.name]) * spec.multiplied_by_kind[kind.name] for kind in spec.kinds)
    attention = 4 * seq_len * seq_len * spec.head_dim * len(held.get("head", ())) * spec.num_layers
    return 3 * (2 * seq_len * multiplied + attention)


def model_flops(spec: ModelSpec, seq_len: int) -> int:
    """FLOPs of one sequence on the whole model, counted as in `sequence_flops`; what holders do twice counts once."""
    multiplied = sum(kind.size * spec.multiplied_by_kind[kind.name] for kind in spec.kinds)
    heads = sum(kind.num_units for kind in spec.kinds if kind.name == "head")
    return 3 * (2 * seq_len * multiplied + 4 * seq_len * seq_len * spec.head_dim * heads * spec.num_layers)


@dataclass(frozen=True)
class Memory:
    """Bytes on one device. `activations_bytes` is an estimate (see `device_memory`), the rest is counted."""

    params_bytes: int
    grads_bytes: int
    moments_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return self.params_bytes + self.grads_bytes + self.moments_bytes + self.activations_bytes


def device_memory(
    spec: ModelSpec,
    replica: ReplicaPlan,
    slot: int,
    seq_len: int,
    micro_batch: int,
    bytes_per_element: int,
    compute_bytes: int | None = None,
    recompute: bool = False,
    sequence_parallel: bool = False,
    kept_numel: int | None = None,
) -> Memory:
    """Bytes that the device at `slot` needs: parameters, gradients, two AdamW moments and activations.

    `compute_bytes` per element is what layers compute in, where that is less than what parameters have: then there is a
    copy of these (`copied_numel`, counted with them). With `recompute` backward keeps the inputs of layers, and one
    layer at a time. With `kept_numel` only the moments of so many elements are there (`zero1`).

    Activations are estimated per layer as what backward keeps: eight hidden-sized tensors (norms, residuals, block
    inputs and outputs), the local query, key, value and output heads, two score matrices, four local FFN-sized
    tensors; and three tensors of local logits. With `sequence_parallel` the device has its own tokens of the hidden
    sizes but two, the inputs of attention and MLP as gathered; the first of the inputs that `recompute` keeps is whole.
    """
    numel = held_numel(spec, replica, slot)
    held = replica.held(spec.kinds, slot)
    sizes = {kind.name: kind.size_of(held[kind.name]) for kind in spec.kinds}
    tokens = seq_len * micro_batch
    heads = len(held.get("head", ()))
    own = even_shares(tokens, replica.tp)[replica.live_slots.index(slot)] if sequence_parallel else tokens
    layer = (2 * tokens + 6 * own) * spec.hidden_size
    layer += tokens * (2 * sizes.get("head", 0) + 2 * sizes.get("kv", sizes.get("head", 0)))
    layer += tokens * (2 * heads * seq_len + 4 * sizes.get("ffn", 0))
    inputs = (tokens + own * (spec.num_layers - 1)) * spec.hidden_size
    kept = inputs + layer if recompute else layer * spec.num_layers
    width = compute_bytes or bytes_per_element
    activations = kept * width + tokens * 3 * sizes.get("vocab", 0) * bytes_per_element
    params = numel * bytes_per_element
    copy = copied_numel(spec, replica, slot) * width if width != bytes_per_element else 0
    moments = 2 * (numel if kept_numel is None else kept_numel) * bytes_per_element
    return Memory(params + copy, params, moments, activations)


@dataclass(frozen=True)
class Traffic:
    """Collectives of one device and step: launches, and bytes sent per purpose.

    `sync_bytes` go to other replicas, `reshard_bytes` stay inside the replica, before and after those. With `zero1`
    `sync_bytes` and `replicated_bytes` are gradients and sums only, and `gathered_bytes` the weights after the update.
    """

    num_collectives: int
    tp_bytes: float
    sync_bytes: float
    reshard_bytes: float
    replicated_bytes: float
    scalars_bytes: float
    gathered_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """Bytes sent in all."""
        return self.tp_bytes + self.exchange_bytes + self.replicated_bytes + self.gathered_bytes + self.scalars_bytes

    @property
    def exchange_bytes(self) -> float:
        """Bytes sent for the gradients of what is split."""
        return self.sync_bytes + self.reshard_bytes


def all_reduce_bytes(payload_bytes: float, num_members: int) -> float:
    """Bytes that each member of a ring all-reduce sends: payload x 2(n-1)/n."""
    return payload_bytes * 2 * (num_members - 1) / num_members


def device_traffic(
    spec: ModelSpec,
    plan: Plan,
    layout: SyncLayout,
    place: Place,
    seq_len: int,
    micro_batch: int,
    bytes_per_element: int,
    compute_bytes: int | None = None,
    recompute: bool = False,
    sequence_parallel: bool = False,
    owned: Ownership | None = None,
) -> Traffic:
    """Collectives that the device at `place` launches in one step, and the bytes that it sends.

    Per micro-batch and layer tensor parallelism all-reduces the block outputs in forward and the block inputs in
    backward (attention and MLP: four), and the embedding output, the LM head's input gradient, the largest logit and
    (sum of exponentials, target logit) per token. A group of one device launches nothing. Hidden states have
    `compute_bytes` per element (none: `bytes_per_element`). With `recompute` backward does the forward of each layer
    again, but for the sum that ends it, whose result nothing in it needs.

    With `sequence_parallel` each all-reduce of hidden states is a reduce-scatter and, in the other direction, an
    all-gather, both as all-to-alls of token shares; backward gathers again what `recompute` needs.

    With `owned` gradients go to the owners of their pieces, sums from there to the mirrors, and new weights to the
    other holders.
    """
    replica = plan.replica(place[0])
    world, tp = len(plan.places), replica.tp
    launches, tp_bytes = 0, 0.0
    if tp > 1:
        width = spec.hidden_size * (compute_bytes or bytes_per_element)
        sums = (5 if recompute else 4) * spec.num_layers + 2
        gathers = (6 if recompute else 4) * spec.num_layers + 2
        for size in micro_batches(replica.num_sequences, micro_batch):
            tokens = size * seq_len
            tp_bytes += all_reduce_bytes(size * (seq_len - 1) * 3 * bytes_per_element, tp)
            if sequence_parallel:
                own = even_shares(tokens, tp)[replica.live_slots.index(place[1])]
                tp_bytes += (sums * (tokens - own) + gathers * own * (tp - 1)) * width
                launches += sums + gathers + 2
            else:
                tp_bytes += all_reduce_bytes(tokens * sums * width, tp)
                launches += sums + 2
    scalars = all_reduce_bytes(NUM_SCALARS * SCALAR_BYTES, world)
    launches += world > 1
    if owned is not None:
        sent = owned.sent(place)
        reduced, whole, gathered = (
            float(numel * bytes_per_element) for numel in (sent.reduced + sent.mirrored, sent.whole, sent.gathered)
        )
        return Traffic(launches + owned.num_collectives(place), tp_bytes, reduced, 0.0, whole, scalars, gathered)
    sync_bytes, reshard_bytes = exchange_bytes(layout, place, bytes_per_element)
    launches += sum(total.num_buckets for total in layout.totals_of(place)) + bool(layout.exchange)
    launches += 2 * sum(replica == place[0] for _, replica in layout.resharded)
    replicated = all_reduce_bytes(layout.replicated_numel * bytes_per_element, world)
    launches += world > 1
    return Traffic(launches, tp_bytes, sync_bytes, reshard_bytes, replicated, scalars)


def exchange_bytes(layout: SyncLayout, place: Place, bytes_per_element: int) -> tuple[float, float]:
    """Bytes that `place` sends in one step for the gradients of what is split: to other replicas, inside its own."""
    reduced = sum(
        all_reduce_bytes(total.numel * bytes_per_element, len(total.members)) for total in layout.totals_of(place)
    )
    exchanged = layout.exchange_numel(place) * bytes_per_element
    return float(reduced + exchanged), float(layout.moved_numel(place) * bytes_per_element)


def exchange_messages(layout: SyncLayout, place: Place) -> int:
    """Messages that `place` sends in one step for the gradients of what is split: sends to one peer each.

    A ring all-reduce over n members is 2(n-1) of them, an all-to-all one for each peer that gets something.
    """
    reduced = sum(total.num_buckets * 2 * (len(total.members) - 1) for total in layout.totals_of(place))
    peers = {peer for bucket in layout.exchange if place in bucket.members for peer in bucket.members} - {place}
    return reduced + len(peers) + layout.num_moves(place)


def loads(spec: ModelSpec, replica: ReplicaPlan, seq_len: int) -> dict[int, int]:
    """FLOPs of one sequence per live slot."""
    return {slot: sequence_flops(spec, replica, slot, seq_len) for slot in replica.live_slots}
