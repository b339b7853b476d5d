import numpy as np
import pytest
from pydantic import ValidationError

from runflat.traces.describe import describe
from runflat.traces.generate import (
    LLAMA3_DEVICE_DAYS,
    LLAMA3_TABLE,
    Component,
    FailureSource,
    Repair,
    hardware_software,
    llama3_components,
    source_like,
)
from runflat.traces.trace import DAY_S, FailureTrace, build_trace


def draw(source: FailureSource, *, num_devices: int = 800, days: float = 400.0, domain: int = 8) -> FailureTrace:
    """A trace with a fixed seed."""
    rng = np.random.default_rng(5)
    return source.generate(num_devices=num_devices, days=days, domain_size=domain, rng=rng)


def one(**changes: object) -> FailureSource:
    """A source of one component with about 1,600 failures in the default draw, with changes."""
    component = {"name": "GPU", "per_device_day": 5e-3, "repair": Repair(hours=24)}
    fields = {key: changes.pop(key) for key in ("repair", "blast", "blast_share") if key in changes}
    return FailureSource(components=(Component(**{**component, **fields}),), **changes)  # type: ignore[arg-type]  # fields by name


def test_llama3_table_is_the_published_one() -> None:
    """Catches a typing error in the table: 419 interruptions, 268 of GPUs and their parts."""
    assert sum(count for _, count, _, _ in LLAMA3_TABLE) == 419
    gpu = [count for name, count, _, _ in LLAMA3_TABLE if "GPU" in name or name == "silent data corruption"]
    assert sum(gpu) == 268
    source = FailureSource(components=llama3_components(hardware=Repair(hours=120), software=Repair(hours=3)))
    assert source.per_device_day * 16_384 * 54 == pytest.approx(419)
    assert 24 / (source.per_device_day * 16_384) == pytest.approx(3.09, abs=0.01)


def test_poisson_failures_have_the_rate_and_the_spread_of_chance() -> None:
    """Catches a rate that is off, or arrivals that are too regular."""
    facts = describe(draw(one()))
    assert facts.num_incidents == pytest.approx(5e-3 * 800 * 400, abs=4 * 40)
    assert facts.gap_cv == pytest.approx(1.0, abs=0.1)
    assert facts.repair_mean_h == pytest.approx(24)


def test_same_seed_same_trace() -> None:
    """Catches hidden state: the bits must be equal."""
    source = one(burst_shape=0.62, weak_node_shape=0.9, blast=8, blast_share=0.1)
    first, second = draw(source), draw(source)
    for name in ("time_s", "duration_s", "device", "cause", "incident"):
        assert np.array_equal(getattr(first, name), getattr(second, name))


def test_bursts_and_weak_nodes_look_like_the_recorded_trace() -> None:
    """Catches generators that lose burstiness (variation 1.76) or weak nodes (41 % on the worst tenth)."""
    source = FailureSource(
        components=(Component(name="node", per_device_day=4.18e-3, repair=Repair(hours=1)),),
        burst_shape=0.62,
        weak_node_shape=0.9,
        node_size=1,
    )
    facts = [
        describe(source.generate(num_devices=400, days=345, domain_size=1, rng=np.random.default_rng(seed)))
        for seed in range(12)
    ]
    assert np.mean([f.gap_cv for f in facts]) == pytest.approx(1.7, abs=0.15)
    assert np.mean([f.top_tenth_share for f in facts]) == pytest.approx(0.41, abs=0.04)
    assert np.mean([f.num_never_hit for f in facts]) == pytest.approx(169, abs=15)
    assert np.mean([f.num_incidents for f in facts]) == pytest.approx(577, rel=0.1)


@pytest.mark.parametrize(
    ("repair", "median_h", "mean_h"),
    [
        (Repair(hours=5), 5, 5),
        (Repair(kind="exponential", hours=10), 6.93, 10),
        (Repair(kind="lognormal", hours=15, shape=1.0), 15, 24.7),
        (Repair(kind="weibull", hours=50.7, shape=0.451), 22.5, 126),
        (Repair(kind="empirical", values_h=(1.0, 2.0, 9.0)), 2, 4),
    ],
)
def test_repair_times_have_their_median_and_mean(repair: Repair, median_h: float, mean_h: float) -> None:
    """Catches mixed up parameters (median for mean, scale for mean) and hours for seconds."""
    hours = repair.sample_s(np.random.default_rng(0), 200_000) / 3600
    assert np.median(hours) == pytest.approx(median_h, rel=0.03)
    assert hours.mean() == pytest.approx(mean_h, rel=0.05)
    assert repair.mean_h == pytest.approx(mean_h, rel=0.03)


@pytest.mark.parametrize(("blast", "width"), [(8, 8), (0, 16), (64, 64)])
def test_a_blast_takes_an_aligned_block_at_one_time(blast: int, width: int) -> None:
    """Catches a blast that straddles two domains, or whose devices do not fail and return together."""
    trace = draw(one(blast=blast, blast_share=0.5), num_devices=768, domain=16)
    for incident in np.unique(trace.incident)[:200]:
        rows = trace.incident == incident
        devices = trace.device[rows]
        assert len(devices) in (1, width)
        if len(devices) == width:
            assert devices[0] % width == 0
            assert np.array_equal(devices, np.arange(devices[0], devices[0] + width))
        assert len(np.unique(trace.time_s[rows])) == len(np.unique(trace.duration_s[rows])) == 1


def test_steady_start_has_devices_down_at_time_zero() -> None:
    """Catches a burn-in that is lost, or repairs that start anew at time 0."""
    source = one(repair=Repair(hours=240), start="steady", burn_in_days=10)
    trace = draw(source, days=30)
    expected = 5e-3 * 800 * 10
    early = trace.time_s == 0
    assert early.sum() == pytest.approx(expected, abs=4 * expected**0.5)
    assert trace.duration_s[early].max() <= 240 * 3600
    assert trace.duration_s[early].mean() == pytest.approx(120 * 3600, rel=0.3)
    assert (draw(one(repair=Repair(hours=240)), days=30).time_s > 0).all()


def test_no_rate_means_no_failure() -> None:
    """Catches a division by a rate of zero."""
    assert len(draw(one(rate_scale=0.0))) == 0


def test_a_source_like_a_trace_keeps_its_rate_and_mean_repair() -> None:
    """Catches a resampled source that counts outages without end, or other days."""
    rows = [(day * DAY_S, 3600.0 * (1 + day), day % 4, "x") for day in range(20)]
    recorded = build_trace(rows, num_devices=4, span_s=20 * DAY_S)
    for repair in ("empirical", "exponential"):
        source = source_like(recorded, repair=repair)  # type: ignore[arg-type]  # both words are allowed
        assert source.per_device_day == pytest.approx(0.25)
        assert source.mean_repair_h == pytest.approx(10.5)


def test_impossible_sources_are_refused() -> None:
    """Catches a configuration that would be read as something else."""
    with pytest.raises(ValidationError, match="values_h"):
        Repair(kind="empirical")
    with pytest.raises(ValidationError):
        FailureSource(components=())
    with pytest.raises(ValidationError):
        Repair.model_validate({"kind": "fixed", "hourz": 3})


def test_published_rate_splits_into_hardware_and_software() -> None:
    """Catches the 78/22 split applied twice or not at all."""
    source = FailureSource(components=hardware_software(419, LLAMA3_DEVICE_DAYS, hardware_h=120))
    assert source.per_device_day == pytest.approx(4.736e-4, rel=1e-3)
    assert source.mean_repair_h == pytest.approx(0.78 * 120 + 0.22 * 3)
