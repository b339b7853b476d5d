"""The direction of imports inside the package (docs/design.md, "Shape of the code").

Imports inside functions count like those at the top: a lazy import hides a wrong arrow, it does not turn it.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

TRUNK = {"cluster", "traces", "plan", "power"}
ALLOWED: dict[str, set[str]] = {
    "cluster": set(),
    "traces": {"cluster"},
    "plan": {"cluster"},
    "power": {"cluster", "plan"},
    "parallel": TRUNK,
    "train": TRUNK | {"parallel"},
    "elastic": TRUNK | {"parallel", "train"},
    "check": TRUNK | {"parallel", "train", "elastic"},
    "perf": TRUNK,
    "sim": TRUNK | {"perf"},
    "report": TRUNK | {"perf", "sim"},
    "errors": set(),
    "": {"errors"},  # runflat/__init__.py runs before everything else
}
"""What a room may import besides itself, `errors` and parts of `config`."""

ALLOWED["config"] = TRUNK | {"perf", "sim", "report"}

WITH_TORCH = {"parallel", "train", "elastic", "check"}
LOADS_TORCH = {"torch", "transformers", "safetensors.torch"}
WHOLE_CONFIG = {"Config", "RunConfig"}
TOP = {"cli", "commands", "api", "__main__"}

Sources = dict[str, str]


def read_package() -> Sources:
    """Returns the source of each module of the package by its dotted name."""
    sources: Sources = {}
    for path in sorted((ROOT / "runflat").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return sources


def imported_names(module: str, source: str, is_package: bool) -> Iterator[str]:
    """Yields the full dotted name of everything that a module imports, at any depth: `a.b.name` for `from a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = module.split(".")
            parent = parent[: len(parent) - node.level + is_package] if node.level else []
            base = [*parent, *(node.module.split(".") if node.module else [])]
            yield from (".".join([*base, alias.name]) for alias in node.names)


def names_by_module(sources: Sources) -> dict[str, set[str]]:
    """Returns what each module imports, as written."""
    packages = {name.rpartition(".")[0] for name in sources}
    return {name: set(imported_names(name, text, name in packages)) for name, text in sources.items()}


def module_graph(sources: Sources) -> dict[str, set[str]]:
    """Returns for each module the modules of the package that it imports."""
    graph: dict[str, set[str]] = {}
    for module, names in names_by_module(sources).items():
        known = {name if name in sources else name.rpartition(".")[0] for name in names}
        graph[module] = {name for name in known if name in sources and name != module}
    return graph


def room(module: str) -> str:
    """Returns the first name below `runflat`, "" for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def wrong_arrows(sources: Sources) -> list[str]:
    """Returns a line for each import that the table does not allow."""
    wrong = []
    for module, names in names_by_module(sources).items():
        here = room(module)
        if here in TOP:
            continue
        for name in sorted(names):
            if name.split(".")[0] == "runflat":
                there = room(name if f"runflat.{room(name)}" in sources else "runflat")
                is_whole = name == "runflat.config" or (there == "config" and name.rpartition(".")[2] in WHOLE_CONFIG)
                free = {here, "errors", ""} | ({"config"} if here not in ("errors", "") and not is_whole else set())
                if here not in ALLOWED or there not in ALLOWED[here] | free:
                    wrong.append(f"{module} must not import {name}")
            elif here not in WITH_TORCH and any(f"{name}.".startswith(f"{heavy}.") for heavy in LOADS_TORCH):
                wrong.append(f"{module} must not import {name}: it loads torch")
    return wrong


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Returns every module that `start` imports, directly or not; `start` itself only if it is in a cycle."""
    found: set[str] = set()
    waiting = list(graph.get(start, ()))
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting.extend(graph[module])
    return found


def cycles(sources: Sources) -> list[str]:
    """Returns the modules that import themselves by way of others."""
    graph = module_graph(sources)
    return [module for module in graph if module in reachable(graph, module)]


def test_arrows() -> None:
    """Catches a room that reaches up or across, or torch in a room that must load without it."""
    assert wrong_arrows(read_package()) == []


def test_no_cycles() -> None:
    """Catches two modules that need each other, lazily or not."""
    assert cycles(read_package()) == []


def test_reference_knows_nothing_of_parallel() -> None:
    """Catches a reference that shares code with what it judges, also by way of a third module."""
    graph = module_graph(read_package())
    assert not {name for name in reachable(graph, "runflat.check.reference") if room(name) == "parallel"}


def test_torch_free_rooms_load_without_torch() -> None:
    """Catches torch that comes in by way of another library: the planner and `--help` would take seconds to start."""
    light = [name for name in read_package() if room(name) not in WITH_TORCH | {"__main__", "api"}]
    program = "import sys, importlib\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    program += "sys.exit('torch' in sys.modules and 'torch was loaded')"
    done = subprocess.run(
        [sys.executable, "-c", program, *light], cwd=ROOT, capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == 0, done.stderr


def test_checks_can_fail() -> None:
    """Catches a check that has gone blind: each kind of wrong import must be reported."""
    sample = {
        "runflat": "",
        "runflat.errors": "from runflat.plan import units",
        "runflat.config": "class Config: ...",
        "runflat.plan": "",
        "runflat.plan.units": "def f():\n    from ..sim import engine",
        "runflat.plan.cost": "import safetensors.torch",
        "runflat.sim": "",
        "runflat.sim.engine": "from runflat import config\nfrom .. import perf\nimport torchtitle",
        "runflat.perf": "from runflat.config import Config",
        "runflat.train": "import torch\nfrom runflat.config import DataConfig\nfrom runflat import __version__",
        "runflat.new_room": "import runflat.plan.units",
        "runflat.cli": "import torch, runflat.sim.engine\nfrom runflat.config import Config",
    }
    assert wrong_arrows(sample) == [
        "runflat.errors must not import runflat.plan.units",
        "runflat.plan.units must not import runflat.sim.engine",
        "runflat.plan.cost must not import safetensors.torch: it loads torch",
        "runflat.sim.engine must not import runflat.config",
        "runflat.perf must not import runflat.config.Config",
        "runflat.new_room must not import runflat.plan.units",
    ]
    assert cycles({"a": "import b", "b": "def f():\n    import c", "c": "from a import x", "d": "import a"}) == list(
        "abc"
    )
