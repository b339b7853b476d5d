"""Holders whose bits differ: who is wrong, and whether it is healed or everybody goes back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from runflat.elastic import messages, orders
from runflat.elastic.actions import Action, Closed, Heard, Note, Planned, Published, Say, Send
from runflat.elastic.device import Standing
from runflat.elastic.fake_world import World
from runflat.elastic.heal import Verdict, judge
from runflat.elastic.protocol import decide
from runflat.elastic.state import Limits, Stage, State

DEVICES = tuple(f"{replica}:{slot}" for replica in range(3) for slot in range(4))
UNIT, OTHER = "head 3", "ffn 5"


def test_the_majority_of_holders_names_who_is_wrong() -> None:
    """Catches a peer that is blamed, a tie that is decided by order, and a minority of equals that wins."""
    votes = {
        "one of three": {"0:1": 7, "1:1": 8, "2:1": 7},
        "two of five": {"0:0": 1, "0:1": 1, "1:1": 2, "2:0": 3, "2:1": 1},
        "a pair": {"0:1": 7, "1:1": 8},
        "all different": {"0:1": 7, "1:1": 8, "2:1": 9},
        "two against two": {"0:0": 1, "0:1": 1, "1:0": 2, "1:1": 2},
        "half is not most": {"0:0": 1, "0:1": 1, "1:0": 2, "1:1": 3},
    }
    verdict = judge(votes)
    assert verdict.wrong == {"1:1": ("one of three", "two of five"), "2:0": ("two of five",)}
    assert verdict.unclear.keys() == {"a pair", "all different", "two against two", "half is not most"}
    assert verdict.unclear["a pair"] == ("0:1", "1:1")
    assert judge({}) == Verdict({}, {})


class Job:
    """Training with three replicas of TP 4, whose workers' words are made up here."""

    def __init__(self, state: State, now: float):
        self.state = state
        self.now = now
        self.actions: list[Action] = []

    def hear(self, device: str, kind: Callable[..., messages.Message], **fields: Any) -> None:
        self.take(Heard(device, kind(incarnation=0, **fields)))

    def take(self, happening: Any) -> None:
        self.state, actions = decide(self.state, happening, self.now)
        self.actions += actions

    def of(self, kind: type) -> list[Any]:
        return [action for action in self.actions if isinstance(action, kind)]

    @property
    def generation(self) -> int:
        assert self.state.plan is not None
        return self.state.plan.generation

    def commit(self, compared: bool = True) -> None:
        """One more step is committed; `compared`: its digest was good."""
        fields = {"step": self.state.committed, "scalars": (12.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0)}
        self.hear("0:0", messages.Commit, generation=self.generation, compared=compared, **fields)

    def mismatch(self, wrong: Mapping[str, Any] | None = None, unclear: Mapping[str, Any] | None = None) -> Planned:
        """All devices say that bits differ, and leave the generation; returns what is decided."""
        wrong, unclear = wrong or {}, unclear or {}
        units = tuple(dict.fromkeys((*(unit for found in wrong.values() for unit in found), *unclear)))
        before = self.generation
        for device in DEVICES:
            fields = {"units": units, "wrong": wrong, "unclear": unclear}
            self.hear(device, messages.Mismatch, generation=before, **fields)
            self.hear(device, messages.Suspect, generation=before, phase="sync", text="do not have the same bits")
        for device in DEVICES:
            fields = {"committed": self.state.committed, "complete": True, "memory": self.memory(device)}
            self.hear(device, messages.Status, generation=self.state.generation, holds=before, **fields)
        planned: Planned = self.of(Planned)[-1]
        return planned

    def memory(self, device: str) -> Iterable[dict[str, Any]]:
        """Copies of the last two even steps, as every second step makes them."""
        newest = self.state.committed - self.state.committed % 2
        return tuple({"device": device, "step": step, "generation": 0} for step in (newest - 2, newest) if step > 0)

    def recover(self) -> None:
        """Everybody takes up the plan and runs."""
        for kind, fields in ((messages.Ready, {}), (messages.Formed, {}), (messages.Running, {"bytes_moved": 5})):
            for device in self.state.members():
                self.hear(device, kind, generation=self.generation, **fields)
        assert self.state.stage is Stage.RUN


