"""What is asked of Ray, and what is made of its answers, with a stand-in for the package."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from runflat.elastic.launch_ray import Making, RayCluster, parse_needs, room, supervise
from runflat.elastic.ray_facts import (
    Ask,
    ControllerEnded,
    ControllerGone,
    Displaced,
    Drop,
    End,
    EndSeat,
    Failed,
    Gone,
    Happening,
    Interrupt,
    Over,
    Placed,
    Rules,
    StartController,
    StartSeat,
    Tick,
    Up,
)
from runflat.elastic.ray_site import open_site
from runflat.errors import ConfigError

NODE_A, NODE_B = "a" * 56, "b" * 56


class RayError(Exception):
    """Any error of Ray's."""


class RayTaskError(RayError):
    """An actor's code has failed."""

    cause = ValueError("no such file")


class Method:
    """A method of an actor: each call gives a reference that is ready when the test says so."""

    def __init__(self, actor: Actor, name: str):
        self._actor, self._name = actor, name

    def remote(self) -> str:
        return f"{self._actor.text} {self._name}"


class Actor:
    """An actor of the stand-in, named by the text that it was made from."""

    def __init__(self, text: str):
        self.text = text
        self.where, self.work = Method(self, "where"), Method(self, "work")


class FakeRay:
    """As much of Ray as is used: answers are put in, questions are written down."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.groups: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, Any]] = []
        self.alive: list[dict[str, Any]] = []
        self.util = types.SimpleNamespace(
            placement_group=self._group,
            remove_placement_group=lambda group: self.asked.append(("remove", group)),
            placement_group_table=lambda group: self.groups[group],
        )

    def _group(self, bundles: list[dict[str, float]], strategy: str, name: str) -> str:
        self.asked.append(("group", (bundles, strategy)))
        self.groups[name] = {}
        return name

    def remote(self, cls: type) -> Any:
        def options(**words: Any) -> Any:
            def make(text: str) -> Actor:
                self.asked.append(("actor", (cls, text, words)))
                return Actor(text)

            return types.SimpleNamespace(remote=make)

        return types.SimpleNamespace(options=options)

    def wait(self, references: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        ready = [reference for reference in references if reference in self.answers][:num_returns]
        return ready, [reference for reference in references if reference not in ready]

    def get(self, reference: str) -> str:
        answer = self.answers[reference]
        if isinstance(answer, Exception):
            raise answer
        return json.dumps(answer)

    def kill(self, actor: Actor, no_restart: bool) -> None:
        self.asked.append(("kill", actor.text))

    def nodes(self) -> list[dict[str, Any]]:
        return self.alive


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    """Returns a stand-in for the package, also where it is imported from."""
    strategies = {
        name: lambda *values, _name=name, **words: (_name, *values, *words.values())
        for name in ("PlacementGroupSchedulingStrategy", "NodeAffinitySchedulingStrategy")
    }
    for name, content in {
        "ray": {},
        "ray.exceptions": {"RayError": RayError, "RayTaskError": RayTaskError},
        "ray.util": {},
        "ray.util.scheduling_strategies": strategies,
    }.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return FakeRay()


class SeatClass:
    """Stands for the actor of a device."""


class ControllerClass:
    """Stands for the controller's actor."""


