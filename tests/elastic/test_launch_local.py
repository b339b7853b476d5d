"""Processes of workers, without a job."""

from types import SimpleNamespace
from typing import Any

import pytest
from deaf_worker import deaf_worker

from runflat.elastic import launch_local
from runflat.elastic.launch_local import LocalWorkers
from runflat.elastic.messages import Exited


@pytest.mark.process
def test_a_process_that_hangs_up_and_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a process that nobody knows any more when the run ends, and that outlives it."""
    monkeypatch.setattr(launch_local, "worker_process", deaf_worker)
    monkeypatch.setattr(launch_local, "END_TIMEOUT_S", 0.5)
    job: Any = SimpleNamespace(hf_config={"model_type": "llama"}, model_dump_json=lambda: "{}")
    workers = LocalWorkers(job)
    try:
        workers.start("0:0", 1)
        process = workers._processes["0:0", 1]
        ((device, incarnation, said),) = workers.messages(60)
        assert (device, incarnation, type(said)) == ("0:0", 1, Exited)
        assert not process.is_alive()
    finally:
        workers.close()
