"""Single incidents whose cost can be worked out by hand."""

import math

import pytest

from runflat.cluster.events import parse_events
from runflat.cluster.ledger import Category
from runflat.errors import TraceError
from runflat.plan.batch import BatchRule
from runflat.plan.strategies import Strategy
from runflat.sim.config import ClusterConfig, JobConfig, RecoveryConfig, SimConfig
from runflat.sim.experiment import build_job, run_all, simulate
from runflat.sim.replay import replay
from runflat.traces.generate import Component, FailureSource
from runflat.traces.trace import DAY_S, build_trace

SOURCE = FailureSource(components=(Component(name="none", per_device_day=0.0),))


def config(**changes: object) -> SimConfig:
    """Two replicas of TP 4 with seven sequences each, one second a sequence, one day."""
    values: dict[str, object] = {
        "job": JobConfig(tp=4, dp=2, local_batch=7, step_s=7),
        "cluster": ClusterConfig(domain_size=4),
        "failures": SOURCE,
        "recovery": RecoveryConfig(detect_s=2, reform_s=3, transfer_s=1, join_s=0.5, checkpoint_save_s=0),
        "repack": False,
        "days": 1.0,
    }
    return SimConfig.model_validate(values | changes)


def test_a_loss_costs_its_phases_and_the_step_in_flight() -> None:
    """Catches a phase booked on too many devices, a step that is lost twice, or a rate that does not change."""
    trace = build_trace([(703.0, math.inf, 5, "x")], num_devices=8, span_s=DAY_S)
    totals = simulate(config(), "ntp", trace)
    ledger = totals.ledger
    # 100 steps of 7 s, then 3 s of a step that is discarded; seven survivors wait 2 + 3 + 1 s; then 8 s a step (8 + 6).
    assert ledger.device_s[Category.DETECT] == pytest.approx(7 * 2)
    assert ledger.device_s[Category.REFORM] == pytest.approx(7 * 3)
    assert ledger.device_s[Category.TRANSFER] == pytest.approx(7 * 1)
    assert ledger.device_s[Category.REPLAY] == pytest.approx(8 * 3)
    assert ledger.device_s[Category.FAILED] == pytest.approx(DAY_S - 703)
    assert totals.sequences == pytest.approx(14 * (100 + (DAY_S - 709) / 8))
    assert totals.incidents == {"ntp": 1}


def test_a_restart_falls_back_to_the_checkpoint() -> None:
    """Catches work since the newest checkpoint that is kept, or all work that is thrown away."""
    costs = RecoveryConfig(detect_s=10, restart_s=90, checkpoint_interval_s=70.0, checkpoint_save_s=5)
    trace = build_trace([(750.0 + 28, math.inf, 5, "x")], num_devices=8, span_s=DAY_S)
    totals = simulate(config(recovery=costs), "restart", trace)
    # Ten cycles of 75 s, then 28 s of work that is lost; afterwards one replica does all 14 sequences in 14 s a step.
    assert totals.ledger.device_s[Category.REPLAY] == pytest.approx(8 * 28)
    assert totals.ledger.device_s[Category.RESTART] == pytest.approx(4 * 90)
    left_s = DAY_S - 878
    running_s = left_s // 75 * 70 + min(left_s % 75, 70)
    assert totals.sequences == pytest.approx(14 * 100 + running_s)
    idle = totals.ledger.device_s[Category.IDLE]
    assert idle == pytest.approx(3 * (DAY_S - 778))


def test_a_restart_falls_back_to_the_newest_copy_in_memory() -> None:
    """Catches a prediction that goes back to the start, and copies counted by seconds where the rate has changed."""
    events = parse_events("""[{"event": "kill", "device": "1:2", "step": 10, "phase": "commit"},
                              {"event": "kill", "device": "0:1", "step": 17, "phase": "commit"}]""")
    costs = RecoveryConfig(detect_s=1, restart_s=4, copy_every=5, checkpoint_save_s=0)
    three = JobConfig(tp=4, dp=3, local_batch=8, step_s=8)
    asked = config(job=three, recovery=costs)
    result = replay(asked, "restart", events, num_steps=20)
    # One step is repeated from the copy of step 10, three from that of step 15, at half and a third of the rate.
    healthy_s = 8.0
    assert result.wall_s == pytest.approx(11 * healthy_s + 5 + 8 * healthy_s * 1.5 + 5 + 5 * healthy_s * 3)
    replayed_s = healthy_s * 12 + 3 * healthy_s * 1.5 * 8
    assert result.totals.ledger.device_s[Category.REPLAY] == pytest.approx(replayed_s)


