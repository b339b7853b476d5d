"""Budgets and promises that keep the code readable: size, annotations, documentation."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

PACKAGE = sorted((ROOT / "runflat").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[Function]:
    """Yields every function and method, nested ones included."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def too_long(source: str) -> list[str]:
    """Returns a line for the file, if it is too long, and for each function that is."""
    num_lines = len(source.splitlines())
    found = [f"{num_lines} lines in the file (at most {MAX_FILE_LINES})"] if num_lines > MAX_FILE_LINES else []
    for node in functions(ast.parse(source)):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            found.append(f"{node.name}: {length} lines (at most {MAX_FUNCTION_LINES})")
    return found


def not_annotated(source: str) -> list[str]:
    """Returns `function(argument)` or `function -> ?` for each annotation that is missing."""
    found = []
    for node in functions(ast.parse(source)):
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        bare = [arg.arg for arg in every if arg is not None and arg.annotation is None]
        found += [f"{node.name}({name})" for name in bare if name not in ("self", "cls")]
        if node.returns is None and node.name != "__init__":
            found.append(f"{node.name} -> ?")
    return found


def not_documented(source: str) -> list[str]:
    """Returns each public class, function and method without a docstring; "module" for the file's own."""
    found: list[str] = []

    def visit(node: ast.Module | ast.ClassDef | Function, name: str) -> None:
        if not ast.get_docstring(node):
            found.append(name)
        if isinstance(node, Function):
            return
        for child in node.body:
            if isinstance(child, ast.ClassDef | Function) and not child.name.startswith("_"):
                decorators = [ast.unparse(decorator) for decorator in child.decorator_list]
                if not any(text.endswith(("overload", ".setter")) for text in decorators):
                    visit(child, f"{name}.{child.name}" if isinstance(node, ast.ClassDef) else child.name)

    visit(ast.parse(source), "module")
    return found


def by_name(path: Path) -> str:
    """Returns the name under which a file's test is reported."""
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PACKAGE + TESTS, ids=by_name)
def test_size_and_annotations(path: Path) -> None:
    """Catches files and functions that grow without end, and arguments of unknown type."""
    source = path.read_text()
    assert too_long(source) == []
    assert not_annotated(source) == []


@pytest.mark.parametrize("path", PACKAGE, ids=by_name)
def test_public_names_are_documented(path: Path) -> None:
    """Catches a public name that a reader can only guess at."""
    assert not_documented(path.read_text()) == []


@pytest.mark.parametrize("path", TESTS, ids=by_name)
def test_tests_say_what_they_catch(path: Path) -> None:
    """Catches a test without a docstring: when it fails, nobody knows what is broken."""
    tests = [node for node in functions(ast.parse(path.read_text())) if node.name.startswith("test_")]
    assert [node.name for node in tests if not ast.get_docstring(node)] == []


def test_checks_can_fail() -> None:
    """Catches a check that has gone blind."""
    body = "    x = 1\n"
    assert too_long("def f() -> None:\n" + body * 59) == []
    assert too_long("def f() -> None:\n" + body * 60) == ["f: 61 lines (at most 60)"]
    assert too_long("x = 1\n" * 401) == ["401 lines in the file (at most 400)"]
    assert not_annotated("class A:\n    def f(self, a, *b: int, c, **d): ...") == ["f(a)", "f(c)", "f(d)", "f -> ?"]
    source = "def f(): ...\ndef _g(): ...\nclass A:\n    '''Doc.'''\n    def h(self): ...\n    def __init__(self): ..."
    assert not_documented(source) == ["module", "f", "A.h"]
