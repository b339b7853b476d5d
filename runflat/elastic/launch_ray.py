"""A job's site on Ray: placement groups, one actor per device, the controller's actor; `ray_site` decides.

What crosses Ray's channels is text: the constructor of each actor takes JSON, each method returns JSON.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from runflat.elastic.ray_facts import (
    Action,
    Ask,
    Begin,
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
    Say,
    Site,
    StartController,
    StartSeat,
    StopAsked,
    Tick,
    Up,
)
from runflat.elastic.ray_site import decide
from runflat.errors import ConfigError

POLL_S = 0.5
LOOK_EVERY_S = 1.0
"""Between two looks at groups and nodes, which Ray's head node answers."""
LEAVE_S = 15.0
"""How long actors may take to end when the run is over."""
CONTROLLER = "controller"
ID_DIGITS = 8
"""Of the id of a node, for people and as part of the domain's name."""


class Cluster(Protocol):
    """What the site asks of Ray."""

    def act(self, action: Action) -> None:
        """Carry out an action."""

    def happenings(self, timeout_s: float) -> list[Happening]:
        """What has happened since the last call; waits at most `timeout_s` for the first."""

    def close(self, grace_s: float) -> None:
        """End all actors, at once or after `grace_s` in which they do so, and give their room back."""


def supervise(
    rules: Rules,
    site: Site,
    cluster: Cluster,
    say: Callable[[str], None],
    clock: Callable[[], float],
    interrupts: Callable[[], int],
) -> End:
    """Run a job to its end, and say how it ended; `interrupts` counts how often a person wanted that."""
    heard = 0
    due: list[Happening] = [Begin()]
    grace_s = 0.0
    try:
        while True:
            for happening in due:
                site, actions = decide(rules, site, happening, clock())
                for action in actions:
                    if isinstance(action, Say):
                        say(action.text)
                    elif isinstance(action, End):
                        grace_s = LEAVE_S if site.running else 0.0
                        return action
                    else:
                        cluster.act(action)
            due = cluster.happenings(POLL_S)
            if interrupts() > heard:
                heard = interrupts()
                due.append(StopAsked())
    finally:
        cluster.close(grace_s)


@dataclass(frozen=True)
class Making:
    """How actors are made: classes, what a device needs (`{"GPU": 1}`), and the text for the constructor of each."""

    seat_class: type
    controller_class: type
    per_device: Mapping[str, float]
    seat_text: Callable[[StartSeat], str]
    controller_text: Callable[[StartController], str]
    committed: Callable[[], int]
    """Steps in the books of the run."""
    may_span: bool = False
    node: str = ""
    """Id of the driver's node, where the controller is: they share the command line's paths."""


