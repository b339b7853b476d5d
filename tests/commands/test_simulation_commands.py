"""The commands simulate, sweep, advise and trace: what they print and write."""

import json
from pathlib import Path

import pytest

from runflat.commands import advise, simulate, sweep, trace
from runflat.errors import ConfigError


def test_simulate_prints_a_table_and_writes_result_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a table without explanation, a result file that lacks the question, and figures that are not drawn."""
    argv = ["--preset", "gb200", "--seeds", "2", "--days", "10", "--figures", str(tmp_path)]
    assert simulate.main([*argv, "--strategies", "drop", "ntp+boost,drop"]) == 0
    printed = capsys.readouterr().out
    for words in ("goodput %", "ntp+boost,drop", "goodput: tokens committed", "Best here", "headroom 1.25x", "MW"):
        assert words in printed
    data = json.loads((tmp_path / "gb200.json").read_text())
    assert [row["candidate"] for row in data["results"]] == ["drop", "ntp+boost,drop"]
    assert data["config"]["seeds"] == 2
    row = data["results"][0]
    assert sum(row["ledger_device_h"].values()) == pytest.approx(2 * row["device_hours"])
    for name in ("throughput", "breakdown", "power"):
        assert (tmp_path / f"gb200-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_simulate_takes_a_file_and_its_own_result_place(tmp_path: Path) -> None:
    """Catches --json or --figures None that is ignored."""
    question = tmp_path / "q.toml"
    question.write_text(
        'name = "q"\nstrategies = ["drop"]\n[job]\ntp = 2\ndp = 2\n'
        '[[failures.components]]\nname = "GPU"\nper_device_day = 0.1\n'
    )
    argv = [str(question), "--json", str(tmp_path / "out" / "r.json"), "--figures", "None", "--rule", "flexible"]
    simulate.main(argv)
    data = json.loads((tmp_path / "out" / "r.json").read_text())
    assert data["config"]["rule"] == "flexible"
    assert not list(tmp_path.rglob("*.png"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "either a configuration file or --preset"),
        (["--preset", "lab", "--seeds", "0"], r"seeds: .* greater than or equal to 1 \(given: 0\)"),
        (["--preset", "lab", "--days", "-1"], r"days: .* greater than 0 \(given: -1"),
        (["--preset", "lab", "--days", "nan"], r"days: .* finite number \(given: nan"),
        (["--preset", "lab", "--strategies", "hope"], "'hope'"),
    ],
)
def test_wrong_flags_are_one_sentence(argv: list[str], words: str) -> None:
    """Catches a traceback for a flag that makes no sense."""
    with pytest.raises(ConfigError, match=words):
        simulate.main(argv)


def test_sweep_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an axis name that the command does not know, and a figure without its file."""
    argv = ["--preset", "lab", "--seeds", "3", "--over", "spare-domains", "--values", "0", "1"]
    sweep.main([*argv, "--strategies", "spare,restart", "--figures", str(tmp_path)])
    assert "spare-domains" in capsys.readouterr().out
    data = json.loads((tmp_path / "lab-spare-domains.json").read_text())
    assert data["figure"]["lines"][0]["x"] == [0, 1]
    assert (tmp_path / "lab-spare-domains.png").is_file()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--values"], "--values is empty"),
        (["--values", "nan"], "rate cannot be nan"),
        (["--values", "1e30"], "failures in 365 days are more than"),
        (["--over", "checkpoint", "--values", "-5"], "greater than 0"),
        (["--over", "tp", "--values", "2.5"], "whole number"),
    ],
)
def test_sweep_values_that_make_no_sense(argv: list[str], words: str) -> None:
    """Catches values that pass by the checks of a configuration file and end in a traceback."""
    with pytest.raises(ConfigError, match=words):
        sweep.main(["--preset", "lab", *argv])


def test_a_price_must_be_a_number() -> None:
    """Catches advice in nan money."""
    with pytest.raises(ConfigError, match="price_per_device_h"):
        advise.main(["--preset", "lab", "--price", "nan"])


def test_advise_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches advice without its price."""
    out = tmp_path / "a.json"
    advise.main(["--preset", "lab", "--seeds", "3", "--price", "2.5", "--json", str(out)])
    assert "at 2.5 per device-hour" in capsys.readouterr().out
    assert json.loads(out.read_text())["best"]["chain"]


def test_trace_describe_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a figure that fails on outages without end, and a subcommand that is taken for a file."""
    path = tmp_path / "t.csv"
    path.write_text("time_s,duration_s,device,cause\n0,3600,a,GPU\n7200,,b,cable\n90000,60,a,GPU\n")
    trace.main(["describe", str(path), "--num-devices", "5", "--figures", str(tmp_path)])
    assert "3 failures (3 outages) of 5 devices" in capsys.readouterr().out
    data = json.loads((tmp_path / "t.json").read_text())
    assert data["repair_h"] == pytest.approx([1.0, 1 / 60])
    assert (tmp_path / "t.png").is_file()
    with pytest.raises(ConfigError, match="trace describe FILE"):
        trace.main([str(path)])
    path.write_text("time_s,duration_s,device,cause\n")
    with pytest.raises(ConfigError, match="no failure"):
        trace.main(["describe", str(path)])
