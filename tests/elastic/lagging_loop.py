"""A loop whose device LAGGARD does not see the result of one barrier: peers commit a step that it has not applied."""

import torch

from runflat.elastic.session import Session
from runflat.train.step import Scalars

LAGGARD = "1:1"
STEP = 3
SEQ_LEN, VOCABULARY = 32, 264
WAIT_S = 60.0


def train(session: Session) -> None:
    """Learns random tokens by sample number; in a run with a failure the laggard waits until its generation is left."""
    engine = session.engine
    meet = engine.barrier

    def barrier(stop: bool, switch: bool) -> Scalars:
        scalars = meet(stop, switch)
        if session.job.inject and session.device_id == LAGGARD and engine.progress.step == STEP:
            session.interrupt.rest(session.presence.generation, WAIT_S)
        return scalars

    engine.barrier = barrier  # the one way to hold a thread between two statements
    for step in session.steps():
        with step:
            for number, sample in enumerate(step.samples):
                generator = torch.Generator().manual_seed(sample)
                tokens = torch.randint(VOCABULARY, (1, SEQ_LEN), generator=generator)
                loss = step.model(input_ids=tokens, labels=tokens, use_cache=False).loss
                step.backward(loss, SEQ_LEN - 1, last=number == len(step.samples) - 1)
