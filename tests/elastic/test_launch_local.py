"""Processes of workers, without a job."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from deaf_worker import LONG_S, deaf_worker

from runflat.check.live import until
from runflat.elastic import launch_local
from runflat.elastic.launch_local import LocalWorkers
from runflat.elastic.messages import Exited, Hello

pytestmark = pytest.mark.process


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalWorkers]:
    """Returns a launcher whose processes hang up and stay; only 0:1 says hello."""
    monkeypatch.setattr(launch_local, "worker_process", deaf_worker)
    job: Any = SimpleNamespace(hf_config={"model_type": "llama"}, model_dump_json=lambda: "{}")
    made = LocalWorkers(job)
    yield made
    made.close()


def test_a_process_that_hangs_up_and_does_not_end_is_killed(
    workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a process that nobody knows any more when the run ends, and that outlives it."""
    monkeypatch.setattr(launch_local, "END_TIMEOUT_S", 0.5)
    workers.start("0:0", 1)
    process = workers._processes["0:0", 1]
    heard: list[Any] = []
    until("its end", lambda: heard.extend(workers.messages(0.1)) or heard)
    ((device, incarnation, said),) = heard
    assert (device, incarnation, said) == ("0:0", 1, Exited(incarnation=1, code=-9))
    assert not process.is_alive()


def test_nobody_waits_for_a_process_that_takes_its_time_to_end(
    workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a controller that is deaf to all while a driver takes back the device of a process that is gone."""
    monkeypatch.setattr(launch_local, "END_TIMEOUT_S", LONG_S)
    workers.start("0:0", 1)
    until("the end of its channel", lambda: not list(workers.messages(0.1)) and workers._ending)
    workers.start("0:1", 1)
    heard: list[Any] = []
    until("another one's message", lambda: heard.extend(workers.messages(0.1)) or heard)
    assert heard == [("0:1", 1, Hello(incarnation=1, pid=1))]
    workers.kill("0:0")
    until("the end of the first", lambda: heard.extend(workers.messages(0.1)) or len(heard) > 1)
    assert heard[1] == ("0:0", 1, Exited(incarnation=1, code=-9))
