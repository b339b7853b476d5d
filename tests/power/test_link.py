"""The controller's conversation with its agent: nobody waits, orders keep their order, what fails is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from runflat.power.fakes import CEILING_W, JOB, NOMINAL_W, UUIDS, FakeNode
from runflat.power.link import Link, Order
from runflat.power.wire import Failure, Reply, Request

WAIT_S = 20.0


class SlowPort:
    """An agent that answers only when the test lets it."""

    def __init__(self, node: FakeNode) -> None:
        self.node = node
        self.may_answer = threading.Event()
        self.asked: list[str] = []
        self.caller: set[str] = set()

    def ask(self, request: Request) -> Reply:
        self.asked.append(request.type)
        self.caller.add(threading.current_thread().name)
        assert self.may_answer.wait(WAIT_S)
        return self.node.agent.handle(JOB, request, self.node.now_s)


@pytest.fixture
def port(node: FakeNode) -> Iterator[SlowPort]:
    found = SlowPort(node)
    yield found
    found.may_answer.set()


def order(**limits_w: float) -> Order:
    return Order(group=1, devices=UUIDS, limits_w={f"GPU-{name}": watts for name, watts in limits_w.items()})


def test_nobody_waits_for_an_agent_that_does_not_answer(port: SlowPort) -> None:
    """Catches a controller that stands still with its agent, and looks that pile up behind one that hangs."""
    link = Link(port, 10.0, lambda: 5.0)
    for _ in range(100):
        link.look()
    assert link.outcomes() == []
    port.may_answer.set()
    assert link.finish(WAIT_S)
    (outcome,) = link.outcomes()
    assert port.asked == ["read"]
    assert threading.current_thread().name not in port.caller
    assert outcome.asked_at == 5.0
    assert [state.limit_w for state in outcome.devices] == [NOMINAL_W] * 3
    link.look()
    assert link.finish(WAIT_S)
    assert port.asked == ["read"] * 2
    link.close(WAIT_S)


def test_orders_keep_their_order_and_the_end_restores(port: SlowPort) -> None:
    """Catches a raise that overtakes a lower, and a run's end that leaves a limit or a lease behind."""
    link = Link(port, 10.0, lambda: 0.0)
    link.write([order(a=1100.0)])
    link.write([order(a=NOMINAL_W), order(b=1010.0)])
    link.renew(1)
    link.renew(2)
    port.may_answer.set()
    assert link.finish(WAIT_S)
    assert port.asked == ["acquire", "set", "set", "set", "renew"]
    assert port.node.written == [("GPU-a", 1100.0), ("GPU-a", NOMINAL_W), ("GPU-b", 1010.0)]
    assert [outcome.is_read_back for outcome in link.outcomes()] == [True] * 3
    link.close(WAIT_S)
    assert port.node.limits() == [NOMINAL_W] * 3
    assert port.asked[-1] == "release"


def test_what_fails_ends_the_rest_and_is_told(node: FakeNode) -> None:
    """Catches a raise that is carried out although the lower before it failed."""
    port = SlowPort(node)
    port.may_answer.set()
    link = Link(port, 10.0, lambda: 0.0, own_thread=False)
    link.write([order(a=CEILING_W + 1), order(b=1010.0)])
    assert node.written == []
    (outcome,) = link.outcomes()
    assert "replica 1: power limits were not set" in outcome.words[0]
    node.wait(11)
    link.write([order(a=1010.0)])  # the lease is over: said, and a new one next time
    link.write([order(a=1010.0)])
    assert [bool(outcome.words) for outcome in link.outcomes()] == [True, False]
    assert node.limits()[0] == 1010.0
    link.release(1)
    assert node.limits() == [NOMINAL_W] * 3


def test_a_bug_in_an_order_is_not_silent() -> None:
    """Catches an error that stays in the thread while the run goes on without a boost."""

    class Broken:
        def ask(self, request: Request) -> Reply:
            raise ZeroDivisionError

    link = Link(Broken(), 10.0)
    link.look()
    link.finish(WAIT_S)
    link.look()  # as each turn of a run does, before it asks what came of the last one
    with pytest.raises(ZeroDivisionError):
        link.outcomes()


def test_an_agent_that_is_gone_leaves_readings_to_get_old() -> None:
    """Catches an answer out of nothing: the policy's rule for old readings must come into force."""

    class Gone:
        def ask(self, request: Request) -> Reply:
            return Failure(error="unreachable", text="gone")

    link = Link(Gone(), 10.0)
    link.look()
    assert link.finish(WAIT_S)
    assert link.outcomes() == []
    link.close(WAIT_S)
