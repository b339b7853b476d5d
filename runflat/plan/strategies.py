"""What to do after this event, given this health: one pure decision for the runtime and the simulator.

A chain such as ``spare,ntp,drop,restart`` is tried link by link. :func:`choose` decides for one hit replica and says in
words why a link fell through; :func:`decide` does so for a whole job and returns the devices, the sequences of each
replica and the words as frozen data. Nothing here acts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from runflat.cluster.health import Health
from runflat.errors import ConfigError
from runflat.plan.batch import BatchRule, share_batch

Place = tuple[int, int]
"""(replica, slot); with pipeline stages the slots count through the stages."""


class Strategy(StrEnum):
    """One link of a chain."""

    SPARE = "spare"
    """A warm spare takes the dead slot."""
    NTP = "ntp"
    """The hit replica goes on at a lower degree."""
    DROP = "drop"
    """The hit replica leaves, the others take its sequences."""
    RESTART = "restart"
    """All stop; full replicas start again from the newest checkpoint."""


Chain = tuple[Strategy, ...]


def parse_chain(text: str) -> Chain:
    """The chain that a comma-separated text such as ``spare,ntp,drop`` names.

    Raises:
        ConfigError: for an unknown, doubled or missing link.
    """
    allowed = ", ".join(strategy.value for strategy in Strategy)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"the strategy chain is empty; name at least one of {allowed}, separated by commas")
    for name in names:
        if name not in Strategy.__members__.values():
            raise ConfigError(f"unknown strategy {name!r} in chain {text!r}; allowed: {allowed}")
    if len(set(names)) < len(names):
        raise ConfigError(f"chain {text!r} names a strategy twice; each link is tried once, so name it once")
    return tuple(Strategy(name) for name in names)


def reduced_degree(tp_full: int, num_dead: int, degrees: Sequence[int] = ()) -> int:
    """Degree at which a stage with ``num_dead`` dead devices can run; 0 if none is left.

    Args:
        tp_full: Full degree.
        num_dead: Dead devices of the stage.
        degrees: Degrees that the job allows besides ``tp_full``; empty allows each one down to 1.
    """
    live = max(tp_full - num_dead, 0)
    if live == tp_full or not degrees:
        return live
    return max((degree for degree in degrees if degree <= live), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One hit replica and what stands around it: all that a choice depends on."""

    tp_full: int
    degree: int
    """Degree at which its most hit stage can run, 0 if none."""
    num_dead: int
    """Dead slots of the replica, over all stages."""
    num_free_spares: int = 0
    fits_memory: bool = True
    """Whether the survivors have the memory for a lower degree."""
    has_holders: bool = True
    """Whether each lost unit has a live holder elsewhere."""
    num_others: int = 1
    """Replicas that go on without this one."""
    num_full: int = 1
    """Replicas without a dead device: those that a restart can start."""
    has_checkpoint: bool = True


@dataclass(frozen=True, slots=True)
class Choice:
    """The link that handles a hit replica (None if no link can), spares it takes, why earlier links fell through."""

    strategy: Strategy | None
    num_spares: int = 0
    words: tuple[str, ...] = ()


def choose(chain: Chain, hit: Hit) -> Choice:
    """The first link of ``chain`` that can handle ``hit``, with the reasons of those that could not.

    Where ``ntp`` stands behind ``spare``, too few spares still raise the degree as far as they go.
    """
    words: list[str] = []
    num_spares = 0
    for strategy in chain:
        problem = _problem(strategy, hit)
        if problem is None:
            return Choice(strategy, hit.num_dead if strategy is Strategy.SPARE else num_spares, tuple(words))
        words.append(f"{strategy.value}: {problem}")
        if strategy is Strategy.SPARE and hit.has_holders and Strategy.NTP in chain:
            num_spares = hit.num_free_spares
    return Choice(None, 0, tuple(words))


