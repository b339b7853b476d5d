"""A step that fails gives everything back: who holds its error holds the groups of its generation."""

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from runflat.elastic.stepping import Step
from runflat.parallel.comms import AbortedError, CommsError


class Groups:
    """Stands for the groups of a generation, which live in the frames that use them."""

    def __init__(self, error: AbortedError | CommsError):
        self.error = error

    def all_reduce(self) -> None:
        raise self.error


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("error", [AbortedError, CommsError])
@pytest.mark.parametrize("in_body", [True, False])
def test_a_failed_step_keeps_no_groups_alive(no_collector: None, error: Any, in_body: bool) -> None:
    """Catches sockets and threads of left generations that pile up until the garbage collector comes by."""
    left: list[weakref.ref[Groups]] = []

    def use() -> None:
        groups = Groups(error("gone"))
        left.append(weakref.ref(groups))
        try:
            groups.all_reduce()
        finally:
            groups.error = error("another")  # the real ones do not hold the error that they raise

    progress = SimpleNamespace(step=0)
    engine: Any = SimpleNamespace(progress=progress, samples=lambda: (0, 1), finish=use, timeline=None)
    host: Any = SimpleNamespace(engine=engine)

    def steps() -> Iterator[Step]:
        step = Step(host, 0)
        yield step
        step.outcome()

    def train() -> None:
        for step in steps():
            with step:
                if in_body:
                    use()

    with pytest.raises(error):
        train()
    assert left[0]() is None
