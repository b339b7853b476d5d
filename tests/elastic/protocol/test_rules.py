"""The rules of the fake world can be broken: each planted bug of the protocol is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from runflat.elastic import fake_rules, fake_world
from runflat.elastic.actions import Action, Planned
from runflat.elastic.fake_launcher import Fault
from runflat.elastic.fake_world import World
from runflat.elastic.protocol import decide
from runflat.elastic.state import State

Decided = tuple[State, tuple[Action, ...]]


def alter(actions: tuple[Action, ...], change: Callable[[Planned], Planned]) -> tuple[Action, ...]:
    """`actions` with every plan after the first one changed."""
    return tuple(
        change(action) if isinstance(action, Planned) and action.plan.generation else action for action in actions
    )


def no_transfers(planned: Planned) -> Planned:
    return replace(planned, resume=planned.resume.model_copy(update={"transfers": planned.resume.transfers[1:]}))


def sent_by_the_dead(planned: Planned) -> Planned:
    moves = tuple(move.model_copy(update={"source": "1:2"}) for move in planned.resume.transfers)
    return replace(planned, resume=planned.resume.model_copy(update={"transfers": moves}))


def a_sequence_twice(planned: Planned) -> Planned:
    first, *rest = planned.plan.replicas
    more = replace(first, num_sequences=first.num_sequences + 1)
    return replace(planned, plan=replace(planned.plan, replicas=(more, *rest)))


def an_old_number(planned: Planned) -> Planned:
    return replace(planned, plan=replace(planned.plan, generation=0))


@pytest.fixture
def play(make_world: Callable[..., World]) -> Callable[[], Any]:
    return make_world(Fault("kill", "1:2", "sync", 4)).run


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("would train without", no_transfers),
        ("is not there", sent_by_the_dead),
        ("or there twice", a_sequence_twice),
        ("given out twice", an_old_number),
    ],
)
def test_a_wrong_plan_is_refused(
    monkeypatch: pytest.MonkeyPatch, play: Callable[[], Any], text: str, change: Callable[[Planned], Planned]
) -> None:
    """Catches a rule that lets every plan pass."""

    def wrong(*arguments: Any) -> Decided:
        state, actions = decide(*arguments)
        return state, alter(actions, change)

    monkeypatch.setattr(fake_world, "decide", wrong)
    with pytest.raises(AssertionError, match=text):
        play()


def test_a_lost_step_is_refused(monkeypatch: pytest.MonkeyPatch, play: Callable[[], Any]) -> None:
    """Catches a rule that lets a committed step be forgotten."""

    def wrong(state: State, *rest: Any) -> Decided:
        after, actions = decide(state, *rest)
        return (replace(after, committed=2) if after.committed == 4 else after), actions

    monkeypatch.setattr(fake_world, "decide", wrong)
    with pytest.raises(AssertionError, match="committed steps fell from 3"):
        play()


def test_a_wait_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch, play: Callable[[], Any]) -> None:
    """Catches a rule that lets a deadline pass that nobody answers."""

    def late(state: State) -> list[Any]:
        return [replace(due, at=-1.0) for due in found(state)]

    found = fake_rules.deadlines
    monkeypatch.setattr(fake_rules, "deadlines", late)
    with pytest.raises(AssertionError, match="was due and has not been answered"):
        play()
