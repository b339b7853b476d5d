"""Training under torchft: fault tolerant DistributedDataParallel over replica groups, live recovery from a peer.

One torchrun for each replica group, with REPLICA_GROUP_ID and TORCHFT_LIGHTHOUSE in the environment, as torchft's
README describes; the group's own tensor parallelism is its default process group.
"""

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import Batches, Pace, Records, build_model, build_optimizer, read_settings
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def main() -> None:
    """Train for ever."""
    settings = read_settings(sys.argv[1])
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    replica, slot = int(os.environ["REPLICA_GROUP_ID"]), dist.get_rank()
    assert dist.group.WORLD is not None
    model = build_model(settings, slot, dist.group.WORLD)
    inner = build_optimizer(settings, model)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{replica}",
        timeout=timedelta(seconds=30),
        hostname="localhost",
        init_sync=False,  # all begin with the same weights
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    records, batches = Records(settings, replica, slot), Batches(settings, replica)
    pace = Pace(settings.sequence_s * settings.sequences / settings.replicas)
    while True:
        optimizer.zero_grad()  # begins the quorum of the step
        step = manager.current_step()
        batch = batches.of(step)
        loss = wrapped(input_ids=batch, labels=batch, use_cache=False).loss
        pace.computed()
        loss.backward()
        healing = not manager.is_participating()
        optimizer.step()
        if manager.current_step() == step:
            pace.rebase()  # not committed
            continue
        tokens = 0 if healing else batch.numel()
        records.commit(manager.current_step() - 1, tokens, manager.num_participants(), float(loss.detach()))
        if healing:
            pace.rebase()


if __name__ == "__main__":
    main()
