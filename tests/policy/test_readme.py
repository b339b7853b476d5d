"""What the documents promise: their commands run, their links and their file tree exist."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXECUTED = ("README.md", "docs/guide.md")
LINKED = (
    *EXECUTED,
    "docs/design.md",
    "docs/plan.md",
    "docs/power.md",
    "docs/limits.md",
    "docs/peers.md",
    "docs/log.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)


def fenced(text: str, *languages: str) -> list[str]:
    """Returns the contents of the code blocks in the given languages."""
    return [body for language, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if language in languages]


def commands(block: str) -> list[str]:
    """Returns the command lines of a block: after a prompt where it has prompts, else all but comments."""
    lines = block.replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    bare = (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)
    return [line for line in bare if line]


def blocks() -> Iterator[tuple[str, list[str]]]:
    """Yields (file, commands) for each block of commands; a block's commands are run in order, in one folder."""
    for name in EXECUTED:
        for block in fenced((ROOT / name).read_text(), "bash", "console", "sh"):
            yield name, commands(block)


@pytest.mark.process
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "lines"), [pytest.param(*block, id=f"{block[0]}: {block[1][0]}") for block in blocks()]
)
def test_commands_run(name: str, lines: list[str], tmp_path: Path) -> None:
    """Catches a document that has drifted from the command line or from the Makefile."""
    for line in lines:
        program, *arguments = shlex.split(line)
        if program == "make":
            targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
            assert set(arguments) <= set(targets), line
            continue
        assert program == "runflat", f"{name} has a command that no test runs: {line}"
        done = subprocess.run(
            [sys.executable, "-m", "runflat.cli", *arguments],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=170,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("name", LINKED)
def test_links_exist(name: str) -> None:
    """Catches a link to a file of the project that has moved or gone."""
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text())
    assert [target for target in targets if not ((ROOT / name).parent / target).exists()] == []


def test_file_tree_exists() -> None:
    """Catches a file tree in the README that shows a project of the past or of the future."""
    tree = next(block for block in fenced((ROOT / "README.md").read_text(), "text") if block.startswith("runflat/\n"))
    missing = []
    folder = Path()
    for line in tree.splitlines():
        entry = line.split()[0]
        folder = folder if line.startswith(" ") else Path(entry)
        path = folder / entry if line.startswith(" ") else folder
        if not (ROOT / path).exists():
            missing.append(str(path))
    assert missing == []


def test_commands_are_found() -> None:
    """Catches a parser that finds no command, so that nothing is ever run."""
    assert commands("$ runflat plan \\\n  --tp 8\nsome output\n$ make test\n") == [
        "runflat plan    --tp 8",
        "make test",
    ]
    assert commands("# why\nrunflat diff a b  # because\n\n") == ["runflat diff a b"]
    assert fenced("```bash\na\n```\n```text\nb\n```\n", "bash") == ["a\n"]
    readme = [line for name, lines in blocks() if name == "README.md" for line in lines]
    assert readme[:2] == ["make demo", "make test"]
    assert {line.split()[1] for line in readme[2:]} >= {"plan", "verify", "train", "diff"}
