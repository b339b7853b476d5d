import subprocess
import sys
import time
from pathlib import Path

import pytest

from runflat.cluster.ledger import Category
from runflat.errors import ConfigError
from runflat.plan.strategies import Strategy
from runflat.sim.advise import advice_text, advise, as_good
from runflat.sim.config import load_config, parse_candidate
from runflat.sim.experiment import run_all
from runflat.sim.presets import preset, preset_names
from runflat.sim.sweep import Axis, sweep, sweep_table, varied

TOML = """
name = "mine"
days = 3
strategies = ["drop", "spare,ntp+boost"]
[job]
tp = 4
dp = 3
[cluster]
domain_size = 4
[power]
tdp_w = 1000
nominal_w = 800
max_w = 1000
[[failures.components]]
name = "GPU"
per_device_day = 0.01
repair = { kind = "fixed", hours = 5 }
"""


def test_a_file_is_a_question(tmp_path: Path) -> None:
    """Catches a key of the file that is not read."""
    path = tmp_path / "q.toml"
    path.write_text(TOML)
    config = load_config(path)
    assert (config.name, config.job.dp, config.topology.num_devices) == ("mine", 3, 12)
    assert config.failures is not None
    assert config.failures.mean_repair_h == 5
    path.write_text(TOML.replace('name = "mine"', 'trace = "t.csv"'))
    with pytest.raises(ConfigError, match="not both"):
        load_config(path)


def test_the_example_is_a_question_that_is_answered() -> None:
    """Catches an example file that has drifted from the configuration."""
    config = load_config(Path(__file__).parents[2] / "examples" / "cluster.toml")
    results = run_all(config.model_copy(update={"seeds": 2}), record=False)
    assert all(0.5 < result.goodput.mean < 1 for result in results)
    assert config.topology.num_job_devices == 512


def test_a_recorded_trace_of_nodes_drives_a_simulation(tmp_path: Path) -> None:
    """Catches a trace path that is not found beside its file, and node rows that hit one device only."""
    (tmp_path / "faults.csv").write_text("time_s,duration_s,device\n3600,7200,a\n86400,,b\n")
    path = tmp_path / "q.toml"
    source = 'trace = "faults.csv"\ntrace_node_size = 4\n'
    path.write_text(
        source + 'strategies = ["drop"]\nrule = "flexible"\n[job]\ntp = 4\ndp = 4\n[cluster]\ndomain_size = 4\n'
    )
    config = load_config(path)
    (result,) = run_all(config, record=False)
    # 24 hours are recorded; in two of them one of four replicas is out.
    assert result.device_hours == pytest.approx(16 * 24)
    assert result.ledger.share(Category.FAILED) == pytest.approx(2 / 24 / 4)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("tp = 4", "tp = 0", ["job.tp", "greater than or equal to 1"]),
        ("tp = 4", "tpp = 4", ["job.tp"]),
        ('"drop"', '"dropp"', ["dropp", "allowed"]),
        ('kind = "fixed"', 'kind = "never"', ["components", "kind", "never"]),
        ("days = 3", "days = ", ["not TOML"]),
        ("days = 3", "days = 3\nrule = 'wobbly'", ["rule", "wobbly"]),
    ],
)
def test_what_is_wrong_is_named_with_file_and_key(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    """Catches pydantic's report thrown at the user, or a mistyped key that is ignored."""
    path = tmp_path / "q.toml"
    path.write_text(TOML.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    for word in ["q.toml", *words]:
        assert word in str(caught.value)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    """Catches a traceback for a picture or an archive given in place of a configuration."""
    path = tmp_path / "q.bin"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="q.bin is not TOML"):
        load_config(path)


def test_candidates() -> None:
    """Catches a boost that is lost or that is read as a strategy."""
    assert parse_candidate("spare,ntp+boost,drop") == ((Strategy.SPARE, Strategy.NTP, Strategy.DROP), True)
    assert parse_candidate("drop") == ((Strategy.DROP,), False)
    with pytest.raises(ConfigError, match=r"drop\+boost"):
        parse_candidate("drop+boost")


@pytest.mark.parametrize("name", preset_names())
def test_presets_have_sound_devices_and_strategies(name: str) -> None:
    """Catches a preset that contradicts itself."""
    config = preset(name)
    assert config.topology.num_devices >= config.topology.num_job_devices > 0
    assert config.failures_per_s() > 0


def test_unknown_presets_and_files_are_named(tmp_path: Path) -> None:
    """Catches a traceback for a typing error."""
    with pytest.raises(ConfigError, match="llama3, ntp-paper, gb200, lab"):
        preset("llama4")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "no.toml")


