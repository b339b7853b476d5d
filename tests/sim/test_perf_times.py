import numpy as np
import pytest

from runflat.errors import ConfigError
from runflat.sim.config import SimConfig
from runflat.sim.experiment import LinkTable, fallen_through, parse_candidate
from runflat.sim.perf_times import job_times
from runflat.sim.presets import preset
from runflat.sim.static import at_failed_share


def question(**job: object) -> SimConfig:
    """The paper's job with its model, and changes."""
    config = preset("ntp-paper")
    return config.model_copy(update={"job": config.job.model_copy(update={"model": "ntp-480b", "degrees": (), **job})})


def test_the_step_time_model_gives_a_line_that_never_falls_with_damage() -> None:
    """Catches a lower degree that looks faster because its units divide better."""
    times = job_times(question())
    seconds = []
    for lost in range(12):
        line = times.line(lost)
        assert line is not None
        seconds.append(line.at(8))
    assert seconds == sorted(seconds)
    assert seconds[2] > 1.05 * seconds[0]
    assert times.line(32) is None


def test_uneven_heads_cost_a_sequence_more_than_the_published_setup() -> None:
    """Catches a simulator that ignores units: 128 heads over 30 devices leave 6 of 8 sequences, and 3 % lost."""
    loss = 1 - at_failed_share(question(), "ntp", 0.004, draws=40, rng=np.random.default_rng(0)).throughput.mean
    assert loss == pytest.approx(0.0309, abs=0.003)


def test_more_power_shortens_the_line() -> None:
    """Catches a boost that the step-time model does not see."""
    times = job_times(question())
    slow, fast = times.line(2), times.line(2, 1.1)
    assert slow is not None
    assert fast is not None
    assert 1 / 1.1 < fast.at(8) / slow.at(8) < 0.97


def test_what_does_not_fit_in_memory_is_said_and_handed_on() -> None:
    """Catches a lower degree that survivors could not hold: Llama 3 405B at TP 7 of 8 on 80 GB."""
    config = preset("llama3")
    config = config.model_copy(update={"job": config.job.model_copy(update={"model": "llama3-405b"})})
    times = job_times(config)
    table = LinkTable(parse_candidate("ntp,drop")[0], config, times)
    assert table(1) == "drop"
    assert any("memory at TP 7" in words for words in fallen_through(config, times))


def test_a_model_needs_hardware() -> None:
    """Catches a step time from nowhere."""
    config = question()
    bare = config.model_copy(update={"cluster": config.cluster.model_copy(update={"hardware": ""})})
    with pytest.raises(ConfigError, match="hardware is empty"):
        job_times(bare)
