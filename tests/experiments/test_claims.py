"""Each published claim, repeated with fewer draws; and the result files that stand in the repository."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from runflat.report.claims import Claim, above, below, claim_table, figure, line, near, save_claim

ROOT = Path(__file__).parents[2] / "experiments"
DRAWS = {
    "availability": 500,
    "throughput_loss": 60,
    "power_boost": 30,
    "spare_domains": 200,
    "failed_fraction": 60,
    "blast_radius": 30,
    "llama3_effective_time": 6,
    "rsc_ettr": 8,
    "ft_hsdp": 2,
}


def load(name: str) -> ModuleType:
    """The module of an experiment."""
    spec = importlib.util.spec_from_file_location(f"experiment_{name}", ROOT / name / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def missed(claim: Claim) -> str:
    """The table of a claim if a row is not met, else nothing."""
    return "" if all(row.met for row in claim.rows) else claim_table(claim.rows)


@pytest.mark.parametrize("name", sorted(DRAWS))
def test_published_numbers_are_met(name: str) -> None:
    """Catches a simulator that no longer gives what was published, or leaves its closed form."""
    assert missed(load(name).compute(DRAWS[name])) == ""


def test_the_recorded_trace_gives_its_published_numbers(reference_data: Path) -> None:
    """Catches a change in pairing, concurrency or the order of the strategies on real failures."""
    trace = reference_data / "infinitehbd" / "fault_trace.json"
    assert missed(load("infinitehbd_replay").compute(trace, 6)) == ""


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in ROOT.glob("*/run.py")))
def test_every_experiment_has_its_files_and_its_line(folder: str) -> None:
    """Catches an experiment without result, figure or a line on the page, and a result file with a row not met."""
    result = json.loads((ROOT / folder / "result.json").read_text())
    assert [row["what"] for row in result["rows"] if not row["met"]] == []
    assert (ROOT / folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert f"`{folder}`" in (ROOT / "README.md").read_text()


def test_rows_can_fail_and_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a tolerance that accepts everything, and a figure that is not drawn from the file."""
    assert not near("a", 1.0, 1.2, 0.1, "s").met
    assert not below("a", 1.0, 1.2, "s").met
    assert not above("a", 1.0, 0.9, "s").met
    rows = (near("a", 1.0, 1.05, 0.1, "s", "because"), below("b", 1.0, 1.2, "s"))
    claim = Claim(name="x", rows=rows, figure=figure("t", "x", "y", [line("l", [1, 2], [3, 4])]), config={"seed": 1})
    save_claim(claim, tmp_path)
    data = json.loads((tmp_path / "result.json").read_text())
    assert [row["met"] for row in data["rows"]] == [True, False]
    assert (tmp_path / "figure.png").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert "a: because" in printed
    assert "no" in printed.splitlines()[2]