class Wall:
    """A clock that goes on by a second whenever it is read."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def cluster(ray: FakeRay, interrupted: list[int] | None = None, *, may_span: bool = False) -> RayCluster:
    """Returns a cluster whose actors are named by rank and life."""
    making = Making(
        seat_class=SeatClass,
        controller_class=ControllerClass,
        per_device={"GPU": 1.0, "CPU": 4.0, "rack": 0.5},
        seat_text=lambda action: f"{action.rank}.{action.life}",
        controller_text=lambda action: f"resume={action.resume}",
        committed=lambda: 7,
        may_span=may_span,
        node=NODE_A,
    )
    return RayCluster(ray, making, (interrupted if interrupted is not None else []).append, Wall())


def test_a_group_is_asked_for_on_one_node_and_its_nodes_are_told(ray: FakeRay) -> None:
    """Catches a replica over several nodes, a loss of a node that is not told, a request that is left behind."""
    made = cluster(ray)
    made.act(Ask("replica 0", 2))
    bundle = {"GPU": 1.0, "CPU": 4.0, "rack": 0.5}
    assert ray.asked == [("group", ([bundle, bundle], "STRICT_PACK"))]
    assert made.happenings(0.0) == [Tick()]
    (name,) = ray.groups
    ray.groups[name] = {"state": "CREATED", "bundles_to_node_id": {0: NODE_A, 1: NODE_A}}
    assert made.happenings(0.0) == [Placed("replica 0", (NODE_A[:8],)), Tick()]
    assert made.happenings(0.0) == [Tick()]
    ray.groups[name]["state"] = "RESCHEDULING"
    assert made.happenings(0.0) == [Displaced("replica 0"), Tick()]
    ray.groups[name] = {"state": "CREATED", "bundles_to_node_id": {0: NODE_B, 1: NODE_B}}
    assert made.happenings(0.0) == [Placed("replica 0", (NODE_B[:8],)), Tick()]
    made.act(Drop("replica 0"))
    assert ray.asked[-1] == ("remove", name)
    spanning = cluster(ray, may_span=True)
    spanning.act(Ask("replica 0", 2))
    assert ray.asked[-1] == ("group", ([bundle, bundle], "PACK"))


def test_what_becomes_of_an_actor_is_told_once(ray: FakeRay) -> None:
    """Catches an end that is not told or told twice, and an actor that holds its place after its work has failed."""
    made = cluster(ray)
    made.act(Ask("replica 0", 4))
    for rank in range(4):
        made.act(StartSeat(rank, 1, f"0:{rank}", "replica 0", rank))
    what, (cls, text, words) = ray.asked[2]
    assert (what, cls, text) == ("actor", SeatClass, "1.1")
    assert (words["num_gpus"], words["num_cpus"], words["resources"]) == (1.0, 4.0, {"rack": 0.5})
    assert words["scheduling_strategy"][-1] == 1, "its bundle"
    assert (words["max_restarts"], words["max_task_retries"]) == (0, 0), "who starts it again is the site"
    for rank in range(4):
        ray.answers[f"{rank}.1 where"] = {"node": "host/aaaaaaaa", "pid": 1}
    assert made.happenings(0.0)[:-1] == [Up(rank, 1, "host/aaaaaaaa") for rank in range(4)]
    ray.answers["0.1 work"] = RayError("\nThe actor died.\nMore.")
    ray.answers["1.1 work"] = RayTaskError("traceback")
    ray.answers["2.1 work"] = {"code": 1, "text": "no controller"}
    ray.answers["3.1 work"] = {"code": 0, "text": "the run is over"}
    told: list[Happening] = [
        Gone(0, 1, "The actor died."),
        Failed(1, 1, "no such file"),
        Failed(2, 1, "no controller"),
        Over(3, 1),
    ]
    assert made.happenings(0.0)[:-1] == told
    assert [text for what, text in ray.asked if what == "kill"] == ["0.1", "1.1", "2.1"]
    assert made.happenings(0.0) == [Tick()]
    made.act(EndSeat(3, 1))
    assert ray.asked[-1] == ("kill", "3.1")


def test_an_actor_that_dies_before_it_runs_is_lost_once(ray: FakeRay) -> None:
    """Catches two losses, of which the second would be charged to the next actor."""
    made = cluster(ray)
    made.act(Ask("replica 0", 1))
    made.act(StartSeat(0, 1, "0:0", "replica 0", 0))
    ray.answers |= {"0.1 where": RayError("gone"), "0.1 work": RayError("gone")}
    assert made.happenings(0.0)[:-1] == [Gone(0, 1, "gone")]


def test_the_controller_is_beside_the_driver_and_can_be_interrupted(ray: FakeRay) -> None:
    """Catches a controller elsewhere, where paths mean something else, a Ctrl-C that does not reach it."""
    interrupted: list[int] = []
    made = cluster(ray, interrupted)
    made.act(StartController(resume=False, wait_s=1.0))
    _, (cls, text, words) = ray.asked[-1]
    assert (cls, text, words["num_cpus"]) == (ControllerClass, "resume=False", 0)
    assert words["scheduling_strategy"] == ("NodeAffinitySchedulingStrategy", NODE_A, False)
    made.act(Interrupt())
    assert interrupted == [], "its process is not known yet"
    ray.answers["resume=False where"] = {"node": "n", "pid": 4711}
    made.happenings(0.0)
    made.act(Interrupt())
    assert interrupted == [4711]
    ray.answers["resume=False work"] = RayError("gone")
    assert made.happenings(0.0)[:-1] == [ControllerGone("gone", 7)]
    made.act(StartController(resume=True, wait_s=1.0))
    ray.answers["resume=True work"] = {"code": 130, "text": "stopped"}
    assert made.happenings(0.0)[:-1] == [ControllerEnded(130, "stopped")]


def test_a_job_from_its_first_request_to_its_end(ray: FakeRay) -> None:
    """Catches actors and requests that outlive a job, in Ray, where the next job needs their room."""
    made = cluster(ray)
    said: list[str] = []
    ray.answers |= {
        "resume=False where": {"node": "n", "pid": 1},
        "resume=False work": {"code": 0, "text": "finished at step 9"},
    }
    ray.util.placement_group_table = lambda group: {"state": "CREATED", "bundles_to_node_id": {0: NODE_A}}
    end = supervise(Rules(), open_site(("0:0",), ("s0",), 1), made, said.append, Wall(), lambda: 0)
    assert end == End(0, "finished at step 9")
    assert sorted(text for what, text in ray.asked if what == "kill") == ["0.1", "1.1", "resume=False"]
    assert len([group for what, group in ray.asked if what == "remove"]) == 2
    assert said[0] == f"replica 0: placed on {NODE_A[:8]}"


def test_room_is_what_a_node_has_less_what_we_hold() -> None:
    """Catches a replica that is asked for in a size that no node has, or that counts what it holds already."""
    nodes = [
        {"NodeID": "a", "Alive": True, "Resources": {"GPU": 8.0, "CPU": 16.0}},
        {"NodeID": "b", "Alive": True, "Resources": {"CPU": 64.0}},
        {"NodeID": "c", "Alive": False, "Resources": {"GPU": 8.0, "CPU": 64.0}},
    ]
    assert room(nodes, {"GPU": 1.0, "CPU": 4.0}, ["a", "a", "a"]) == (1, 0)


def test_needs_of_a_device() -> None:
    """Catches a need that is read wrong, or a mistake in it that becomes a traceback."""
    assert parse_needs("GPU=1, CPU=0.5") == {"GPU": 1.0, "CPU": 0.5}
    for bad in ("", "GPU", "GPU=", "GPU=0", "GPU=-1", "=1", "GPU=nan", "GPU=inf", "GPU=1,,"):
        with pytest.raises(ConfigError, match="--per-device"):
            parse_needs(bad)
