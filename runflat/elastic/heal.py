"""What is done about holders whose bits differ: who is wrong, and whether its bits are healed or everybody goes back.

Pure functions. A digest is compared in two places: when a plan is taken up, and, where `train.digest_every` asks for
it, between the exchange of gradients and the barrier of a step, so before anything that was computed from wrong bits
can change state. Hence the rules:

    1. Each unit that differs has a majority, and no step was committed since the last good digest from which wrong bits
       could have been used: heal. The units come from a holder of the majority's bits, the step in flight runs again,
       and the run is the failure-free one.
    2. Else back to the newest state that is known to be good: a copy in memory of a step at which a digest was good, or
       a checkpoint of a run that compares digests (it does so before each). The run is the failure-free one.
    3. Else, where each unit has a majority: heal, and say how many steps may have used the wrong bits.
    4. Else back to the newest checkpoint on disk, and say that nobody knows whether it is good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runflat.elastic.messages import MemoryCopy, Mismatch
from runflat.elastic.state import State

NAMED = 3
"""How many units a text names before it counts the rest."""


@dataclass(frozen=True)
class Verdict:
    """`wrong`: per device the units in which it differs from the majority of their holders.

    `unclear`: per unit without a majority its holders, one of which is wrong.
    """

    wrong: Mapping[str, tuple[str, ...]]
    unclear: Mapping[str, tuple[str, ...]]


def judge(votes: Mapping[str, Mapping[str, int]]) -> Verdict:
    """Who is wrong, by majority: more than half of a unit's holders have the same digest, and the others are wrong.

    Args:
        votes: per unit that differs the digest of each of its holders.
    """
    wrong: dict[str, list[str]] = {}
    unclear: dict[str, tuple[str, ...]] = {}
    for unit, by_device in votes.items():
        digest, count = Counter(by_device.values()).most_common(1)[0]
        if 2 * count <= len(by_device):
            unclear[unit] = tuple(by_device)
            continue
        for device, other in by_device.items():
            if other != digest:
                wrong.setdefault(device, []).append(unit)
    return Verdict({device: tuple(units) for device, units in wrong.items()}, unclear)


def suspects(message: Mismatch) -> tuple[str, ...]:
    """Devices that are wrong; where nobody can be named, those of which some are."""
    holders = (name for names in message.unclear.values() for name in names)
    return tuple(message.wrong) or tuple(sorted(set(holders)))


def describe(units: Sequence[str]) -> str:
    """Units in words: the first few, and how many more."""
    more = len(units) - NAMED
    return ", ".join(units[:NAMED]) + (f" and {more} more" if more > 0 else "")


def doubt(state: State) -> str:
    """Why healing alone would not give the failure-free run; empty if it does, or if nothing is wrong."""
    distrust = state.distrust
    if distrust is None:
        return ""
    if distrust.unclear:
        units = list(distrust.unclear)
        pair = " and ".join(distrust.unclear[units[0]])
        return f"{describe(units)} differ between holders ({pair}), and no majority says who is wrong"
    used = state.committed - state.clean
    if used > 0 and not distrust.fresh:
        names = " and ".join(distrust.wrong)
        return f"bits of {names} are wrong, and {used} steps were committed since the last good digest"
    return ""


def in_words(healed: Sequence[str]) -> str:
    """What is done to devices whose bits are wrong; empty if there are none."""
    return f"{' and '.join(healed)} {'get' if len(healed) > 1 else 'gets'} the majority's bits" if healed else ""


def good_copies(state: State, copies: Sequence[MemoryCopy]) -> tuple[MemoryCopy, ...]:
    """The copies in memory that can be relied on: all of them, unless holders differ."""
    if state.distrust is None:
        return tuple(copies)
    return tuple(copy for copy in copies if copy.step in state.compared)


def good_checkpoint(state: State) -> tuple[int, str] | None:
    """The newest checkpoint on disk, if it can be relied on: where holders differ, only if digests guard each save."""
    return state.checkpoint if state.distrust is None or state.limits.digest_every else None