@pytest.fixture
def make_job(make_world: Callable[..., World]) -> Callable[..., Job]:
    def make(digest_every: int = 1) -> Job:
        world = make_world(replicas=3, num_sequences=12, limits={"digest_every": digest_every})
        world.run_until(lambda: world.state.committed == 5)
        # The fake workers compare nothing: as if the run had begun here.
        return Job(replace(world.state, clean=5), world.now)

    return make


def test_a_wrong_device_gets_exactly_the_units_that_differ(make_job: Callable[..., Job]) -> None:
    """Catches a blamed peer, a source with wrong bits, units that move for nothing, and a step that is kept."""
    job = make_job()
    job.commit()
    planned = job.mismatch({"1:1": (UNIT, OTHER), "2:1": (OTHER,)})
    resume = planned.resume
    assert (resume.action, resume.committed, resume.healed) == ("discard", 6, ("1:1", "2:1"))
    assert planned.reason == "1:1 and 2:1 get the majority's bits"
    moved = {(move.kind, move.start, move.stop, move.source, move.target) for move in resume.transfers}
    assert {(kind, start, target) for kind, start, _, _, target in moved} == {
        ("head", 3, "1:1"),
        ("ffn", 5, "1:1"),
        ("ffn", 5, "2:1"),
    }
    assert {source for kind, _, _, source, _ in moved if kind == "ffn"} == {"0:1"}
    assert all(move.num_bytes > 0 for move in resume.transfers)
    assert job.state.plan is not None
    assert [replica.tp for replica in job.state.plan.replicas] == [4, 4, 4]


def test_it_is_an_incident_like_any_other(make_job: Callable[..., Job]) -> None:
    """Catches a heal that nobody reads of: no devices, no cause, no bytes, or one that never ends."""
    job = make_job()
    job.mismatch({"1:1": (UNIT,)})
    job.recover()
    assert job.state.distrust is None
    job.commit()
    (closed,) = job.of(Closed)
    assert (closed.devices, closed.step, closed.action) == (("1:1",), 5, "heal")
    assert closed.incident.cause == f"digest of {UNIT} differs"
    assert closed.incident.bytes_moved == 5 * len(DEVICES)
    assert {"detect", "abort", "barrier", "form"} <= closed.incident.phases_s.keys()


def test_replicated_parameters_and_scalars_have_holders_too(make_job: Callable[..., Job]) -> None:
    """Catches a norm that stays wrong, and a learning rate for which units move."""
    planned = make_job().mismatch({"0:2": ("replicated 0", "scalars 0")})
    (move,) = planned.resume.transfers
    assert (move.kind, move.start, move.stop, move.target) == ("replicated", 0, 1, "0:2")
    assert move.source != "0:2"
    assert move.num_bytes == 8 * 12
    assert planned.resume.healed == ("0:2",)
    planned = make_job().mismatch({"0:2": ("scalars 0",)})
    assert (planned.resume.transfers, planned.resume.healed) == ((), ("0:2",))


