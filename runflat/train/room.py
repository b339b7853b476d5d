"""Whether a plan fits in a device's memory."""

from __future__ import annotations

import torch

from runflat.plan.cost import device_memory
from runflat.plan.plan import Place, Plan
from runflat.train.engine import Engine
from runflat.train.job import DTYPES


def memory_short(engine: Engine, plan: Plan, place: Place) -> tuple[int, int] | None:
    """(bytes that `plan` needs here, bytes that there are) where the latter are fewer; None where it fits.

    The limit is the declared one, else what a GPU reports; main memory is not a device's own, so it has none.
    """
    limit = engine.job.memory_bytes
    if limit is None and engine.device.type == "cuda":
        limit = torch.cuda.mem_get_info(engine.device)[0] + torch.cuda.memory_reserved(engine.device)
    if limit is None:
        return None
    replica, train = plan.replica(place[0]), engine.job.train
    size = min(replica.num_sequences, train.micro_batch)
    how = (engine.dtype.itemsize, DTYPES[train.dtype].itemsize, train.activation_checkpointing)
    kept = engine.ownership(plan).kept_numel(place) if engine.zero1 else None
    memory = device_memory(
        engine.spec, replica, place[1], engine.job.seq_len, size, *how, train.sequence_parallel, kept
    )
    return (memory.total_bytes, limit) if memory.total_bytes > limit else None
