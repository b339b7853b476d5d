"""Predictions against published steps, the rules for incomplete rows, and the commands that print them."""

import json
from pathlib import Path

import pytest

from runflat.commands.step_time import main as step_time
from runflat.commands.validate import LARGEST_LIMIT, LEFT_OUT_LIMIT, MEAN_LIMIT
from runflat.commands.validate import main as validate
from runflat.errors import ConfigError, PlanError
from runflat.perf.efficiency import FITTED, efficiencies_to_json, load_efficiencies
from runflat.perf.fitting import PRIORS, cross_validate, errors, fit
from runflat.perf.published import candidates, predict, read_rows

ROOT = Path(__file__).parents[2]
TABLE = "measured_step_times.csv"

HEADER = (
    "id,gpu,model,layers,hidden,heads,kv_heads,ffn_hidden,vocab,seq,precision,tp,pp,cp,dp,vp,gbs_seqs,mbs,recompute,"
    "step_s_measured,step_s_derived"
)
ROW = "sc21-39.1B,A100-80GB,GPT,48,8192,64,64,32768,51200,2048,fp16,8,2,1,32,,1536,,full,,14.453"
# Narayanan et al. (arXiv 2104.04473), Table 1: 39.1 billion parameters on 512 devices.


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Returns a table of one published row."""
    path = tmp_path / TABLE
    path.write_text(f"{HEADER}\n{ROW}\n")
    return path


def test_published_rows_within_limits(reference_data: Path) -> None:
    """Catches a change of the model that loses the published steps: mean, left out, largest."""
    checks = cross_validate(read_rows(reference_data / TABLE), load_efficiencies())
    assert len(checks) == 36
    inside, left_out = errors(checks, "seconds"), errors(checks, "seconds_left_out")
    assert inside.mean <= MEAN_LIMIT
    assert inside.largest <= LARGEST_LIMIT
    assert left_out.mean <= LEFT_OUT_LIMIT
    assert left_out.mean < errors(checks, "constant_left_out_s").mean
    written = json.loads((ROOT / "experiments/step_time/result.json").read_text())
    assert {row["id"]: row["seconds"] for row in written["rows"]} == pytest.approx(
        {check.row.name: check.seconds for check in checks}, rel=1e-3
    )


def test_shipped_efficiencies_are_those_of_the_fit(reference_data: Path) -> None:
    """Catches efficiencies that were edited by hand, or a model that changed after the fit."""
    found, shipped = fit(read_rows(reference_data / TABLE)), load_efficiencies()
    assert [getattr(found, name) for name in FITTED] == pytest.approx([getattr(shipped, n) for n in FITTED], abs=0.01)


def test_few_parameters() -> None:
    """Catches a fit that grows a parameter per row or publication."""
    assert set(PRIORS) == set(FITTED)
    assert len(FITTED) <= 8
    assert json.loads(efficiencies_to_json(load_efficiencies()))["attention"] == 0.44


def test_rule_for_incomplete_rows(table: Path) -> None:
    """Catches a rule that looks at the measured time, or offers a schedule that the row excludes."""
    (row,) = read_rows(table)
    assert row.seconds == 14.453
    layouts = list(candidates(row))
    assert {(layout.micro_batch, layout.virtual) for layout in layouts} == {
        (m, v) for m in (1, 2, 4, 8) for v in (1, 2)
    }
    seconds, layout = predict(row, load_efficiencies())
    assert seconds == pytest.approx(14.453, rel=0.05)
    assert layout in layouts


def test_bad_tables(tmp_path: Path, table: Path) -> None:
    """Catches a bad row that is skipped or ends in a traceback."""
    with pytest.raises(ConfigError, match="no table"):
        read_rows(tmp_path / "absent.csv")
    table.write_text(f"{HEADER}\n{ROW.replace('8192', 'many')}\n")
    with pytest.raises(ConfigError, match="sc21-39.1B"):
        read_rows(table)


def test_step_time_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a flag that does not reach the model, and a table without its total."""
    flags = ["--model", "llama3-70b", "--hardware", "h100", "--tp", "8", "--pp", "4", "--dp", "16"]
    assert step_time([*flags, "--lost", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hurt"]["num_sequences"] < 32
    assert found["healthy"]["total_s"] == pytest.approx(
        sum(v for k, v in found["healthy"].items() if k.endswith("_s") and k != "total_s")
    )
    assert step_time([*flags, "--precision", "fp8"]) == 0
    text = capsys.readouterr().out
    assert "total" in text
    assert "fits" in text
    with pytest.raises(PlanError, match="can lose"):
        step_time([*flags, "--lost", "8"])
    with pytest.raises(PlanError, match="--tp is 0: a stage has 1 device or more"):
        step_time([*flags, "--tp", "0"])


def test_validate_command(capsys: pytest.CaptureFixture[str], reference_data: Path) -> None:
    """Catches a command that prints errors above the limits and ends with success."""
    assert validate([str(reference_data / TABLE)]) == 0
    text = capsys.readouterr().out
    assert "mcore-h100-462B" in text
    assert "within the limits" in text
