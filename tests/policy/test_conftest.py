"""The skips that must not hide: a needed tool that is missing, and soak tests in an ordinary run."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SAMPLE = """
import pytest

@pytest.mark.needs_tmux
def test_tool(): ...

@pytest.mark.needs_compiler
def test_skips_itself(): pytest.skip("changed its mind")

@pytest.mark.soak
def test_soak(): ...

def test_data(reference_data): assert reference_data.is_absolute()

def test_plain(): ...
"""


def run_pytest(folder: Path, *options: str) -> tuple[int, dict[str, int], str]:
    """Runs SAMPLE in a process of its own with gcc as the only tool; returns exit status, counts and output."""
    for name in ("tests/conftest.py", "pyproject.toml"):
        (folder / Path(name).name).write_text((ROOT / name).read_text())
    (folder / "gcc").touch(mode=0o700)
    (folder / "test_sample.py").write_text(SAMPLE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", ".", *options],
        cwd=folder,
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    closing = (done.stdout or done.stderr).strip().splitlines()[-1]
    return done.returncode, {word: int(n) for n, word in re.findall(r"(\d+) (\w+)", closing)}, done.stdout


def test_missing_tool_is_skipped_by_name_and_soak_stays_out(tmp_path: Path) -> None:
    """Catches a skip that does not say what to install, and soak tests that slip into `make test`."""
    status, counts, output = run_pytest(tmp_path)
    assert status == 0
    assert (counts["passed"], counts["skipped"], counts["deselected"]) == (1, 3, 1)
    assert "tmux is not installed" in output
    assert "--reference-data" in output


def test_skip_of_a_marked_test_fails_when_asked(tmp_path: Path) -> None:
    """Catches a check machine that reports green although a marked test never ran, whoever skipped it."""
    status, counts, output = run_pytest(tmp_path, "--fail-on-skip-marked")
    assert status == 1
    assert (counts["passed"], counts["failed"], counts["error"], counts["skipped"]) == (1, 1, 1, 1)
    assert "changed its mind (a skip counts as a failure" in output
    assert "tmux is not installed (a skip counts as a failure" in output


def test_soak_and_data_run_when_asked(tmp_path: Path) -> None:
    """Catches an option that no longer reaches the tests: soak never selected, data never found."""
    assert run_pytest(tmp_path, "-m", "soak")[1]["passed"] == 1
    assert run_pytest(tmp_path, "--reference-data=.", "-k", "data")[1]["passed"] == 1
    assert run_pytest(tmp_path, "--reference-data=absent")[0] == 4
