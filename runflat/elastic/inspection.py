"""Holders of each unit compare its bits: when a plan is taken up, and every so many steps if that is asked for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from runflat.elastic.duties import every
from runflat.elastic.heal import describe, judge
from runflat.parallel.comms import CommsError
from runflat.parallel.digest import compare, piece_digests, unit_digests, votes
from runflat.parallel.optimizer import learning_rate
from runflat.train.engine import Engine


class Inspection:
    """The comparisons that one device takes part in. All devices make them at the same moments, or hang."""

    def __init__(self, engine: Engine, say: Callable[..., None]):
        """`say(kind, **fields)` reports to the controller."""
        self._engine = engine
        self._say = say

    def before_commit(self) -> bool:
        """Compare, if that is due, the state from which the step in flight began; returns whether it was.

        The gradients of the step are final and nobody has applied them: nothing that came of wrong bits is kept.
        Every step of which there is a copy in memory is due, so that the copies are known to be good.

        Raises:
            CommsError: holders differ, or a member was lost.
        """
        train, step = self._engine.job.train, self._engine.progress.step
        due = every(train.digest_every, step) or (train.digest_every > 0 and every(train.memory_every, step))
        if due:
            self.compare()
        return due

    def before_save(self) -> None:
        """Compare before a checkpoint or a held-out loss, if digests are asked for.

        Raises:
            CommsError: holders differ, or a member was lost.
        """
        if self._engine.job.train.digest_every:
            self.compare()

    def compare(self) -> None:
        """Compare weights, moments and scalars with all other holders; tell the controller of what differs.

        Raises:
            CommsError: holders differ, or a member was lost.
        """
        engine, comms = self._engine, self._engine.comms
        assert engine.plan is not None
        digests = state_digests(engine)
        differ = compare(engine.spec, digests, comms)
        if not differ:
            return
        by_place = votes(engine.spec, digests, differ, comms)
        verdict = judge(
            {
                f"{kind} {unit}": {engine.plan.device(place): digest for place, digest in column.items()}
                for (kind, unit), column in by_place.items()
            }
        )
        units = [f"{kind} {unit}" for kind, unit in differ]
        self._say(
            "mismatch",
            generation=engine.plan.generation,
            units=units,
            wrong={device: list(found) for device, found in verdict.wrong.items()},
            unclear={unit: list(holders) for unit, holders in verdict.unclear.items()},
        )
        raise CommsError(f"holders of {describe(units)} do not have the same bits.")


def state_digests(engine: Engine) -> torch.Tensor:
    """Digests of all that this device has: where optimizer state is sharded, of weights and of the kept pieces."""
    tensors, spec = engine.state().tensors, engine.spec
    if not engine.zero1:
        return unit_digests(spec, engine.held, tensors, scalars(engine))
    weights = unit_digests(spec, engine.held, {"weight": tensors["weight"]}, scalars(engine))
    return torch.cat([weights, piece_digests(spec, engine.kept, engine.kept_state(), weights.device)])


def scalars(engine: Engine) -> list[float]:
    """Numbers that must be the same on all devices: progress, learning rate, optimizer settings, step counts."""
    progress, settings = engine.progress, engine.settings
    numbers = [float(progress.step), float(progress.optimizer_step), float(progress.num_samples)]
    numbers += [learning_rate(settings, progress.step), settings.lr, settings.clip_norm or 0.0]
    for group in engine.optimizer.param_groups:
        numbers += [*group["betas"], group["eps"], group["weight_decay"]]
    counts = [float(state["step"]) for state in engine.optimizer.state.values()]
    return [*numbers, min(counts, default=0.0), max(counts, default=0.0)]
