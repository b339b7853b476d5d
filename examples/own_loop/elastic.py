"""The loop of `plain.py` on two replicas of TP 2: a worker that dies costs one step, and training goes on."""

import sys

import torch

import runflat.api

NUM_STEPS, BATCH, SEQ_LEN = 12, 8, 32


def make_batch(samples: range) -> torch.Tensor:
    """Sequences of a made-up language in which each token is three times the last one."""
    starts = torch.tensor([[sample * 7 % 97 + 1] for sample in samples])
    return starts * 3 ** torch.arange(SEQ_LEN) % 97


def train(worker: runflat.api.Worker) -> None:
    """Train on one device, under whatever plan is in force."""
    for step in worker.steps():
        with step:
            batch = make_batch(step.samples)
            loss = step.model(input_ids=batch, labels=batch).loss
            step.backward(loss, num_targets=len(batch) * (SEQ_LEN - 1))


if __name__ == "__main__":
    runflat.api.launch(
        train,
        model={"from_dir": sys.argv[1]},
        layout={"tp": 2, "replicas": 2},
        data={"seq_len": SEQ_LEN},
        train={"steps": NUM_STEPS, "global_batch": BATCH, "lr": 1e-2, "weight_decay": 0.0, "beta2": 0.999,
               "schedule": "constant", "dtype": "float64"},
        run=sys.argv[2],
        **({"inject": sys.argv[3]} if len(sys.argv) > 3 else {}),
    )  # fmt: skip
