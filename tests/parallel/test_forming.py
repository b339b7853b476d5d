"""Groups form within their time-out or fail within it, whoever is late or dies meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from runflat.check.live import until
from runflat.parallel.comms import CommsError, Group, Network

ROOT = Path(__file__).parents[2]
MEMBERS = ((0, 0), (0, 1))
DIES = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
from runflat.parallel.comms import Group, Network
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=30))
Group(7, "pair", ((0, 0), (0, 1)), (0, 1), store, Network(form_timeout_s=300.0))
"""


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


def test_a_member_may_come_late(store: TCPStore) -> None:
    """Catches the short time-out of one try of gloo counted against a member that is still on its way."""
    network = Network(form_timeout_s=5.0)
    formed: list[Group] = []

    def late() -> None:
        threading.Event().wait(1.5)  # longer than a try, shorter than the forming time-out
        client = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=30))
        formed.append(Group(7, "pair", MEMBERS, (0, 1), client, network))

    thread = threading.Thread(target=late)
    thread.start()
    formed.append(Group(7, "pair", MEMBERS, (0, 0), store, network))
    thread.join(10)
    assert len(formed) == 2


def test_a_member_that_never_comes_is_named_by_the_time_out(store: TCPStore) -> None:
    """Catches a wait without an end for a member that does not come."""
    with pytest.raises(CommsError, match="a group of 2 devices did not form"):
        Group(7, "pair", MEMBERS, (0, 0), store, Network(meet_timeout_s=0.5))


def test_who_was_there_in_an_older_generation_does_not_count(store: TCPStore) -> None:
    """Catches keys of an earlier life that stand for a member who is not there (pytorch#135712)."""
    for key in ("here/1", "0/0", "0/1"):
        store.set(f"generation6/pair/{key}", "of yesterday")
    with pytest.raises(CommsError, match="a group of 2 devices did not form"):
        Group(7, "pair", MEMBERS, (0, 0), store, Network(meet_timeout_s=0.3))


@pytest.mark.process
def test_a_member_that_dies_while_it_connects_holds_the_others_up_for_one_time_out(store: TCPStore) -> None:
    """Catches five time-outs in a row, in which no other groups can form and the job gives up."""
    with subprocess.Popen([sys.executable, "-c", DIES, str(store.port)], cwd=ROOT) as process:
        store.set("generation7/pair/here/0", "")
        until("the address of the one that dies", lambda: store.check(["generation7/pair/0/1"]), 50)
        process.kill()
    began = time.monotonic()
    with pytest.raises(CommsError):
        Group(7, "pair", MEMBERS, (0, 0), store, Network(form_timeout_s=3.0))
    assert time.monotonic() - began < 9.0, "3 s is one time-out, 15 s are five"
