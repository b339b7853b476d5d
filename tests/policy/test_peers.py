"""docs/peers.md: each promise names a test that exists, and each trap of communicators a place in the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "peers.md").read_text()
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
ISSUE = re.compile(r"[\w-]+#\d+")
NUM_ISSUES = 25


def rows(text: str) -> dict[int, list[str]]:
    """Returns the cells of each numbered row of the tables in `text`."""
    cells = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    )
    return {int(row[0]): row[1:] for row in cells if row[0].isdigit()}


def missing_tests(text: str) -> list[str]:
    """Returns each test that `text` names and that does not exist."""
    missing = []
    for path, name in TEST.findall(text):
        file = ROOT / path
        tree = ast.parse(file.read_text()) if file.is_file() else ast.Module([], [])
        if not any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body):
            missing.append(f"{path}::{name}")
    return missing


def test_each_issue_has_a_test() -> None:
    """Catches a promise without a proof, and a test that was renamed or removed without its promise."""
    found = rows(PAGE)
    assert sorted(found) == list(range(1, NUM_ISSUES + 1))
    assert [number for number, row in found.items() if not (TEST.search(row[3]) and ISSUE.search(row[1]))] == []
    assert missing_tests(PAGE) == []


def test_each_trap_has_a_place_in_the_code() -> None:
    """Catches code that is simplified by somebody who does not know what it guards against."""
    section = PAGE.partition("## Communicators and launchers")[2].partition("\n## ")[0]
    code = "\n".join(path.read_text() for path in (ROOT / "runflat").rglob("*.py"))
    assert {number: row[1] for number, row in rows(section).items() if not any_named(row[1], code)} == {}


def any_named(cell: str, code: str) -> bool:
    """Returns whether the code names the first issue of a cell, which stands for the others."""
    return re.search(rf"{ISSUE.findall(cell)[0]}\b", code) is not None


def test_the_page_says_what_it_is() -> None:
    """Catches second-hand notes that pass for something that was checked."""
    introduction = " ".join(PAGE.partition("\n## ")[0].split())
    assert "second-hand notes" in introduction
    assert "none of them was run again here" in introduction


def test_checks_can_fail() -> None:
    """Catches a check that has gone blind."""
    assert missing_tests("`tests/policy/test_peers.py::test_checks_can_fail`") == []
    assert len(missing_tests("`tests/policy/test_peers.py::test_of_yesterday`, `tests/no_such.py::test_a`")) == 2
    assert rows("| # | a |\n|---|---|\n| 3 | x#1 |\nelse") == {3: ["x#1"]}
    assert any_named("a#12, b#3", "see a#12.")
    assert not any_named("a#12, b#3", "see a#123, b#3")
