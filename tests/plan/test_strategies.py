import pytest
from hypothesis import given
from hypothesis import strategies as st

from runflat.cluster.health import Health
from runflat.errors import ConfigError
from runflat.plan.batch import BatchRule, share_batch
from runflat.plan.strategies import (
    Decision,
    Hit,
    JobFacts,
    Place,
    Strategy,
    choose,
    decide,
    parse_chain,
    reduced_degree,
)

FULL = parse_chain("spare,ntp,drop,restart")


def healthy(dp: int, tp: int, spares: int = 0) -> tuple[Health, dict[Place, str]]:
    """Health and placement of a fresh job."""
    placement = {(replica, slot): f"{replica}:{slot}" for replica in range(dp) for slot in range(tp)}
    return Health((*placement.values(), *(f"s{number}" for number in range(spares)))), placement


def test_chains_are_read_and_bad_ones_named() -> None:
    """Catches a mistyped strategy that silently does nothing."""
    assert parse_chain(" spare, ntp") == (Strategy.SPARE, Strategy.NTP)
    with pytest.raises(ConfigError, match=r"'ntpp'.*spare, ntp, drop, restart"):
        parse_chain("ntpp,drop")
    with pytest.raises(ConfigError, match="twice"):
        parse_chain("ntp,ntp")
    with pytest.raises(ConfigError, match="empty"):
        parse_chain(",")


@pytest.mark.parametrize(
    ("lost", "degrees", "wanted"),
    [(0, (30, 28), 32), (1, (30, 28), 30), (3, (30, 28), 28), (5, (30, 28), 0), (5, (), 27)],
)
def test_degrees_that_the_job_allows(lost: int, degrees: tuple[int, ...], wanted: int) -> None:
    """Catches a degree that the job has no shards for."""
    assert reduced_degree(32, lost, degrees) == wanted


def hit(**changes: object) -> Hit:
    """A hit that every link can handle, with changes."""
    values: dict[str, object] = {"tp_full": 4, "degree": 3, "num_dead": 1, "num_free_spares": 1} | changes
    return Hit(**values)  # type: ignore[arg-type]  # the table below writes fields by name


@pytest.mark.parametrize(
    ("changes", "link", "num_spares", "words"),
    [
        ({}, Strategy.SPARE, 1, []),
        ({"num_free_spares": 0}, Strategy.NTP, 0, ["spare: 1 dead, but 0 free"]),
        ({"num_dead": 2, "degree": 2}, Strategy.NTP, 1, ["spare: 2 dead, but 1 free"]),
        ({"num_free_spares": 0, "fits_memory": False}, Strategy.DROP, 0, ["spare", "memory at TP 3"]),
        ({"num_free_spares": 0, "degree": 0}, Strategy.DROP, 0, ["spare", "no usable degree"]),
        ({"has_holders": False}, Strategy.DROP, 0, ["no live holder", "no live holder"]),
        ({"has_holders": False, "num_others": 0}, Strategy.RESTART, 0, ["holder", "holder", "no other replica"]),
        ({"has_holders": False, "num_others": 0, "num_full": 0}, None, 0, ["", "", "", "no full replica"]),
        ({"has_holders": False, "num_others": 0, "has_checkpoint": False}, None, 0, ["", "", "", "no checkpoint"]),
    ],
)
def test_first_link_that_can_handles_it_and_the_others_say_why(
    changes: dict[str, object], link: Strategy | None, num_spares: int, words: list[str]
) -> None:
    """Catches a link that is skipped without a word, or taken although it cannot work."""
    choice = choose(FULL, hit(**changes))
    assert (choice.strategy, choice.num_spares) == (link, num_spares)
    assert len(choice.words) == len(words)
    for said, wanted in zip(choice.words, words, strict=True):
        assert wanted in said