def test_a_second_fault_during_recovery_starts_it_again() -> None:
    """Catches two recoveries that add up, or a second fault that costs nothing."""
    rows = [(700.0, math.inf, 5, "x"), (704.0, math.inf, 1, "x")]
    totals = simulate(config(), "ntp", build_trace(rows, num_devices=8, span_s=DAY_S))
    assert totals.ledger.device_s[Category.DETECT] == pytest.approx(7 * 2 + 6 * 2)
    assert totals.ledger.device_s[Category.REFORM] == pytest.approx(7 * 2 + 6 * 3)
    assert totals.ledger.device_s[Category.TRANSFER] == pytest.approx(6 * 1)


def test_a_restarting_job_that_is_hit_restarts_again() -> None:
    """Catches a restart that a small second fault turns into something cheap."""
    costs = RecoveryConfig(detect_s=10, restart_s=100, checkpoint_save_s=0, checkpoint_interval_s=1e9)
    question = config(recovery=costs, job=JobConfig(tp=4, dp=3, local_batch=4, step_s=4))
    rows = [(400.0, math.inf, 5, "x"), (450.0, math.inf, 1, "x")]
    totals = simulate(question, "restart", build_trace(rows, num_devices=12, span_s=DAY_S))
    assert totals.ledger.device_s[Category.RESTART] == pytest.approx(8 * 40 + 4 * 100)


def test_a_small_fault_during_a_restart_restarts_again() -> None:
    """Catches a restart that a fault with a cheaper recovery cuts short."""
    costs = RecoveryConfig(
        detect_s=10, reform_s=1, transfer_s=1, restart_s=100, checkpoint_save_s=0, checkpoint_interval_s=1e9
    )
    question = config(recovery=costs, job=JobConfig(tp=4, dp=3, local_batch=4, step_s=4))
    # A whole group goes, which ntp cannot handle; then one device of another, which it could.
    rows = [*((400.0, math.inf, device, "x") for device in range(4)), (450.0, math.inf, 5, "x")]
    trace = build_trace(rows, num_devices=12, span_s=DAY_S, incidents=[0, 0, 0, 0, 1])
    totals = simulate(question, "ntp,restart", trace)
    assert totals.incidents == {"restart": 1, "ntp": 1}
    assert totals.ledger.device_s[Category.RESTART] == pytest.approx(8 * 40 + 7 * 100)
    assert totals.ledger.device_s[Category.REFORM] == 0


def test_goodput_counts_spares_and_throughput_does_not() -> None:
    """Catches spares that look free: with one of nine devices idle goodput is at most 8/9."""
    held = config(cluster=ClusterConfig(domain_size=4, spare_devices=1), strategies=("spare,ntp",), seeds=1)
    (result,) = run_all(held)
    assert result.throughput.mean == pytest.approx(1.0)
    assert result.goodput.mean == pytest.approx(8 / 9)
    assert result.ledger.share(Category.IDLE) == pytest.approx(1 / 9)


def test_a_capped_job_pauses_and_resumes() -> None:
    """Catches a pause that is not booked or does not end."""
    trace = build_trace([(700.0, 1000.0, 5, "x")], num_devices=8, span_s=DAY_S)
    free = RecoveryConfig(detect_s=0, reform_s=0, transfer_s=0, join_s=0, checkpoint_save_s=0)
    totals = simulate(config(rule=BatchRule.CAPPED, recovery=free), "ntp", trace)
    assert totals.ledger.device_s[Category.PAUSE] == pytest.approx(7 * 1000)
    assert totals.pauses == 1
    assert totals.sequences == pytest.approx(14 * (DAY_S - 1000) / 7)


def test_warm_up_delays_the_return_and_a_spare_takes_over_at_once() -> None:
    """Catches a device that joins before it can, and a spare that costs a degree."""
    trace = build_trace([(700.0, 1000.0, 5, "x")], num_devices=9, span_s=DAY_S)
    costs = RecoveryConfig(detect_s=0, reform_s=0, transfer_s=0, join_s=0, checkpoint_save_s=0, warm_up_s=400)
    late = simulate(config(recovery=costs), "ntp", trace)
    assert late.ledger.device_s[Category.FAILED] == pytest.approx(1400)
    spare = simulate(config(recovery=costs, cluster=ClusterConfig(domain_size=4, spare_devices=1)), "spare,ntp", trace)
    assert spare.sequences == pytest.approx(14 * DAY_S / 7)
    assert spare.incidents == {"spare": 1}


