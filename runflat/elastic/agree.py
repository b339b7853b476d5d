"""All devices of a new generation agree on where the run stands, newcomers included."""

from __future__ import annotations

import struct

import torch

from runflat.parallel.comms import Comms, CommsError
from runflat.train.checkpoint import Progress

_LEAST = torch.iinfo(torch.int64).min
_HASH_WORDS = 4
_NO_HASH = "00" * 8 * _HASH_WORDS


def agree(comms: Comms, progress: Progress | None) -> Progress:
    """The common progress of all devices of the world; one that has just come brings None and learns it.

    Raises:
        CommsError: two devices stand at different places, or nobody stands anywhere, or a member was lost.
    """
    own = torch.full((3 + _HASH_WORDS,), _LEAST, dtype=torch.int64)
    if progress is not None:
        digest = struct.unpack(f"<{_HASH_WORDS}q", bytes.fromhex(progress.sample_hash or _NO_HASH))
        own = torch.tensor([progress.step, progress.optimizer_step, progress.num_samples, *digest], dtype=torch.int64)
    # max(x) and max(~x) = ~min(x) in one reduction; who has nothing contributes the least value to both.
    both = torch.cat([own, own if progress is None else ~own])
    shared = both.to(comms.device)
    comms.reduce(shared, "max")
    largest, smallest = shared[: len(own)].cpu(), ~shared[len(own) :].cpu()
    if not torch.equal(largest, smallest):
        steps = sorted({int(largest[0]), int(smallest[0])})
        raise CommsError(f"devices of generation {comms.generation} stand at different places: steps {steps}.")
    step, optimizer_step, num_samples, *words = largest.tolist()
    text = struct.pack(f"<{_HASH_WORDS}q", *words).hex()
    return Progress(step, optimizer_step, num_samples, "" if text == _NO_HASH else text)