def test_a_loss_lowers_one_replica_and_its_return_restores_the_plan() -> None:
    """Catches a decision that does not come back to where it was."""
    health, placement = healthy(2, 4)
    job = JobFacts(num_replicas=2, tp_full=4, num_sequences=14)
    chain = parse_chain("ntp,drop")
    before = decide(job, health, chain, placement=placement)
    lower = decide(job, health.without(["1:2"]), chain, placement=placement, previous=before)
    assert lower.strategy is Strategy.NTP
    assert dict(lower.shares) == {0: 8, 1: 6}
    assert (1, 2) not in dict(lower.devices)
    assert decide(job, health, chain, placement=placement, previous=lower) == before


def test_a_spare_takes_the_slot_and_the_returning_device_becomes_a_spare() -> None:
    """Catches a spare that is used twice or a returned device that stays unused."""
    health, placement = healthy(2, 2, spares=1)
    job = JobFacts(num_replicas=2, tp_full=2, num_sequences=4)
    first = decide(job, health.without(["0:1"]), FULL, placement=placement)
    assert first.strategy is Strategy.SPARE
    assert dict(first.devices)[(0, 1)] == "s0"
    both = decide(job, health.without(["0:1", "1:0"]), FULL, placement=placement, previous=first)
    assert both.strategy is Strategy.NTP
    assert "spare: 1 dead, but 0 free" in both.words[0]
    back = decide(job, health.without(["1:0"]), FULL, placement=placement, previous=both)
    assert back.strategy is Strategy.SPARE
    assert dict(back.devices)[(1, 0)] == "0:1"


def test_a_dropped_replica_is_idle_and_rejoins() -> None:
    """Catches devices of a dropped replica that go on, or that never come back."""
    health, placement = healthy(3, 2)
    job = JobFacts(num_replicas=3, tp_full=2, num_sequences=6)
    chain = parse_chain("drop,restart")
    out = decide(job, health.without(["2:0"]), chain, placement=placement)
    assert dict(out.shares) == {0: 3, 1: 3}
    assert out.left == ((2, Strategy.DROP),)
    assert out.idle == ("2:1",)
    assert len(decide(job, health, chain, placement=placement, previous=out).shares) == 3


def test_after_a_restart_a_returned_device_waits_for_the_next_one() -> None:
    """Catches a replica that walks into a job which started without it."""
    health, placement = healthy(3, 2)
    job = JobFacts(num_replicas=3, tp_full=2, num_sequences=6)
    chain = parse_chain("restart")
    first = decide(job, health.without(["0:0"]), chain, placement=placement)
    assert first.strategy is Strategy.RESTART
    assert set(dict(first.shares)) == {1, 2}
    waits = decide(job, health, chain, placement=placement, previous=first)
    assert waits.strategy is None
    assert set(dict(waits.shares)) == {1, 2}
    second = decide(job, health.without(["2:1"]), chain, placement=placement, previous=waits)
    assert set(dict(second.shares)) == {0, 1}


def test_nothing_left_says_stop() -> None:
    """Catches an endless wait when no link can help."""
    health, placement = healthy(1, 2)
    job = JobFacts(num_replicas=1, tp_full=2, num_sequences=2)
    end = decide(job, health.without(["0:0", "0:1"]), parse_chain("ntp,drop,restart"), placement=placement)
    assert end.stop
    assert len(end.words) == 3


def test_a_pipeline_counts_its_most_hit_stage() -> None:
    """Catches dead slots of different stages added up as if they were one group."""
    health, placement = healthy(2, 4)
    job = JobFacts(num_replicas=2, tp_full=2, pp=2, num_sequences=4)
    two_stages = decide(job, health.without(["0:0", "0:2"]), parse_chain("ntp"), placement=placement)
    assert two_stages.strategy is Strategy.NTP
    one_stage = decide(job, health.without(["0:0", "0:1"]), parse_chain("ntp,drop"), placement=placement)
    assert one_stage.strategy is Strategy.DROP


