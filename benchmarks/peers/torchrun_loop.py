"""Training under torchrun: DistributedDataParallel, a checkpoint every few steps, restart from the newest.

torchrun --standalone --nproc-per-node 4 --max-restarts 1000 torchrun_loop.py SETTINGS.json
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from common import Batches, Pace, Records, build_model, build_optimizer, read_settings
from torch.nn.parallel import DistributedDataParallel


def save(folder: Path, step: int, rank: int, state: dict[str, object]) -> None:
    """Each rank writes its part; the newest step is named when all parts are there."""
    path = folder / f"{step}-{rank}.pt"
    torch.save(state, path)
    dist.barrier()
    if rank == 0:
        draft = folder / "newest.draft"
        draft.write_text(str(step))
        draft.rename(folder / "newest")


def main() -> None:
    """Train for ever."""
    settings = read_settings(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    replica, slot = divmod(dist.get_rank(), settings.tp)
    inner = [dist.new_group([r * settings.tp + s for s in range(settings.tp)]) for r in range(settings.replicas)]
    outer = [dist.new_group([r * settings.tp + s for r in range(settings.replicas)]) for s in range(settings.tp)]
    model = build_model(settings, slot, inner[replica])
    optimizer = build_optimizer(settings, model)
    records, batches, folder = Records(settings, replica, slot), Batches(settings, replica), Path(settings.folder)
    step = 0
    if (folder / "newest").exists():
        step = int((folder / "newest").read_text())
        saved = torch.load(folder / f"{step}-{dist.get_rank()}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    wrapped = DistributedDataParallel(model, process_group=outer[slot])
    pace = Pace(settings.sequence_s * settings.sequences / settings.replicas)
    epoch = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    while True:
        batch = batches.of(step)
        optimizer.zero_grad()
        loss = wrapped(input_ids=batch, labels=batch, use_cache=False).loss
        pace.computed()
        loss.backward()
        optimizer.step()
        records.commit(step, batch.numel(), epoch, float(loss.detach()))
        step += 1
        if step % settings.checkpoint_every == 0:
            save(folder, step, dist.get_rank(), {"model": model.state_dict(), "optimizer": optimizer.state_dict()})


if __name__ == "__main__":
    main()