WRONG = {"1:1": (UNIT,)}
PAIR = {UNIT: ("0:1", "1:1")}
CASES: dict[str, tuple[dict[str, Any], int, list[bool], bool, tuple[str, int, bool], str]] = {
    # what is found, digest_every, digests of the steps since (good or none), a checkpoint of step 5,
    # -> (action, committed, healed), words
    "found before it was used": ({"wrong": WRONG}, 1, [True] * 3, True, ("discard", 8, True), "majority"),
    "used, and copies were compared": (
        {"wrong": WRONG},
        2,
        [False, True, False, False],
        True,
        ("memory", 6, False),
        "2 steps were committed since the last good digest: back to the copies in memory of step 6",
    ),
    "used, and only the disk was compared": (
        {"wrong": WRONG},
        4,
        [False] * 4,
        True,
        ("checkpoint", 5, False),
        "4 steps were committed since the last good digest: back to checkpoint five",
    ),
    "used, and nothing else is known to be good": (
        {"wrong": WRONG},
        4,
        [False] * 4,
        False,
        ("discard", 9, True),
        "4 steps were committed since the last good digest, and no older state is known to be good: 1:1 gets",
    ),
    "used, and nobody asked for digests": (
        {"wrong": WRONG},
        0,
        [False] * 4,
        True,
        ("discard", 9, True),
        "no older state is known to be good",
    ),
    "two holders": (
        {"unclear": PAIR},
        1,
        [True] * 3,
        True,
        ("memory", 6, False),
        "head 3 differ between holders (0:1 and 1:1), and no majority says who is wrong: back to the copies",
    ),
    "two holders and nobody asked for digests": (
        {"unclear": PAIR},
        0,
        [False] * 3,
        True,
        ("checkpoint", 5, False),
        "no majority says who is wrong, and no older state is known to be good: back to checkpoint five",
    ),
    "one is named, another pair is not": (
        {"wrong": WRONG, "unclear": {OTHER: ("0:0", "1:0")}},
        1,
        [True] * 3,
        True,
        ("memory", 6, False),
        "no majority",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_where_everybody_goes_on_from(make_job: Callable[..., Job], case: str) -> None:
    """Catches gradients of wrong bits that are kept although a good state exists, and a copy that was never compared.

    Copies in memory are there of every even step; at step 8, where the last steps end, they are as wrong as the rest.
    """
    found, digest_every, digests, disk, expected, words = CASES[case]
    job = make_job(digest_every)
    if disk:
        job.take(Published(5, "five"))
    for compared in digests:
        job.commit(compared)
    planned = job.mismatch(**found)
    resume = planned.resume
    assert (resume.action, resume.committed, bool(resume.healed)) == expected
    assert words in planned.reason
    assert any(words in line.text for line in job.of(Say)), "nobody is told"


def test_nothing_to_go_back_to_stops_the_run_with_words(make_job: Callable[..., Job]) -> None:
    """Catches a run that goes on with bits that may be wrong, in silence."""
    job = make_job(0)
    job.commit(False)
    with pytest.raises(IndexError):
        job.mismatch(unclear=PAIR)
    assert job.state.stage is Stage.FINISHED
    assert any("no majority says who is wrong" in str(action) for action in job.actions)


def test_a_copy_of_wrong_bits_does_not_count_after_they_are_healed(make_job: Callable[..., Job]) -> None:
    """Catches the copy that was made of the step at which bits were wrong: its digest was good after the heal only."""
    job = make_job()
    for _ in range(3):
        job.commit()
    assert {6, 7} <= job.state.compared
    job.mismatch(WRONG)
    assert 8 not in job.state.compared
    job.recover()
    assert job.state.clean == 8


def test_who_is_wrong_again_and_again_leaves(make_job: Callable[..., Job]) -> None:
    """Catches a broken device that is healed for ever, and one that leaves without a word."""
    job = make_job()
    for time in range(3):
        assert job.state.devices["1:1"].standing is Standing.ACTIVE
        planned = job.mismatch(WRONG)
        assert planned.resume.healed == ("1:1",)
        job.recover()
        if time < 2:
            job.commit()
    assert job.state.devices["1:1"].standing is Standing.DRAINING
    assert any("1:1 is unreliable: its bits were wrong 3 times" in line.text for line in job.of(Say))
    assert [note.event.device for note in job.of(Note) if note.event.event == "drain"] == ["1:1"]
    prepares = [send.order for send in job.of(Send) if isinstance(send.order, orders.Prepare)]
    assert prepares, "its leave is not prepared"
    assert job.state.growth is not None
    assert job.state.growth.leaving == ("1:1",)


def test_a_loss_while_a_device_is_healed_does_not_make_it_a_source(make_job: Callable[..., Job]) -> None:
    """Catches wrong bits that spread because the good holder died in between."""
    job = make_job()
    job.mismatch(WRONG)
    job.hear("0:0", messages.Exited, code=-9)
    for device in DEVICES[1:]:
        fields = {"committed": 5, "complete": False, "holds": 0, "memory": ()}
        job.hear(device, messages.Status, generation=job.state.generation, **fields)
    resume = job.of(Planned)[-1].resume
    assert resume.healed == ("1:1",)
    heads = [move for move in resume.transfers if move.kind == "head" and move.start <= 3 < move.stop]
    assert heads
    assert "1:1" not in {move.source for move in heads}


def test_limits_say_when_digests_guard_checkpoints() -> None:
    """Catches a default that trusts checkpoints which nobody has compared."""
    assert Limits().digest_every == 0
