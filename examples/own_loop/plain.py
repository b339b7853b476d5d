"""A plain PyTorch loop in one process. `elastic.py` beside it is the same loop on replicas that survive losses."""

import sys

import torch
from transformers import AutoModelForCausalLM

NUM_STEPS, BATCH, SEQ_LEN = 12, 8, 32


def make_batch(samples: range) -> torch.Tensor:
    """Sequences of a made-up language in which each token is three times the last one."""
    starts = torch.tensor([[sample * 7 % 97 + 1] for sample in samples])
    return starts * 3 ** torch.arange(SEQ_LEN) % 97


def train(model_dir: str) -> list[float]:
    """Returns the loss of each step."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for index in range(NUM_STEPS):
        batch = make_batch(range(index * BATCH, (index + 1) * BATCH))
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


if __name__ == "__main__":
    for number, value in enumerate(train(sys.argv[1])):
        print(f"step {number + 1}: loss {value:.6f}")
