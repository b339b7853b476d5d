"""A loop whose device SLOW has a disk that takes its time over one shard: until the test says go."""

import threading
from pathlib import Path

import torch

from runflat.elastic import saver
from runflat.elastic.session import Session
from runflat.plan.units import ModelSpec
from runflat.train.checkpoint import ShardFile
from runflat.train.shards import ShardCopy

SLOW, STEP = "0:1", 4
BUSY, GO = "busy", "go"
"""Files in the run's folder: the disk is at it, and may finish."""
SEQ_LEN, VOCABULARY = 32, 264
POLL_S = 0.02


def train(session: Session) -> None:
    """Learns random tokens by sample number."""
    if session.device_id == SLOW:
        _slow_down(Path(session.job.run))
    for step in session.steps():
        with step:
            for number, sample in enumerate(step.samples):
                generator = torch.Generator().manual_seed(sample)
                tokens = torch.randint(VOCABULARY, (1, SEQ_LEN), generator=generator)
                loss = step.model(input_ids=tokens, labels=tokens, use_cache=False).loss
                step.backward(loss, SEQ_LEN - 1, last=number == len(step.samples) - 1)


def _slow_down(run: Path) -> None:
    write, pause = saver.write_shard, threading.Event()

    def slow(folder: Path, spec: ModelSpec, copy: ShardCopy) -> ShardFile:
        if (copy.step, copy.generation) == (STEP, 0):
            (run / BUSY).touch()
            while not (run / GO).exists():
                pause.wait(POLL_S)
        return write(folder, spec, copy)

    saver.write_shard = slow
