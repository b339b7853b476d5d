"""`runflat train --launcher ray`, as far as it goes without a cluster: flags, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from runflat.cli import run as runflat
from runflat.commands.network import ControllerNetwork
from runflat.commands.on_ray import check_reach, default_needs, num_lines, resumed, split
from runflat.commands.ray_actors import ControllerActor, ControllerOrder, SeatActor, SeatOrder
from runflat.commands.watching import Watching
from runflat.config import LayoutSection, TrainConfig
from runflat.errors import ConfigError


def test_flags_of_the_launcher_are_taken_and_the_rest_is_left() -> None:
    """Catches a flag that is passed on to where nobody knows it, or one whose value is not read."""
    argv = "--launcher ray --address h:6379 --layout.tp 2 --per-device GPU=1,CPU=4 --pending-s=1.5 --listen lo:29500"
    flags, rest = split(argv.split())
    assert flags is not None
    assert rest == ["--layout.tp", "2"]
    assert (flags.address, flags.per_device, flags.pending_s) == ("h:6379", {"GPU": 1.0, "CPU": 4.0}, 1.5)
    assert (flags.network.host, flags.network.port) == ("127.0.0.1", 29500)
    plain, _ = split(["--launcher", "ray"])
    assert plain is not None
    assert (plain.address, plain.per_device, plain.network.host) == (None, None, "127.0.0.1")
    assert split(["--layout.tp", "2"]) == (None, ["--layout.tp", "2"])
    assert split(["--launcher=local"]) == (None, [])


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--launcher slurm", "local and ray"),
        ("--launcher ray --pending-s soon", "--pending-s"),
        ("--launcher ray --per-device GPU", "--per-device"),
        ("--launcher ray --address ray://head:10001", "ray job submit"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags: str, text: str) -> None:
    """Catches a mistake that becomes a traceback, or is not noticed."""
    with pytest.raises(ConfigError, match=text):
        split(flags.split())


def test_domains_are_not_for_ray(tmp_path: Path) -> None:
    """Catches a topology that is read and then not heeded."""
    (tmp_path / "t.json").write_text(json.dumps({"rack": ["n0"]}))
    with pytest.raises(ConfigError, match="--topology"):
        split(["--launcher", "ray", "--topology", str(tmp_path / "t.json")])


def test_without_ray_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an ImportError as an answer to a person who has not installed an extra."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else find(name, *rest))
    assert runflat(["train", "--launcher", "ray"]) == 2
    assert "'.[ray]'" in capsys.readouterr().err


@pytest.mark.needs_ray
def test_slots_that_are_dead_from_the_start_are_not_for_ray(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches dead slots that get an actor nevertheless."""
    assert runflat(["train", "--launcher", "ray", "--layout.tp", "2", "--layout.dead", "0:1"]) == 2
    assert "layout.dead" in capsys.readouterr().err


def test_nodes_that_cannot_call_the_controller_are_found_before_it_starts() -> None:
    """Catches a job that waits for actors that can never call."""
    nodes = [{"NodeID": "a", "NodeManagerAddress": "10.0.0.1"}, {"NodeID": "b", "NodeManagerAddress": "10.0.0.2"}]
    with pytest.raises(ConfigError, match=r"10\.0\.0\.2.*--listen 10\.0\.0\.1"):
        check_reach(nodes, "a", "127.0.0.1")
    check_reach(nodes, "a", "10.0.0.1")
    check_reach([nodes[0], {"NodeID": "c", "NodeManagerAddress": "10.0.0.1"}], "a", "127.0.0.1")


def test_a_device_needs_a_gpu_where_there_are_any() -> None:
    """Catches a job that takes CPUs of a GPU cluster, and one that waits for GPUs of a cluster without."""
    with_gpu, without = {"Resources": {"GPU": 8.0, "CPU": 4.0}}, {"Resources": {"CPU": 4.0}}
    emulated = TrainConfig.model_validate({"devices": "emulated", "device": {"rate_tflops": 1e-3}})
    assert default_needs([without, with_gpu], TrainConfig()) == {"GPU": 1.0}
    assert default_needs([without], TrainConfig()) == {"CPU": 1.0}
    assert default_needs([with_gpu], emulated) == {"CPU": 1.0}


def test_a_controller_that_starts_again_resumes(tmp_path: Path) -> None:
    """Catches a second controller that begins anew, injects the faults again, or counts no steps."""
    config = TrainConfig(run=tmp_path, inject=tmp_path / "faults.json", layout=LayoutSection(tp=2))
    again = resumed(config, tmp_path)
    assert (again.resume, again.run, again.inject, again.layout.tp) == (tmp_path, None, None, 2)
    TrainConfig.model_validate_json(again.model_dump_json())
    assert num_lines(tmp_path / "steps.jsonl") == 0
    (tmp_path / "steps.jsonl").write_text("{}\n{}\n")
    assert num_lines(tmp_path / "steps.jsonl") == 2


def test_actors_are_made_from_text(tmp_path: Path) -> None:
    """Catches an order that cannot be sent as text: nothing of ours is pickled."""
    seat = SeatOrder(device="1:0", rank=2, run=tmp_path, token_file=None, wait_s=1.0)
    assert repr(SeatActor(seat.model_dump_json())) == "runflat 1:0"
    network = ControllerNetwork(domains={}, token_file=tmp_path / "token")
    order = ControllerOrder(
        config=TrainConfig().model_dump_json(), run=tmp_path, network=network, watching=Watching(ray=True)
    )
    assert ControllerOrder.model_validate_json(order.model_dump_json()) == order
    assert repr(ControllerActor(order.model_dump_json())) == "runflat controller"
