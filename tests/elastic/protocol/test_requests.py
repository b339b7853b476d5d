"""Requests as files: whole, answered once, and refused in words."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runflat.commands import device as device_command
from runflat.commands import devices as devices_command
from runflat.elastic import requests
from runflat.elastic.requests import Inbox, ask, is_running, read_devices, write_whole
from runflat.errors import ConfigError, RunError

ROW = {"replica": 1, "slot": 2, "pid": 1, "incarnation": 0, "committed": 3, "phase": "sync", "waits_for": "all-reduce"}
ROW |= {"failures": 0, "restart_in_s": None, "cause": ""}


def write_devices(run: Path, **fields: Any) -> None:
    lost = ROW | {"device": "1:3", "state": "lost", "replica": None, "slot": None, "failures": 2, "restart_in_s": 3.6}
    rows = [ROW | {"device": "1:2", "state": "active"}, lost | {"cause": "killed by signal 9 (SIGKILL)"}]
    data = {"controller_pid": os.getpid(), "finished": False, "time_s": 1.0, "stage": "run", "generation": 4, "step": 7}
    write_whole(run / "devices.json", data | {"devices": rows} | fields)


def test_a_request_is_taken_once_and_answered(tmp_path: Path) -> None:
    """Catches a wish that is granted twice, or whose answer goes to somebody else."""
    inbox = Inbox(tmp_path)
    write_devices(tmp_path)
    taken = []

    def answer(_: float) -> None:
        for request, wish in inbox.take():
            taken.append((wish.action, wish.device))
            inbox.reply(request, ok=True, text=f"{wish.device} it is")

    assert ask(tmp_path, "drain", "1:2", answer) == (True, "1:2 it is")
    assert taken == [("drain", "1:2")]
    assert inbox.take() == []


def test_requests_to_an_earlier_life_are_forgotten(tmp_path: Path) -> None:
    """Catches a kill that strikes the run that was resumed a day later."""
    Inbox(tmp_path)
    (tmp_path / "requests" / "old.json").write_text('{"action": "kill", "device": "1:2"}')
    assert Inbox(tmp_path).take() == []


def test_nonsense_is_answered_too(tmp_path: Path) -> None:
    """Catches a file that stops the controller, or is left unanswered."""
    inbox = Inbox(tmp_path)
    (tmp_path / "requests" / "a.json").write_text('{"action": "dance", "device": "1:2"}')
    (tmp_path / "requests" / "b.json").write_text("{")
    assert inbox.take() == []
    for name in ("a", "b"):
        assert not json.loads((tmp_path / "requests" / f"{name}.reply.json").read_text())["ok"]


def test_no_answer_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    """Catches a command that hangs when the controller is stuck."""
    Inbox(tmp_path)
    write_devices(tmp_path)
    waited: list[float] = []
    with pytest.raises(RunError, match="no answer within 15 s"):
        ask(tmp_path, "kill", "1:2", waited.append)
    assert sum(waited) == pytest.approx(requests.PATIENCE_S)


def test_who_runs_and_who_does_not(tmp_path: Path) -> None:
    """Catches a request to a controller that is dead, finished or never was."""
    write_devices(tmp_path)
    assert is_running(read_devices(tmp_path))
    write_devices(tmp_path, finished=True)
    assert not is_running(read_devices(tmp_path))
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    write_devices(tmp_path, controller_pid=done.pid)
    assert not is_running(read_devices(tmp_path))
    with pytest.raises(ConfigError, match="is no run of this version"):
        read_devices(tmp_path / "nowhere")


def test_the_table_shows_who_waits_for_what_and_why_a_device_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a list from which one cannot see what is wrong."""
    write_devices(tmp_path)
    assert devices_command.main([str(tmp_path)]) == 0
    head, _, active, lost = capsys.readouterr().out.splitlines()
    assert head == "step 7, generation 4, running"
    assert active.split() == ["1:2", "active", "1:2", "sync,", "waits", "for", "all-reduce"]
    assert lost.split(maxsplit=3)[:3] == ["1:3", "lost", "2"]
    assert lost.endswith("killed by signal 9 (SIGKILL); starts again in 4 s")
    assert devices_command.main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"][1]["state"] == "lost"


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_a_refusal_is_the_commands_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ok: bool, code: int
) -> None:
    """Catches a script that takes a refused drain for a done one."""
    monkeypatch.setattr(device_command, "ask", lambda run, action, device, sleep: (ok, f"{action} {device}"))
    assert device_command.main([str(tmp_path), "1:2", "drain"]) == code
    printed = capsys.readouterr()
    assert "drain 1:2" in (printed.out if ok else printed.err)
