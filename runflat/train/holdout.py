"""The held-out loss: each replica computes an equal part of it."""

from __future__ import annotations

import torch

from runflat.parallel.loss import num_targets
from runflat.train.engine import Engine


@torch.no_grad()
def holdout_loss(engine: Engine) -> float:
    """Held-out loss in nats per token; each replica computes an equal part of the held-out set."""
    assert engine.plan is not None
    assert engine.place is not None
    assert engine.sharded is not None
    assert engine.corpus is not None
    model = engine.sharded.model
    numbers = [replica.replica for replica in engine.plan.replicas]
    count, index, size = engine.num_holdout, numbers.index(engine.place[0]), len(numbers)
    start, stop = index * count // size, (index + 1) * count // size
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)
    model.eval()
    if stop > start:
        for batch in engine.micro_batches(torch.from_numpy(engine.corpus.holdout(start, stop - start))):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            total += torch.tensor([float(loss), num_targets(batch)], dtype=torch.float64, device=engine.device)
    model.train()
    if not engine.reports:
        total.zero_()
    engine.comms.reduce(total)
    return float(total[0] / total[1])
