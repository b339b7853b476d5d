"""An injected silent fault changes one bit, where it was asked to, and the same one each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from runflat.elastic.corrupt import corrupt
from runflat.errors import RunError
from runflat.parallel.move import ShardState, read_state
from runflat.parallel.optimizer import OptimizerSettings

SEEDS = range(40)


class Victim:
    """What a corruption sees of a worker's engine, after one step of AdamW."""

    def __init__(self, stepped: bool = True):
        self.settings = OptimizerSettings(lr=3e-3)
        self.params = {name: nn.Parameter(torch.arange(1.0, 7.0, dtype=torch.float64)) for name in ("a", "b")}
        self.optimizer = torch.optim.AdamW(self.params.values())
        if stepped:
            sum(param.sum() for param in self.params.values()).backward()
            self.optimizer.step()

    def state(self) -> ShardState:
        """What the engine would give: the live tensors."""
        return read_state(self.params, self.optimizer)

    def bits(self) -> list[int]:
        """All bits of weights and moments."""
        tensors = [tensor for param in self.params.values() for tensor in (param.data, *self._moments(param))]
        words = torch.cat(tensors).view(torch.int64).tolist()
        return [int(word) & (1 << 64) - 1 for word in words]

    def _moments(self, param: nn.Parameter) -> list[torch.Tensor]:
        state = self.optimizer.state.get(param)
        return [state["exp_avg"], state["exp_avg_sq"]] if state else []


def struck(target: str, seed: int) -> tuple[list[int], float]:
    """Returns the bits that flipped, by word, and the learning rate afterwards."""
    victim: Any = Victim()
    before = victim.bits()
    corrupt(victim, target, seed)
    return [a ^ b for a, b in zip(before, victim.bits(), strict=True)], victim.settings.lr


@pytest.mark.parametrize("target", ["weight", "moment"])
def test_one_bit_flips_where_it_was_asked_to(target: str) -> None:
    """Catches a corruption that misses its target, hits it twice, or is not repeated by its seed."""
    places = set()
    for seed in SEEDS:
        changes, lr = struck(target, seed)
        ((index, flipped),) = [(i, change) for i, change in enumerate(changes) if change]
        assert flipped.bit_count() == 1
        assert (index % 18 < 6) == (target == "weight")
        assert struck(target, seed) == (changes, lr)
        assert lr == 3e-3
        places.add((index, flipped))
    assert len(places) > len(SEEDS) / 2


def test_a_learning_rate_stays_a_number_but_not_the_same() -> None:
    """Catches a rate that does not change, or that no optimizer takes."""
    for seed in SEEDS:
        changes, lr = struck("lr", seed)
        assert not any(changes)
        assert lr != 3e-3
        assert 1.5e-3 < lr < 6e-3


def test_a_flip_between_forward_and_backward_is_not_seen_by_autograd() -> None:
    """Catches a corruption that ends the step by an error, so that nothing is silent about it."""
    victim: Any = Victim()
    loss = (victim.params["a"] ** 2).sum() + (victim.params["b"] ** 2).sum()
    corrupt(victim, "weight", 0)
    loss.backward()


def test_moments_that_do_not_exist_are_not_passed_over() -> None:
    """Catches an injected fault that silently does nothing."""
    victim: Any = Victim(stepped=False)
    with pytest.raises(RunError, match="before the first step"):
        corrupt(victim, "moment", 0)
