"""How controller and workers find each other: flags, environment, files of the run's folder."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from runflat.cli import run as runflat
from runflat.commands import worker
from runflat.commands.callers import by_rank
from runflat.commands.controller import parse_controller
from runflat.commands.network import announce, controller_token, find_controller, read_token, split
from runflat.commands.worker import number
from runflat.elastic.endpoint import Endpoint
from runflat.errors import ConfigError, RunError

SECRET = "a secret of some length"


def test_flags_of_the_network_are_taken_and_the_rest_is_left(tmp_path: Path) -> None:
    """Catches a flag that is passed on to where nobody knows it, or one whose value is not read."""
    topology = tmp_path / "topology.json"
    topology.write_text(json.dumps({"rack": ["n0"]}))
    argv = f"--listen lo:29500 --layout.tp 2 --store-port=29501 --span-domains --wait-s 1.5 --topology {topology}"
    flags, rest = split([*argv.split(), "--domain-size", "8"])
    assert rest == ["--layout.tp", "2"]
    assert (flags.host, flags.port, flags.store_port, flags.wait_s) == ("127.0.0.1", 29500, 29501, 1.5)
    assert (flags.may_span, flags.domain_size) == (True, 8)
    assert flags.domains == {"n0": "rack"}
    assert split([])[0].host == "127.0.0.1", "nothing listens elsewhere unless asked"
    for bad in ("--store-port 70000", "--wait-s soon", "--listen nowhere.invalid:1", "--listen", "--domain-size 0"):
        with pytest.raises(ConfigError, match=bad.split()[0]):
            split(bad.split())


def test_the_token_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    """Catches a token that is taken from elsewhere than said, one that all can read, and one that is printed."""
    file = tmp_path / "given"
    file.write_text(f"{SECRET}\n")
    assert read_token(file, None, {"RUNFLAT_TOKEN": "another secret, also long"}) == SECRET
    assert read_token(None, None, {"RUNFLAT_TOKEN_FILE": str(file)}) == SECRET
    assert read_token(None, tmp_path, {"RUNFLAT_TOKEN": SECRET}) == SECRET
    made = controller_token(None, tmp_path, {})
    assert len(made) >= 32
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert controller_token(None, tmp_path, {}) == made == read_token(None, tmp_path, {})
    file.write_text("short")
    with pytest.raises(ConfigError, match="5 characters") as refused:
        read_token(file, None, {})
    assert "short" not in str(refused.value).replace("too short", "")
    for run in (None, tmp_path / "none"):
        with pytest.raises(ConfigError, match="token"):
            read_token(None, run, {})


def test_where_the_controller_is(tmp_path: Path) -> None:
    """Catches a worker that calls somewhere else than the flag, the run's folder, or torchrun's variables say."""
    assert announce(tmp_path, Endpoint("::1", 29500)) == Endpoint("::1", 29500)
    assert find_controller(None, tmp_path, {}) == Endpoint("::1", 29500)
    assert find_controller("127.0.0.1:7", tmp_path, {}) == Endpoint("127.0.0.1", 7)
    for host in ("127.0.0.1", "::1"):
        assert find_controller(None, None, {"MASTER_ADDR": host, "MASTER_PORT": "7"}) == Endpoint(host, 7)
    assert announce(tmp_path, Endpoint("0.0.0.0", 29500)).host not in ("0.0.0.0", "")
    (tmp_path / "controller.json").write_text("{")
    for given, run in ((None, tmp_path), (None, None), ("nowhere.invalid:1", None)):
        with pytest.raises(ConfigError):
            find_controller(given, run, {})


def test_a_name_that_is_not_known_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a worker that ends because it is started before the controller's name is known, as pods may be."""

    def unknown(host: str, what: str) -> str:
        raise ConfigError(f"{what} {host} is not known")

    monkeypatch.setattr("runflat.commands.network.resolved", unknown)
    monkeypatch.setenv("RUNFLAT_TOKEN", "a token that is long enough for anybody")
    with pytest.raises(RunError, match="no controller for 0 s"):
        worker.main(["--rank", "0", "--controller", "job-0.job:29500", "--wait-s", "0"])


def test_the_rank_comes_from_a_flag_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a rank that is misread, and a worker without one that calls as somebody else."""
    assert number(3, "--rank", {"RANK": "5"}, ("RANK",)) == 3
    assert number(None, "--rank", {"SLURM_PROCID": "5"}, ("RANK", "SLURM_PROCID")) == 5
    assert number(None, "--rank", {}, ("RANK",)) is None
    for given, environment in ((-1, {}), (None, {"RANK": "x"})):
        with pytest.raises(ConfigError, match="it is a number from 0"):
            number(given, "--rank", environment, ("RANK",))
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert runflat(["worker", "--controller", "127.0.0.1:7"]) == 2
    assert "give --rank" in capsys.readouterr().err


def test_ranks_are_packed_where_the_size_of_a_node_is_told() -> None:
    """Catches a flag that nobody heeds: the third replica on two nodes."""
    layout = "--layout.tp 3 --layout.replicas 3 --spares 2 --on-failure spare,ntp,drop"
    config, flags, _ = parse_controller([*layout.split(), "--domain-size", "8"])
    assert by_rank(config, None)[6:9] == ("2:0", "2:1", "2:2")
    assert by_rank(config, flags.domain_size)[6:11] == ("s0", "s1", "2:0", "2:1", "2:2")
