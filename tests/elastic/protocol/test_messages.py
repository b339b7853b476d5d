"""What goes over the wire: checked on arrival, and an error says who sent what."""

import json
import math

import pytest

from runflat.elastic.messages import Commit, Failed, Hello, parse_message
from runflat.elastic.orders import Move, PlanOrder, Resume, parse_order
from runflat.errors import RunError

BAD = {
    "not JSON": (b"{type: hello}", "Expecting property name"),
    "not text": (b"\xff", "utf-8"),
    "no object": (b"[1, 2]", "valid dictionary"),
    "no type": (b'{"pid": 1}', "type"),
    "unknown type": (b'{"type": "hallo", "pid": 1}', "hallo"),
    "missing field": (b'{"type": "hello", "pid": 1}', "incarnation"),
    "wrong type of a field": (b'{"type": "hello", "pid": "x", "incarnation": 0}', "hello.pid"),
    "field of nobody": (b'{"type": "hello", "pid": 1, "incarnation": 0, "mood": 1}', "mood"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_message_names_its_sender_and_shows_itself(case: str) -> None:
    """Catches a message that is half understood, or a traceback in place of words."""
    text, part = BAD[case]
    with pytest.raises(RunError) as info:
        parse_message("1:2", text)
    assert "worker 1:2 sent" in str(info.value)
    assert part in str(info.value)
    assert repr(text)[:20] in str(info.value)


def test_a_bad_order_is_refused_too() -> None:
    """Catches a worker that takes a message for an order."""
    with pytest.raises(RunError, match="the controller sent"):
        parse_order(Hello(pid=1, incarnation=0).encode())


def test_orders_and_messages_survive_the_wire() -> None:
    """Catches a field that is lost or renamed on the way, such as `class`."""
    move = Move(kind="head", start=1, stop=3, source="0:1", target="1:2", num_bytes=7)
    resume = Resume(action="forward", committed=4, scalars=(0.1, float("inf")), transfers=(move,))
    order = PlanOrder(generation=3, plan="{}", resume=resume)
    assert parse_order(order.encode()) == order
    failed = Failed(incarnation=2, cause="other", class_name="ValueError", text="t", traceback="tb")
    assert parse_message("0:0", failed.encode()) == failed
    assert json.loads(failed.encode())["class"] == "ValueError"


def test_a_loss_that_is_no_number_gets_through() -> None:
    """Catches NaN, which a skipped step has, turning into null on the way."""
    text = b'{"type": "commit", "generation": 0, "step": 1, "scalars": [NaN], "incarnation": 0}'
    message = parse_message("0:0", text)
    assert isinstance(message, Commit)
    assert math.isnan(message.scalars[0])