class RayCluster:
    """The cluster that `ray.init` has connected this process with."""

    def __init__(self, ray: Any, making: Making, interrupt: Callable[[int], None], clock: Callable[[], float]):
        """Nothing is asked for yet; `ray` is the module, `interrupt` interrupts a process of this machine."""
        self._ray = ray
        self._making = making
        self._interrupt = interrupt
        self._clock = clock
        self._run = secrets.token_hex(4)
        self._num_groups = 0
        self._groups: dict[str, Any] = {}
        self._placed: dict[str, tuple[str, ...]] = {}
        self._actors: dict[tuple[int, int], Any] = {}
        self._controller: Any = None
        self._controller_pid: int | None = None
        self._waits: dict[Any, tuple[str, int, int]] = {}
        """What each reference that is not ready yet will tell: of which kind, of which seat and life."""
        self._looked_at = clock() - LOOK_EVERY_S
        self._nothing = threading.Event()

    # ---- what the site asks

    def act(self, action: Action) -> None:
        """Carry out an action."""
        if isinstance(action, Ask):
            self._ask(action)
        elif isinstance(action, Drop):
            self._ray.util.remove_placement_group(self._groups.pop(action.group))
            self._placed.pop(action.group, None)
        elif isinstance(action, StartSeat):
            self._start_seat(action)
        elif isinstance(action, EndSeat):
            actor = self._actors.pop((action.rank, action.life), None)
            if actor is not None:
                self._ray.kill(actor, no_restart=True)
        elif isinstance(action, StartController):
            self._start_controller(action)
        elif isinstance(action, Interrupt) and self._controller_pid is not None:
            self._interrupt(self._controller_pid)

    def happenings(self, timeout_s: float) -> list[Happening]:
        """What has happened since the last call; the last one is a tick."""
        found: list[Happening] = []
        ready: list[Any] = []
        if not self._waits:
            self._nothing.wait(timeout_s)
        elif self._ray.wait(list(self._waits), num_returns=1, timeout=timeout_s)[0]:
            ready, _ = self._ray.wait(list(self._waits), num_returns=len(self._waits), timeout=0)
        for reference in ready:
            found += self._told(reference, *self._waits.pop(reference))
        room: tuple[int, ...] = ()
        if self._clock() - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = self._clock()
            found += self._look_at_groups()
            room = self._room()
        return [*found, Tick(room)]

    def close(self, grace_s: float) -> None:
        """End all actors, at once or after `grace_s` in which they do so, and give their room back."""
        left = [reference for reference, (kind, *_) in self._waits.items() if kind == "work"]
        if left and grace_s:
            self._ray.wait(left, num_returns=len(left), timeout=grace_s)
        for actor in [*self._actors.values(), *([self._controller] if self._controller is not None else [])]:
            self._ray.kill(actor, no_restart=True)
        for group in self._groups.values():
            self._ray.util.remove_placement_group(group)

    # ---- what is asked of Ray

    def _ask(self, action: Ask) -> None:
        self._num_groups += 1
        name = f"runflat-{self._run}-{action.group.replace(' ', '-')}-{self._num_groups}"
        strategy = "PACK" if self._making.may_span else "STRICT_PACK"
        bundles = [dict(self._making.per_device) for _ in range(action.size)]
        self._groups[action.group] = self._ray.util.placement_group(bundles, strategy=strategy, name=name)

    def _start_seat(self, action: StartSeat) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        need = dict(self._making.per_device)
        actor_class = self._ray.remote(self._making.seat_class).options(
            name=f"runflat-{self._run}-{action.device}-{action.life}",
            num_cpus=need.pop("CPU", 0),
            num_gpus=need.pop("GPU", 0),
            resources=need,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self._groups[action.group], placement_group_bundle_index=action.bundle
            ),
        )
        actor = actor_class.remote(self._making.seat_text(action))
        self._actors[action.rank, action.life] = actor
        self._await(actor, action.rank, action.life)

    def _start_controller(self, action: StartController) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor_class = self._ray.remote(self._making.controller_class).options(
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(self._making.node, soft=False),
        )
        self._controller = actor_class.remote(self._making.controller_text(action))
        self._controller_pid = None
        self._await(self._controller, -1, 0)

    def _await(self, actor: Any, rank: int, life: int) -> None:
        kind = CONTROLLER if rank < 0 else "seat"
        self._waits[actor.where.remote()] = (f"{kind} up", rank, life)
        self._waits[actor.work.remote()] = ("work", rank, life)

    # ---- what Ray tells

    def _told(self, reference: Any, kind: str, rank: int, life: int) -> Iterator[Happening]:
        from ray.exceptions import RayError, RayTaskError

        try:
            text = self._ray.get(reference)
        except RayTaskError as error:
            if kind == "work":
                yield self._failed(rank, life, str(error.cause or error))
            return
        except RayError as error:
            if kind == "work":  # of both references of an actor this one tells its end
                yield self._lost(rank, life, first_line(str(error)))
            return
        told: dict[str, Any] = json.loads(text)
        if kind == f"{CONTROLLER} up":
            self._controller_pid = int(told["pid"])
        elif kind == "seat up":
            yield Up(rank, life, str(told["node"]))
        elif rank < 0:
            yield ControllerEnded(int(told["code"]), str(told["text"]))
        elif told["code"]:
            yield self._failed(rank, life, str(told["text"]))
        else:
            yield Over(rank, life)

    def _failed(self, rank: int, life: int, text: str) -> Happening:
        if rank < 0:
            return ControllerEnded(1, f"the controller's actor failed: {text}")
        self._end(rank, life)
        return Failed(rank, life, text)

    def _lost(self, rank: int, life: int, text: str) -> Happening:
        if rank < 0:
            self._controller = None
            return ControllerGone(text, self._making.committed())
        self._end(rank, life)
        return Gone(rank, life, text)

    def _end(self, rank: int, life: int) -> None:
        """Make sure that nothing is left of an actor: its bundle is for the next one."""
        actor = self._actors.pop((rank, life), None)
        if actor is not None:
            self._ray.kill(actor, no_restart=True)

    def _look_at_groups(self) -> Iterator[Happening]:
        for name, group in self._groups.items():
            row = self._ray.util.placement_group_table(group)
            before = self._placed.get(name)
            if row.get("state") == "CREATED":
                nodes = tuple(row["bundles_to_node_id"].values())
                if before != nodes:
                    self._placed[name] = nodes
                    yield Placed(name, tuple(sorted({node[:ID_DIGITS] for node in nodes})))
            elif before is not None:
                del self._placed[name]
                yield Displaced(name)

    def _room(self) -> tuple[int, ...]:
        held = [node for nodes in self._placed.values() for node in nodes]
        return room(self._ray.nodes(), self._making.per_device, held)


def room(nodes: list[dict[str, Any]], per_device: Mapping[str, float], held: list[str]) -> tuple[int, ...]:
    """How many more devices each living node could hold beside those of ours, of which `held` names the nodes."""
    return tuple(
        int(min(node["Resources"].get(name, 0) // number for name, number in per_device.items()))
        - held.count(node["NodeID"])
        for node in nodes
        if node["Alive"]
    )


def first_line(text: str) -> str:
    """The first line of a message, for a log."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")


def parse_needs(text: str) -> dict[str, float]:
    """What a device needs, from NAME=NUMBER,NAME=NUMBER.

    Raises:
        ConfigError: it is written otherwise.
    """
    needs: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            needs[name.strip()] = float(number)
        except ValueError:
            needs = {}
            break
    if not needs or not all(name and 0 < number < 1e9 for name, number in needs.items()):
        raise ConfigError(
            f"--per-device is {text!r}; it says what Ray is to give each device, such as GPU=1 or GPU=1,CPU=4."
        )
    return needs
