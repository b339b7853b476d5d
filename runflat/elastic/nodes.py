"""A domain that goes as a whole, most often a machine: one recovery for all its devices, and one name.

The ends of a machine's processes are heard one by one. A recovery that begins with the first would be broken off by the
second and begin anew. So, where two devices of a domain were lost together, what is left of it is waited for. Parts of
`decide`.
"""

from __future__ import annotations

from dataclasses import replace

from runflat.elastic.actions import Turn
from runflat.elastic.device import Standing
from runflat.elastic.state import State

TOGETHER = 2
"""Losses in one domain that make the rest of it doubtful. One device fails alone far more often than with others."""


def waited_for(state: State) -> tuple[float, tuple[str, ...]] | None:
    """Until when the rest of a domain is waited for that seems to go, and who that is; None where nobody is."""
    found = []
    for domain in _hit(state):
        lost = _lost(state, domain)
        last = max((state.devices[name].since for name in lost), default=0.0)
        recent = [name for name in lost if last - state.devices[name].since <= state.limits.batch_s]
        rest = tuple(name for name in state.live() if state.planner.domains.get(name) == domain)
        if len(recent) >= TOGETHER and rest:
            found.append((last + state.limits.batch_s, rest))
    return max(found, default=None)


def name_lost(turn: Turn) -> None:
    """Say which domains are gone as a whole, in the incident too."""
    state = turn.state
    present = {state.planner.domains.get(name) for name in (*state.live(), *state.standby())}
    for domain in _hit(state):
        opened, lost = turn.state.disturbance, _lost(state, domain)
        text = f"domain {domain} is gone"
        if domain in present or len(lost) < TOGETHER or opened is None or text in opened.cause:
            continue
        turn.set(disturbance=replace(opened, cause=f"{text} with {', '.join(lost)}: {opened.cause}"))
        turn.say(f"{text} with all its devices: {', '.join(lost)}")


def _hit(state: State) -> tuple[str, ...]:
    """Domains of the devices that the incident under way is about."""
    domains = state.planner.domains
    devices = state.disturbance.devices if state.disturbance is not None else ()
    return tuple(dict.fromkeys(domains[name] for name in devices if name in domains))


def _lost(state: State, domain: str) -> tuple[str, ...]:
    """Devices of a domain that were lost and are not back."""
    lost = state.standing(Standing.LOST, Standing.OUT)
    return tuple(name for name in lost if state.planner.domains.get(name) == domain)
