import pytest
from hypothesis import given
from hypothesis import strategies as st

from runflat.plan.batch import BatchRule, split_batch
from runflat.power.curve import exponent_curve
from runflat.power.reach import PowerLimits
from runflat.sim.rates import RateTable, ReplicaClass, split_by_class
from runflat.sim.times import Line, ProportionalTimes

CLASSES = st.lists(st.tuples(st.integers(1, 40), st.integers(8, 64)), min_size=1, max_size=5)


@given(CLASSES, st.integers(1, 400))
def test_the_split_by_class_is_the_split_of_the_plan(classes: list[tuple[int, int]], total: int) -> None:
    """Catches the simulator's fast split drifting from the one that the runtime uses."""
    seconds = [pace / 8 for num, pace in classes for _ in range(num)]
    counts = split_batch(total, seconds)
    wanted_s = max(count * pace for count, pace in zip(counts, seconds, strict=True))
    lines = [Line(0.0, pace / 8) for _, pace in classes]
    nums = [num for num, _ in classes]
    step_s, shares = split_by_class(total, lines, nums)
    assert step_s == pytest.approx(wanted_s, rel=1e-12)
    assert sum(share * num for share, num in zip(shares, nums, strict=True)) == pytest.approx(total)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=3),
    st.integers(1, 12),
)
def test_with_a_fixed_part_the_split_is_still_the_best(classes: list[tuple[int, int, int]], total: int) -> None:
    """Catches a split that leaves a better one unused when replicas have a pipeline to fill: against brute force."""
    lines = [Line(float(fixed), float(each)) for _, fixed, each in classes]
    nums = [num for num, _, _ in classes]
    step_s, _ = split_by_class(total, lines, nums)
    candidates = sorted({line.at(count) for line in lines for count in range(1, total + 1)})
    best_s = next(t for t in candidates if sum(n * line.most(t) for n, line in zip(nums, lines, strict=True)) >= total)
    assert step_s == pytest.approx(best_s)


TIMES = ProportionalTimes(step_s=15.0, tp_full=32, local_batch=8, pp=8, degrees=(30, 28))
LIMITS = PowerLimits(curve=exponent_curve(0.65), tdp_w=1000, nominal_w=1000, max_w=1300)


def table(rule: BatchRule, *, boost: bool = False) -> RateTable:
    """Rates of a job of 10 replicas of the paper's shape."""
    return RateTable(TIMES, tp_full=32, num_sequences=80, local_batch=8, rule=rule, power=LIMITS, boost=boost)


HEALTHY = ReplicaClass(9, 0, ((0, 72),))
ONE_HIT = ReplicaClass(1, 1, ((1, 1), (0, 7)))


def test_whole_sequences_decide_what_a_hit_replica_does() -> None:
    """Catches fractional sequences: TP 30 of 32 with a pipeline does 7 of 8, TP 28 does 6."""
    flexible = table(BatchRule.FLEXIBLE)
    rates = flexible.rates([HEALTHY, ONE_HIT])
    assert (rates.sequences, rates.step_s) == (79, 15.0)
    assert flexible.rates([HEALTHY, ReplicaClass(1, 3, ((3, 8),))]).sequences == 78
    assert rates.num_reduced == 1


def test_a_constant_batch_lengthens_the_step() -> None:
    """Catches a constant batch that shrinks: 80 sequences must be done, so somebody does 9 or the hit one is late."""
    rates = table(BatchRule.CONSTANT).rates([HEALTHY, ONE_HIT])
    assert rates.sequences == 80
    assert rates.step_s == pytest.approx(min(16.0, 15 * 32 / 30))


def test_a_capped_job_pauses_below_the_target() -> None:
    """Catches a fixed batch that is quietly reduced."""
    rates = table(BatchRule.CAPPED).rates([HEALTHY, ONE_HIT])
    assert (rates.sequences, rates.capacity) == (0, 79)
    assert table(BatchRule.CAPPED).rates([ReplicaClass(10, 0, ((0, 80),)), ONE_HIT]).sequences == 80


def test_boost_hides_what_power_allows_and_is_billed() -> None:
    """Catches a free boost, or one that speeds up healthy replicas too."""
    plain, boosted = (table(BatchRule.FLEXIBLE, boost=b).rates([HEALTHY, ONE_HIT]) for b in (False, True))
    assert (plain.sequences, boosted.sequences) == (79, 80)
    assert boosted.boosted == 31
    assert plain.boosted == 0
    assert boosted.watts > plain.watts
    extra_w = boosted.watts - 1000 * (9 * 256 + 255)
    assert extra_w == pytest.approx(31 * 1000 * ((32 / 30) ** (1 / 0.65) - 1), rel=1e-6)


def test_power_that_buys_no_whole_sequence_is_not_spent() -> None:
    """Catches watts for a replica that would only wait: 1.05x speed is too little for an eighth sequence at TP 30."""
    limits = PowerLimits(curve=exponent_curve(0.65), tdp_w=1000, nominal_w=1000, max_w=1050)
    boosted = RateTable(
        TIMES, tp_full=32, num_sequences=80, local_batch=8, rule=BatchRule.FLEXIBLE, power=limits, boost=True
    )
    rates = boosted.rates([HEALTHY, ONE_HIT])
    assert (rates.sequences, rates.boosted) == (79, 0)
    assert rates.watts < 1000 * (9 * 256 + 255)


def test_waiting_is_the_rest_of_working() -> None:
    """Catches busy devices that exceed those that are there, or waiting that is lost."""
    rates = table(BatchRule.FLEXIBLE).rates([HEALTHY, ONE_HIT])
    assert rates.working == 9 * 256 + 255
    hit_share = 14 / 15 * 32 / 30
    assert rates.busy == pytest.approx(9 * 256 + 31 * hit_share + 7 * 32 * 14 / 15)


def test_nothing_left_is_no_rate_and_no_error() -> None:
    """Catches a division by zero when the last replica has gone."""
    rates = table(BatchRule.CONSTANT).rates([])
    assert (rates.sequences_per_s, rates.working) == (0.0, 0.0)


def test_uneven_heads_slow_the_most_loaded_device() -> None:
    """Catches units that are treated as divisible: 64 heads over 7 devices leave one with 10 instead of 8."""
    times = ProportionalTimes(step_s=1.0, tp_full=8, local_batch=1, units=((0.25, 64),))
    line = times.line(1)
    assert line is not None
    assert line.at(1) == pytest.approx(0.75 * 8 / 7 + 0.25 * 10 / 8)
    assert times.line(8) is None