@pytest.mark.parametrize(
    ("axis", "value", "check"),
    [
        ("rate", 2.0, lambda c: c.failures_per_s() / preset("gb200").failures_per_s() == pytest.approx(2)),
        ("repair", 0.5, lambda c: c.failures.mean_repair_h / preset("gb200").failures.mean_repair_h == 0.5),
        ("spare-domains", 3, lambda c: c.topology.num_domains == 131),
        ("spare-devices", 5, lambda c: c.topology.num_devices == 128 * 72 + 5),
        ("tp", 32, lambda c: (c.job.tp, c.job.dp, c.job.local_batch) == (32, 64, 8)),
        ("domain-size", 32, lambda c: (c.job.tp, c.topology.domain_size) == (32, 32)),
        ("headroom", 1.1, lambda c: c.power.max_w == pytest.approx(1056)),
        ("checkpoint", 60.0, lambda c: c.recovery.checkpoint_interval_s == 60),
    ],
)
def test_a_sweep_changes_one_number(axis: Axis, value: float, check: object) -> None:
    """Catches an axis that changes nothing or something else."""
    assert callable(check)
    assert check(varied(preset("gb200"), axis, value))


def test_a_sweep_of_what_cannot_be_changed_is_refused() -> None:
    """Catches a sweep that silently runs the same question again."""
    with pytest.raises(ConfigError, match="headroom"):
        varied(preset("lab"), "headroom", 1.2)
    with pytest.raises(ConfigError, match="whole number"):
        varied(preset("lab"), "spare-domains", 1.5)
    with pytest.raises(ConfigError, match="domain"):
        varied(preset("lab"), "tp", 16)


def test_more_failures_cost_more() -> None:
    """Catches rows of a sweep that are swapped."""
    config = preset("lab").model_copy(update={"seeds": 10})
    rows = sweep(config, "rate", (0.5, 4.0))
    assert all(a.goodput.mean > b.goodput.mean for a, b in zip(rows[0].results, rows[1].results, strict=True))
    table = sweep_table("rate", rows)
    assert "ntp,drop,restart" in table
    assert table.count("\n") == 2


def test_advice_names_chain_spares_worth_and_doubt() -> None:
    """Catches advice without its price, or one that its own table contradicts."""
    config = preset("lab").model_copy(update={"seeds": 6})
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"price_per_device_h": 2.0})})
    advice = advise(config)
    assert advice.best.result.goodput.mean == max(option.result.goodput.mean for option in advice.options)
    assert advice.baseline.chain == "restart"
    assert advice.saved_h == pytest.approx(advice.baseline.lost_h - advice.best.lost_h)
    text = advice_text(config, advice)
    for words in (advice.best.chain, "device-hours a month", "at 2 per device-hour", "standard error", "With twice"):
        assert words in text
    assert advice.to_json()["saved_device_h_per_month"] == advice.saved_h


def test_options_that_chance_does_not_tell_apart_are_said() -> None:
    """Catches advice that is surer than its draws: four draws of a few failures leave doubt."""
    config = preset("lab").model_copy(update={"seeds": 4, "days": 200.0})
    advice = advise(config)
    assert advice.rivals
    assert "as good" in advice_text(config, advice)
    assert as_good(advice.best, advice.best)
    far = next(option for option in advice.options if option.spare_domains > 0)
    assert not as_good(advice.best, far) or far.result.goodput.error > 0


def test_advice_counts_power_headroom_and_left_over_devices() -> None:
    """Catches a boost without worth where it helps, and spares that a rack holds anyway."""
    config = preset("gb200").model_copy(update={"seeds": 1, "days": 30.0})
    advice = advise(config)
    assert advice.boost_h is not None
    assert any(option.chain.startswith("spare") and option.spare_domains == 0 for option in advice.options)
    assert "Power headroom is worth" in advice_text(config, advice)


def test_the_simulator_loads_fast_and_without_torch() -> None:
    """Catches an import that makes every question wait for seconds: 0.5 s is promised, 1.5 s alarms."""
    code = (
        "import time; t = time.process_time(); import runflat.sim, runflat.sim.experiment, runflat.sim.presets, sys;"
        "print(time.process_time() - t); assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    start_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.5, f"{done.stdout} s of {time.monotonic() - start_s} s"
