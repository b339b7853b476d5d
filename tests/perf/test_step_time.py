"""The step as a whole: parts add up, and each mechanism moves the time in the direction that physics says."""

from dataclasses import replace

import pytest

from runflat.cluster.hardware import load_hardware
from runflat.errors import PlanError
from runflat.perf.layout import Layout
from runflat.perf.memory import device_memory
from runflat.perf.shape import load_model
from runflat.perf.step_time import Replica, Stage, StepTimeModel

H100 = load_hardware("h100")
LLAMA = load_model("llama3-70b")
LAYOUT = Layout(tp=8, pp=4, dp=16, global_batch=512, seq_len=4096)


def model(**changes: object) -> StepTimeModel:
    """Returns the model of LAYOUT with some fields changed."""
    return StepTimeModel(H100, LLAMA, replace(LAYOUT, **changes))  # type: ignore[arg-type]  # the tests pass valid types


def hurt(lost: int, speed: float = 1.0, num_sequences: int = 32, num_stages: int = 1) -> Replica:
    """Returns a replica whose first stages have lost devices."""
    stages = [Stage(8 - lost, speed)] * num_stages + [Stage(8)] * (4 - num_stages)
    return Replica(tuple(stages), num_sequences)


def test_parts_add_up_and_are_sane() -> None:
    """Catches a part that is counted twice or not at all, and a utilisation beyond what anyone has reached."""
    predictor = model()
    step = predictor.step()
    assert step.total_s == pytest.approx(sum(step.parts().values()))
    assert min(step.parts().values()) >= 0
    assert 0.3 < predictor.utilisation(step) < 0.6


def test_bubble_is_the_schedules() -> None:
    """Catches a wrong bubble: (p-1)/m of the work for equal stages, divided by the chunks."""
    plain, interleaved = (model(virtual=v).replica(model().healthy) for v in (1, 4))
    work = plain.total_s - plain.bubble_s - plain.pp_comm_s
    # The last stage has the head, so the others are a little shorter than the slowest.
    assert 0.8 * 3 / 32 < plain.bubble_s / work <= 3 / 32
    assert interleaved.bubble_s == pytest.approx(plain.bubble_s / 4)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"recompute": "full"}, "matmul_s"),
        ({"attention": "eager"}, "attention_s"),
        ({"sequence_parallel": False}, "memory_s"),
        ({"overlap_tp": "none"}, "tp_comm_s"),
        ({"overlap_pp": False}, "pp_comm_s"),
        ({"overlap_dp": False}, "dp_comm_s"),
        ({"zero1": False}, "optimizer_s"),
        ({"fused_grads": False}, "memory_s"),
    ],
)
def test_each_choice_costs_where_it_should(change: dict[str, object], part: str) -> None:
    """Catches a field of the layout that nothing reads."""
    before, after = model().step().parts(), model(**change).step().parts()
    assert after[part] > before[part]
    assert sum(after.values()) > sum(before.values())


def test_full_recomputation_is_a_third_more_products() -> None:
    """Catches recomputation that repeats the wrong half."""
    head = model().replica(model().healthy).matmul_s
    ratio = model(recompute="full").replica(model().healthy).matmul_s / head
    assert 1.28 < ratio < 1.34


def test_more_lost_devices_take_longer() -> None:
    """Catches a degree that is not monotonic because shares are rounded the wrong way."""
    predictor = model()
    times = [predictor.replica(hurt(lost, num_stages=4)).total_s for lost in range(8)]
    assert times == sorted(times)
    assert 8 / 7 * 0.95 < times[1] / times[0] < 10 / 8 * 1.05


def test_one_hurt_stage_slows_the_replica_as_much_as_all() -> None:
    """Catches a pipeline whose slowest stage does not set the pace."""
    predictor = model()
    one, every = (predictor.replica(hurt(2, num_stages=n)).total_s for n in (1, 4))
    healthy = predictor.replica(hurt(0)).total_s
    assert healthy < one < every
    # Not quite as much: a hurt first stage has no head, and three stages of the bubble stay short.
    assert (one - healthy) / (every - healthy) > 0.7


def test_power_hides_a_loss_only_in_arithmetic() -> None:
    """Catches a boost that is not applied, or that speeds up communication."""
    predictor = model()
    plain, boosted = predictor.replica(hurt(1)), predictor.replica(hurt(1, speed=8 / 7))
    assert boosted.total_s < plain.total_s
    assert boosted.total_s > predictor.replica(hurt(0)).total_s
    # The slowest stage may now be a healthy one; with all stages hurt the boosted one is still the measure.
    plain, boosted = (predictor.replica(hurt(1, speed=s, num_stages=4)) for s in (1.0, 8 / 7))
    assert boosted.tp_comm_s == plain.tp_comm_s
    assert boosted.matmul_s == pytest.approx(plain.matmul_s * 7 / 8)


def test_sequences_within_healthy_time() -> None:
    """Catches an off-by-one: a healthy replica has time for exactly its own share, a hurt one for less."""
    predictor = model()
    seconds = predictor.replica(predictor.healthy).total_s
    assert predictor.sequences_within(predictor.healthy.stages, seconds) == 32
    kept = predictor.sequences_within(hurt(1).stages, seconds)
    assert kept < 32
    assert predictor.replica(hurt(1, num_sequences=kept)).total_s <= seconds
    assert predictor.replica(hurt(1, num_sequences=kept + 1)).total_s > seconds
    assert predictor.sequences_within(hurt(1).stages, 1e-6) == 0


def test_reshard_costs_only_when_degrees_differ() -> None:
    """Catches resharding that is charged in health, or in direct sync."""
    states = [model().healthy, hurt(1, num_sequences=28)]
    assert model(sync="reshard").step().reshard_s == 0
    assert model().step(states).reshard_s == 0
    assert model(sync="reshard", overlap_dp=False).step(states).reshard_s > 0


def test_hurt_stage_carries_more_gradient() -> None:
    """Catches a sync that ignores the larger share of a reduced replica."""
    predictor = model(overlap_dp=False)
    states = [predictor.healthy, hurt(1, num_sequences=28)]
    assert predictor.step(states).dp_comm_s > predictor.step().dp_comm_s * 1.1


def test_memory_grows_with_the_loss() -> None:
    """Catches a memory check that would adopt a degree which cannot fit."""
    predictor = model()
    full, half = device_memory(predictor), device_memory(predictor, live=4)
    # A little more than twice: some KV heads are held by several devices.
    assert 2 * full.params_bytes < half.params_bytes < 2.1 * full.params_bytes
    assert half.total_bytes > 1.8 * full.total_bytes
    assert device_memory(model(recompute="full")).activations_bytes < full.activations_bytes / 5


def test_wrong_states_are_refused() -> None:
    """Catches a number for a replica that cannot exist."""
    predictor = model()
    for stages in ((Stage(8),) * 3, (Stage(9),) * 4, (Stage(0),) * 4, (Stage(8, 0.0),) * 4):
        with pytest.raises(PlanError):
            predictor.replica(Replica(stages, 8))
