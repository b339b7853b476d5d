"""How many spare domains a capped job needs so that it rarely pauses."""

from __future__ import annotations

from dataclasses import dataclass

from runflat.errors import ConfigError
from runflat.plan.batch import BatchRule
from runflat.sim.config import SimConfig, parse_candidate
from runflat.sim.experiment import run_all


@dataclass(frozen=True, slots=True)
class SpareNeed:
    """Fewest spare domains that were enough, and the share of draws without a pause at that number."""

    spare_domains: int
    without_pause: float


def spare_domains_for(config: SimConfig, candidate: str, probability: float, *, most: int = 4096) -> SpareNeed:
    """Fewest spare domains with which a draw goes without a pause with at least the given probability.

    Args:
        config: The question; its batch rule is taken as ``capped``, its number of spare domains is not used.
        candidate: Chain; ``spare`` is put in front of it.
        probability: Wanted share 0..1 of draws without a pause; finer than one draw in ``config.seeds`` is not seen.
        most: Number of spare domains above which the search gives up.

    Raises:
        ConfigError: if even ``most`` spare domains are too few, or the probability is outside 0..1.
    """
    if not 0 < probability <= 1:
        raise ConfigError(f"the probability of no pause is {probability}; it must be above 0 and at most 1")
    chain = candidate if "spare" in {link.value for link in parse_candidate(candidate)[0]} else f"spare,{candidate}"

    def without_pause(spare_domains: int) -> float:
        cluster = config.cluster.model_copy(update={"spare_domains": spare_domains})
        update = {"cluster": cluster, "rule": BatchRule.CAPPED, "strategies": (chain,)}
        (result,) = run_all(config.model_copy(update=update), record=False)
        return result.seeds_without_pause

    low, high = -1, 1
    share = without_pause(0)
    if share >= probability:
        return SpareNeed(0, share)
    while (share := without_pause(high)) < probability:
        low, high = high, 2 * high
        if high > most:
            raise ConfigError(
                f"{candidate} pauses even with {most} spare domains; lower the batch or hold more devices"
            )
    while high - low > 1:
        middle = (low + high) // 2
        found = without_pause(middle)
        low, high, share = (low, middle, found) if found >= probability else (middle, high, share)
    return SpareNeed(high, share)