def test_start_and_devices_down_at_time_zero_cost_no_incident() -> None:
    """Catches a job that recovers from failures which were there before it."""
    trace = build_trace([(0.0, math.inf, 5, "x")], num_devices=8, span_s=DAY_S)
    costs = RecoveryConfig(start_s=100, checkpoint_save_s=0)
    totals = simulate(config(recovery=costs), "ntp", trace)
    assert not totals.incidents
    assert totals.ledger.device_s[Category.START] == pytest.approx(7 * 100)


INJECTED = """[{"event": "kill", "device": "1:2", "step": 4, "phase": "backward"},
               {"event": "return", "device": "1:2", "step": 8}]"""


def test_a_replay_predicts_an_injected_run() -> None:
    """Catches a prediction whose wall time, replayed part or decisions differ from what is worked out by hand."""
    result = replay(config(), "ntp,drop", parse_events(INJECTED), num_steps=10)
    # Four steps of 7 s, two thirds of a fifth discarded, 6 s of recovery, four steps of 8 s, 0.5 s to join, two of 7 s.
    assert result.wall_s == pytest.approx(28 + 14 / 3 + 6 + 32 + 0.5 + 14)
    assert result.goodput == pytest.approx(70 / result.wall_s)
    assert result.totals.ledger.device_s[Category.REPLAY] == pytest.approx(8 * 14 / 3)
    (at_loss, loss), (at_return, back) = result.decisions
    assert (at_loss, at_return) == (pytest.approx(4), pytest.approx(8))
    assert loss.strategy is Strategy.NTP
    assert dict(loss.shares) == {0: 8, 1: 6}
    assert dict(back.shares) == {0: 7, 1: 7}


def test_what_a_run_recorded_of_an_injected_loss_is_no_second_loss() -> None:
    """Catches a device that fails twice because its kill and its failure both stand in the run's file."""
    kill, back = parse_events(INJECTED)
    (seen,) = parse_events('{"event": "fail", "device": "1:2", "time_s": 32.7}')
    once = replay(config(), "ntp,drop", (kill, back), num_steps=10)
    assert replay(config(), "ntp,drop", (kill, seen, back), num_steps=10).wall_s == once.wall_s


def test_a_commit_phase_loses_nothing() -> None:
    """Catches a step that is repeated although somebody had committed it."""
    events = parse_events('{"event": "kill", "device": "0:0", "step": 4, "phase": "commit"}')
    result = replay(config(), "ntp", events, num_steps=6)
    assert result.totals.ledger.device_s[Category.REPLAY] == 0
    assert result.wall_s == pytest.approx(35 + 6 + 8)


def test_a_replay_agrees_with_the_plans_rates_at_every_event() -> None:
    """Catches the simulator's rates drifting from the decision that the runtime takes."""
    text = "\n".join(
        f'{{"event": "kill", "device": "{replica}:{slot}", "step": {step}}}'
        for step, (replica, slot) in enumerate([(0, 0), (1, 3), (0, 1), (2, 2), (0, 2), (0, 3)], start=1)
    )
    question = config(job=JobConfig(tp=4, dp=3, local_batch=7, step_s=7))
    result = replay(question, "ntp,drop", parse_events(text), num_steps=8)
    job = build_job(question, "ntp,drop")
    for event, (_, decision) in zip(parse_events(text), result.decisions, strict=True):
        assert event.device is not None
        job.fail(0.0, [question.topology.device_number(event.device)])
        live = {replica: sum(place[0] == replica for place, _ in decision.devices) for replica, _ in decision.shares}
        slowest = max(share * 4 / live[replica] for replica, share in decision.shares)
        assert job.rates.step_s == pytest.approx(slowest)
        assert job.rates.working == len(decision.devices)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"event": "kill", "device": "9:0", "step": 1}', "no device '9:0'"),
        ('{"event": "kill", "node": "n1", "step": 1}', "needs the 'device'"),
        ('{"event": "kill", "device": "0:0"}', "neither 'step' nor 'time_s'"),
    ],
)
def test_events_that_cannot_be_replayed_are_named(text: str, words: str) -> None:
    """Catches an event that is left out in silence."""
    with pytest.raises(TraceError, match=words):
        replay(config(), "ntp", parse_events(text), num_steps=3)


def test_a_job_that_cannot_finish_says_so() -> None:
    """Catches a prediction of infinite time."""
    text = "\n".join(f'{{"event": "kill", "device": "{r}:{s}", "step": 1}}' for r in range(2) for s in range(4))
    with pytest.raises(TraceError, match="never reached"):
        replay(config(), "ntp,drop", parse_events(text), num_steps=3)