def _problem(strategy: Strategy, hit: Hit) -> str | None:
    """Why ``strategy`` cannot handle ``hit``, or None if it can."""
    no_holder = "a lost unit has no live holder, so its state is only in a checkpoint"
    if strategy is Strategy.SPARE:
        if hit.num_free_spares < hit.num_dead:
            return f"{hit.num_dead} dead, but {hit.num_free_spares} free spares"
        return None if hit.has_holders else no_holder
    if strategy is Strategy.NTP:
        if hit.degree < 1:
            return f"no usable degree below TP {hit.tp_full} is left with {hit.num_dead} dead"
        if not hit.fits_memory:
            return f"the model does not fit in the survivors' memory at TP {hit.degree}"
        return None if hit.has_holders else no_holder
    if strategy is Strategy.DROP:
        return None if hit.num_others else "no other replica would be left"
    if not hit.num_full:
        return "no full replica is left to start again"
    return None if hit.has_checkpoint else "there is no checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What a decision needs to know of a job; the runtime and the simulator fill it alike."""

    num_replicas: int
    tp_full: int
    num_sequences: int
    """Sequences of the global batch."""
    pp: int = 1
    rule: BatchRule = BatchRule.CONSTANT
    cap: int | None = None
    """Capped: sequences that a full replica may do; None for its even share."""
    degrees: tuple[int, ...] = ()
    """Reduced degrees that may be used; empty for all."""
    has_checkpoint: bool = True

    @property
    def even_share(self) -> int:
        """Sequences of a replica in health, rounded up."""
        return -(-self.num_sequences // self.num_replicas)

    def most_hit(self, dead_slots: Sequence[int]) -> int:
        """Dead devices of the stage that lost most, for a replica with these dead slots."""
        return max((sum(slot // self.tp_full == stage for slot in dead_slots) for stage in range(self.pp)), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Who works on what from now on, and why; pass it back as ``previous`` at the next event."""

    strategy: Strategy | None
    """Heaviest link in use: restart before drop before ntp before spare; None when nothing is hit."""
    placement: tuple[tuple[Place, str], ...]
    """Device at each place, dead ones included (a spare that took a slot stands here)."""
    devices: tuple[tuple[Place, str], ...]
    """Live devices that work."""
    shares: tuple[tuple[int, int], ...]
    """(replica, sequences) of the replicas that work."""
    left: tuple[tuple[int, Strategy], ...] = ()
    """(replica, link) of the replicas that do not work."""
    idle: tuple[str, ...] = ()
    """Live devices without work."""
    paused: bool = False
    """Capped and below the target: everybody waits."""
    stop: bool = False
    """Nothing can work any more."""
    words: tuple[str, ...] = ()


def handled_by(before: Decision, after: Decision) -> Strategy | None:
    """The link that leads from one decision to the next, or None if nobody at work notices."""
    if before.devices == after.devices and before.shares == after.shares:
        return None
    newly_left = set(after.left) - set(before.left)
    if after.strategy is Strategy.RESTART and any(link is Strategy.RESTART for _, link in newly_left):
        return Strategy.RESTART
    if {replica for replica, _ in before.left} != {replica for replica, _ in after.left}:
        return Strategy.DROP
    return Strategy.SPARE if before.placement != after.placement else Strategy.NTP


SecondsPerSequence = Callable[[int, tuple[int, ...]], float]
"""(replica, its dead slots) -> seconds for one sequence, in any unit that all replicas share."""


def decide(
    job: JobFacts,
    health: Health,
    chain: Chain,
    *,
    placement: Mapping[Place, str],
    seconds: SecondsPerSequence | None = None,
    fits_memory: Callable[[int], bool] = lambda degree: True,
    has_holders: Callable[[int, tuple[int, ...]], bool] = lambda replica, dead: True,
    previous: Decision | None = None,
    domains: Mapping[str, str] = MappingProxyType({}),
) -> Decision:
    """The decision for the present ``health``.

    Args:
        job: Facts of the job.
        health: Devices held and failed.
        chain: Links to try in order.
        placement: Device at each place before the decision; ``previous`` replaces it where given.
        seconds: Seconds of one sequence on a replica with given dead slots; default: follows its most hit stage.
        fits_memory: Whether the model fits at a degree.
        has_holders: Whether the units of a replica's dead slots live elsewhere.
        previous: The decision in force; without it nobody waits for a restart and no spare stands in a slot.
        domains: Domain of each device: a spare takes a slot only in a replica of its own domain. Empty: any slot.
    """
    asked = _Question(
        job=job,
        health=health,
        chain=chain,
        placement=previous.placement if previous else tuple(placement.items()),
        seconds=seconds or _proportional(job),
        fits_memory=fits_memory,
        has_holders=has_holders,
        left=dict(previous.left) if previous else {},
        domains=domains,
    )
    decision = _answer(asked)
    if decision.stop and job.has_checkpoint:
        # Nobody can go on from live state. From a checkpoint all can, and then it does not matter who holds what.
        anew = _answer(replace(asked, has_holders=lambda replica, dead: True))
        if not anew.stop:
            return replace(anew, words=tuple(dict.fromkeys((*decision.words, *anew.words))))
    return decision


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """All that a decision depends on."""

    job: JobFacts
    health: Health
    chain: Chain
    placement: tuple[tuple[Place, str], ...]
    seconds: SecondsPerSequence
    fits_memory: Callable[[int], bool]
    has_holders: Callable[[int, tuple[int, ...]], bool]
    left: Mapping[int, Strategy]
    """Replicas that did not work before, and the link by which they left."""
    domains: Mapping[str, str]

    @property
    def waiting(self) -> set[int]:
        """Replicas that only a restart takes in."""
        return {replica for replica, link in self.left.items() if link is Strategy.RESTART}


def _answer(asked: _Question) -> Decision:
    job, health, seats = asked.job, asked.health, dict(asked.placement)
    choices = _choices(asked, seats)
    left = _leaving(asked, choices, seats)
    working = [replica for replica in range(job.num_replicas) if replica not in left]
    shares, paused = _shares(job, health, seats, working, asked.seconds)
    for replica in [replica for replica in working if not shares[replica] and not paused]:
        left[replica] = Strategy.DROP
        del shares[replica]
    devices = {
        place: device for place, device in sorted(seats.items()) if place[0] in shares and health.is_live(device)
    }
    busy = set(devices.values())
    used = {choice.strategy for choice in choices.values()} - {None}
    order = (Strategy.RESTART, Strategy.DROP, Strategy.NTP, Strategy.SPARE)
    return Decision(
        strategy=next((strategy for strategy in order if strategy in used), None),
        placement=tuple(sorted(seats.items())),
        devices=tuple(devices.items()),
        shares=tuple(sorted(shares.items())),
        left=tuple(sorted(left.items())),
        idle=tuple(device for device in health.live if device not in busy),
        paused=paused,
        stop=not devices,
        words=tuple(
            f"replica {replica}: {word}"
            for replica, choice in choices.items()
            for word in choice.words
            if replica not in asked.left or not devices  # else it was said when that replica left
        ),
    )


def _leaving(asked: _Question, choices: Mapping[int, Choice], seats: Mapping[Place, str]) -> dict[int, Strategy]:
    """Replicas that do not work, and why."""
    restarting = any(choice.strategy is Strategy.RESTART for choice in choices.values())
    left: dict[int, Strategy] = {}
    for replica in range(asked.job.num_replicas):
        choice = choices.get(replica)
        if choice is not None and choice.strategy is None:
            left[replica] = asked.chain[-1]
        elif choice is not None and choice.strategy in (Strategy.DROP, Strategy.RESTART):
            left[replica] = choice.strategy
        elif replica in asked.waiting and (not restarting or _dead_slots(asked.job, asked.health, seats, replica)):
            left[replica] = Strategy.RESTART
    return left


def _choices(asked: _Question, seats: dict[Place, str]) -> dict[int, Choice]:
    """The choice for each hit replica that is not out already; seats spares."""
    job, chain, waiting = asked.job, asked.chain, asked.waiting
    seated = set(seats.values())
    spares = [device for device in asked.health.live if device not in seated]
    hit = {replica: _dead_slots(job, asked.health, seats, replica) for replica in range(job.num_replicas)}
    going = {replica for replica in hit if not hit[replica] and replica not in waiting}
    choices: dict[int, Choice] = {}
    for replica, dead in hit.items():
        if not dead or replica in waiting:
            continue
        reducible = going | {
            other for other in hit if hit[other] and other not in waiting and Strategy.NTP in chain and other != replica
        }
        degree = reduced_degree(job.tp_full, job.most_hit(dead), job.degrees)
        fit = _spares_for(asked, seats, replica, spares)
        choice = choose(
            chain,
            Hit(
                tp_full=job.tp_full,
                degree=degree,
                num_dead=len(dead),
                num_free_spares=len(fit),
                fits_memory=asked.fits_memory(degree),
                has_holders=asked.has_holders(replica, dead),
                num_others=len(reducible - {r for r, c in choices.items() if c.strategy in (None, Strategy.DROP)}),
                num_full=sum(not slots for slots in hit.values()),
                has_checkpoint=job.has_checkpoint,
            ),
        )
        for slot in dead[: choice.num_spares]:
            seats[(replica, slot)] = fit.pop(0)
            spares.remove(seats[(replica, slot)])
        choices[replica] = choice
    return choices


def _spares_for(asked: _Question, seats: Mapping[Place, str], replica: int, spares: Sequence[str]) -> list[str]:
    """Spares with which a replica does not span domains; one that is dead as a whole may move to another domain."""
    if not asked.domains:
        return list(spares)
    ours = [device for place, device in seats.items() if place[0] == replica]
    home = {asked.domains.get(device) for device in ours if asked.health.is_live(device)}
    by_domain: dict[str | None, list[str]] = {}
    for device in spares:
        by_domain.setdefault(asked.domains.get(device), []).append(device)
    if not home:
        return max(by_domain.values(), key=len, default=[])
    return [device for domain, found in by_domain.items() if domain in home for device in found]


def _dead_slots(job: JobFacts, health: Health, seats: Mapping[Place, str], replica: int) -> tuple[int, ...]:
    slots = range(job.tp_full * job.pp)
    return tuple(slot for slot in slots if not health.is_live(seats[(replica, slot)]))


def _proportional(job: JobFacts) -> SecondsPerSequence:
    """Seconds in proportion to the most hit stage's share of lost devices; 1 for a full replica."""

    def seconds(replica: int, dead: tuple[int, ...]) -> float:
        return job.tp_full / reduced_degree(job.tp_full, job.most_hit(dead), job.degrees)

    return seconds


def _shares(
    job: JobFacts, health: Health, seats: Mapping[Place, str], working: Sequence[int], seconds: SecondsPerSequence
) -> tuple[dict[int, int], bool]:
    """Sequences of each working replica, and whether the job must pause."""
    if not working:
        return {}, False
    per_sequence = [seconds(replica, _dead_slots(job, health, seats, replica)) for replica in working]
    # What a full replica would need: the fastest one here may itself be reduced.
    full_s = min(*per_sequence, seconds(working[0], ()))
    cap = job.even_share if job.cap is None or job.rule is BatchRule.FLEXIBLE else job.cap
    counts, paused = share_batch(job.rule, job.num_sequences, cap, per_sequence, full_s)
    return dict(zip(working, counts, strict=True)), paused
