"""The scripts of benchmarks as modules: they are in no package."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
Load = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def script() -> Iterator[Load]:
    """Loads a script by its path below benchmarks/."""

    def load(path: str) -> ModuleType:
        name = path.removesuffix(".py").replace("/", "_")
        spec = importlib.util.spec_from_file_location(name, FOLDER / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, name, module)  # where dataclasses look it up while it is executed
        spec.loader.exec_module(module)
        return module

    with pytest.MonkeyPatch.context() as patch:
        yield load
