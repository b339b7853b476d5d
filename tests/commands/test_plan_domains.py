"""`runflat plan` on machines that may go as a whole."""

import json
from pathlib import Path
from typing import Any

import pytest

from runflat.cli import run

LLAMA = ["--model", "llama3-8b", "--tp", "4", "--replicas", "4"]


def domains(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    """Returns what the command's JSON says of domains."""
    assert run(["plan", *LLAMA, *argv, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["domains"]
    return found


def text(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Returns the command's words, in one line."""
    assert run(["plan", *LLAMA, *argv]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_replicas_are_packed_into_machines(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a replica on two machines, dead devices that are lost again, and a loss that is told too good."""
    first, second = domains(capsys, "--domain-size", "10", "--dead", "3:1")
    assert first["devices"] == [f"{replica}:{slot}" for replica in (0, 1) for slot in range(4)]
    assert first["replicas"] == [{"replica": number, "tp": 4, "tp_after": 0} for number in (0, 1)]
    assert second["replicas"][1] == {"replica": 3, "tp": 3, "tp_after": 0}
    assert (first["num_left"], first["lost_units"], first["goes_on"]) == (7, {}, True)
    assert domains(capsys) == []

    said = text(capsys, "--domain-size", "8")
    assert "- domain 0, domain 1: 8 devices, 2 replicas of TP 4 as a whole; all state is elsewhere too" in said
    assert "domain 0: 16 devices, 4 replicas of TP 4 as a whole; no device is left" in text(
        capsys, "--domain-size", "16"
    )
    assert "Domains:" not in text(capsys)


def test_machines_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a file that is read as something else, state that only one machine has, a replica over two machines."""
    path = tmp_path / "topology.json"
    path.write_text(json.dumps({"a": ["0", "1", "2", "3:0"], "b": ["3:1", "3:2"]}))
    a, b = domains(capsys, "--topology", str(path))
    assert not a["goes_on"]
    assert a["lost_units"]["head"] == list(range(8)), "those of slot 0; slots 1 and 2 are on b, nobody knows of 3:3"
    assert b["replicas"] == [{"replica": 3, "tp": 4, "tp_after": 2}]
    assert b["goes_on"]
    said = text(capsys, "--topology", str(path))
    assert "1 replica of TP 4 to TP 3; weights and moments are nowhere else: back to a copy in memory" in said
    assert "span domains, so that tensor parallelism crosses their borders: 3." in said


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--domain-size", "0"], "--domain-size is 0"),
        (["--domain-size", "3"], "exceeds the domain of 3"),
        (["--topology", "FILE"], "names '4:0', which this layout does not have"),
        (["--topology", "FILE", "--domain-size", "4"], "give one of them"),
    ],
)
def test_bad_flags(argv: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a mistake that becomes a traceback or a plan of something else."""
    path = tmp_path / "topology.json"
    path.write_text('{"a": ["4:0"]}')
    assert run(["plan", *LLAMA, *(str(path) if word == "FILE" else word for word in argv)]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
