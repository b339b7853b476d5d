"""Silent faults on purpose: one bit of a worker's state flips, and nothing says so."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import torch

from runflat.errors import RunError
from runflat.plan.units import MOMENTS
from runflat.train.engine import Engine

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_MANTISSA_BITS = 52


def corrupt(engine: Engine, target: str, seed: int) -> None:
    """Flip one bit of a weight, of a moment, or of the learning rate; `seed` chooses the place.

    The learning rate loses a bit of its mantissa, so that it is still a number above 0.

    Raises:
        RunError: there are no moments yet.
    """
    chance = random.Random(seed)
    if target == "lr":
        (bits,) = struct.unpack("<q", struct.pack("<d", engine.settings.lr))
        (lr,) = struct.unpack("<d", struct.pack("<q", bits ^ 1 << chance.randrange(_MANTISSA_BITS)))
        engine.settings = replace(engine.settings, lr=lr)
        return
    state = engine.state()
    if target == "moment" and not state.optimizer_step:
        raise RunError("a moment was to be corrupted before the first step was applied: there are none yet.")
    there = state.tensors["exp_avg" if target == "moment" else "weight"]
    name = chance.choice([name for name, tensor in there.items() if tensor.numel()])
    kind = chance.choice(MOMENTS) if target == "moment" else "weight"
    flip_bit(state.tensors[kind][name], chance)


def flip_bit(tensor: torch.Tensor, chance: random.Random) -> None:
    """Flip a bit of an element in place, unseen by autograd."""
    bits = tensor.data.view(-1).view(_BITS[tensor.element_size()])
    element, bit = chance.randrange(tensor.numel()), chance.randrange(8 * tensor.element_size())
    sign = bit == 8 * tensor.element_size() - 1
    bits[element] ^= torch.iinfo(bits.dtype).min if sign else 1 << bit