@pytest.mark.parametrize(
    ("rule", "cap", "seconds", "shares", "paused"),
    [
        (BatchRule.CONSTANT, None, (1.0, 4 / 3), (9, 7), False),
        (BatchRule.FLEXIBLE, None, (1.0, 4 / 3), (8, 6), False),
        (BatchRule.CAPPED, None, (1.0, 4 / 3), (8, 6), True),
        (BatchRule.CAPPED, 10, (1.0, 4 / 3), (9, 7), False),
        (BatchRule.CAPPED, 10, (1.0, 2.0), (10, 5), True),
        (BatchRule.FLEXIBLE, None, (1.0, 1.0), (8, 8), False),
        (BatchRule.FLEXIBLE, 1, (2.0, 4 / 3), (0, 1), False),
    ],
)
def test_batch_rules(
    rule: BatchRule, cap: int | None, seconds: tuple[float, ...], shares: tuple[int, ...], paused: bool
) -> None:
    """Catches a rule that changes the batch when it may not, or that never pauses."""
    assert share_batch(rule, 16, 8 if cap is None else cap, seconds, 1.0) == (shares, paused)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=12), st.integers(0, 2))
def test_every_sequence_is_given_out_once_and_no_device_works_twice(dead: list[tuple[int, int]], spares: int) -> None:
    """Catches lost or doubled sequences, and a device seated in two places, after any losses one by one."""
    health, placement = healthy(4, 3, spares)
    job = JobFacts(num_replicas=4, tp_full=3, num_sequences=13)
    decision: Decision | None = None
    for replica, slot in dead:
        health = health.without([f"{replica}:{slot}"])
        decision = decide(job, health, FULL, placement=placement, previous=decision)
        if not decision.stop:
            assert sum(share for _, share in decision.shares) == 13
        working = [device for _, device in decision.devices]
        assert len(set(working)) == len(working)
        assert set(working) <= set(health.live)
        assert sorted([*working, *decision.idle]) == sorted(health.live)


def test_two_losses_at_once_take_two_different_spares() -> None:
    """Catches one spare that is seated in two slots."""
    health, placement = healthy(2, 2, spares=2)
    job = JobFacts(num_replicas=2, tp_full=2, num_sequences=4)
    both = decide(job, health.without(["0:1", "1:0"]), FULL, placement=placement)
    assert (dict(both.devices)[(0, 1)], dict(both.devices)[(1, 0)]) == ("s0", "s1")


def test_no_replica_spans_domains() -> None:
    """Catches a spare of another node in a hit replica, and a whole replica that does not move to a spare node."""
    placement = {(r, slot): f"{r}:{slot}" for r in range(2) for slot in range(2)}
    spares = ("s0", "s1", "s2")
    domains = {"0:0": "a", "0:1": "a", "1:0": "b", "1:1": "b", "s0": "a", "s1": "c", "s2": "c"}
    job = JobFacts(num_replicas=2, tp_full=2, num_sequences=8)
    health = Health((*placement.values(), *spares))

    def seats(*dead: str) -> dict[Place, str]:
        return dict(decide(job, health.without(dead), FULL, placement=placement, domains=domains).devices)

    assert seats("0:1")[(0, 1)] == "s0"
    assert (1, 1) not in seats("1:1")
    moved = decide(job, health.without(["1:0", "1:1"]), FULL, placement=placement, domains=domains)
    assert {device for place, device in moved.devices if place[0] == 1} == {"s1", "s2"}
    back = decide(job, health.without(["s1"]), FULL, placement=placement, domains=domains, previous=moved)
    assert {device for place, device in back.devices if place[0] == 1} == {"s2"}, "1:0 and 1:1 are on another node"
    one_left = seats("1:0", "1:1", "s1")
    assert {place[0] for place in one_left} == {0}
    assert decide(job, health.without(["1:1"]), FULL, placement=placement).devices[3][1] == "s0", "without domains"
