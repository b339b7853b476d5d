"""What no tracked file may say, and code habits that a reader of the diff would have to catch otherwise."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Written in pieces, so that this file does not find itself.
UNFINISHED = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
MACHINE_PATHS = tuple(f"/{name}/" for name in ("work", "tmp", "root", "home", "Users"))
OUTSIDE = ".." + "/shared"
MAY_NAME_OUTSIDE = {".ci/run"}

FORBIDDEN = re.compile(
    "|".join([rf"\b(?:{'|'.join(UNFINISHED)})\b", rf"(?<![\w./])(?:{'|'.join(MACHINE_PATHS)})", re.escape(OUTSIDE)])
)
BARE_SUPPRESSION = re.compile(r"#\s*(?:type:\s*ignore|noqa)(?:\[[\w, -]+\]|:\s*[A-Z0-9, ]+)?\s*$")


def tracked_files() -> list[Path]:
    """Returns the project's text files: what git tracks, or all but hidden folders where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=20
    )
    if listed.returncode == 0:
        names = [name for name in listed.stdout.split("\0") if name]
    else:
        relative = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
        names = [str(path) for path in relative if not any(part.startswith(".") for part in path.parts)]
    return [path for name in names if (path := ROOT / name).is_file() and b"\0" not in path.read_bytes()[:4096]]


def bad_lines(name: str, text: str) -> list[str]:
    """Returns `name:line: what` for each forbidden word, machine path or suppression without a reason."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        hits = [hit for hit in FORBIDDEN.findall(line) if not (hit == OUTSIDE and name in MAY_NAME_OUTSIDE)]
        if name.endswith(".py") and BARE_SUPPRESSION.search(line):
            hits.append("suppression without a reason")
        found += [f"{name}:{number}: {hit}" for hit in hits]
    return found


def is_environment_read(node: ast.expr) -> bool:
    """Returns whether the expression is os.getenv(...), os.environ.get(...) or the value of os.environ[...]."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("os.getenv", "os.environ.get")
    return (
        isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and ast.unparse(node.value) == "os.environ"
    )


def bad_habits(source: str, *, is_test: bool, may_read_environment: bool) -> list[str]:
    """Returns what the code does that house style forbids: broad except, hidden inputs, sleeping tests."""
    found = []
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            is_broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            if is_broad and "  # " not in lines[node.lineno - 1]:
                found.append(f"line {node.lineno}: broad except without a reason beside it")
        elif isinstance(node, ast.Call) and is_test and ast.unparse(node.func).endswith("sleep"):
            found.append(f"line {node.lineno}: a test that sleeps")
        elif not may_read_environment and isinstance(node, ast.expr) and is_environment_read(node):
            found.append(f"line {node.lineno}: reads the environment")
    return found


def test_text() -> None:
    """Catches unfinished work, paths of one machine, and a silenced checker without a reason."""
    files = tracked_files()
    assert ROOT / "pyproject.toml" in files
    assert [line for path in files for line in bad_lines(str(path.relative_to(ROOT)), path.read_text())] == []


@pytest.mark.parametrize("folder", ["runflat", "tests"])
def test_habits(folder: str) -> None:
    """Catches errors swallowed whole, settings that come in behind the arguments, tests that hope for timing."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        # The command line reads it for all; a launcher's or systemd's variables are read in their command.
        adapters = ("runflat/commands/worker.py", "runflat/commands/controller.py", "runflat/commands/power_agent.py")
        may_read = folder == "tests" or name in ("runflat/cli.py", *adapters)
        found += [
            f"{name}, {line}"
            for line in bad_habits(path.read_text(), is_test=folder == "tests", may_read_environment=may_read)
        ]
    assert found == []


def test_checks_can_fail() -> None:
    """Catches a check that has gone blind, or one that cries wolf."""
    for text in (UNFINISHED[0], f"see {MACHINE_PATHS[0]}data", f"'{MACHINE_PATHS[1]}x'", f"cd {OUTSIDE}/data"):
        assert len(bad_lines("README.md", text)) == 1, text
    assert bad_lines(".ci/run", f"{OUTSIDE}/data") == []
    assert bad_lines("README.md", f"a{MACHINE_PATHS[0]}b, https://example.org{MACHINE_PATHS[3]}") == []
    assert len(bad_lines("a.py", "x = 1  # type: " + "ignore[misc]")) == 1
    assert len(bad_lines("a.py", "x = 1  # no" + "qa: E501")) == 1
    assert bad_lines("a.py", "x = 1  # type: " + "ignore[misc]  # the stub is wrong") == []
    source = "try:\n    os.getenv('A')\nexcept Exception:\n    time.sleep(os.environ['B'])\nos.environ['C'] = 'c'"
    assert len(bad_habits(source, is_test=True, may_read_environment=False)) == 4
    assert len(bad_habits(source, is_test=False, may_read_environment=True)) == 1
    reasoned = source.replace("Exception:", "Exception:  # the library raises nothing narrower")
    assert bad_habits(reasoned, is_test=False, may_read_environment=True) == []
