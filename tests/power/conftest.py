"""A node with emulated devices and an agent on it."""

import pytest

from runflat.power.fakes import FakeNode


@pytest.fixture
def node() -> FakeNode:
    """Three devices at 960 of 1200 W, and an agent that has just started."""
    return FakeNode()
