"""Copies in memory: every so many steps each device keeps its state, and gives a copy to a device elsewhere.

They serve when some unit has no live holder: everybody goes back to the newest step of which all units can be put
together from what devices have. The copy goes to a device elsewhere (`plan.buddies`), in the background.
Two steps are kept, so that an incomplete newer copy never replaces a complete older one.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore

from runflat.elastic.formation import Address
from runflat.elastic.frames import Connection, Copy, FeedError, Hello, inode, payload_tensors
from runflat.elastic.listener import Listener, introduce
from runflat.elastic.side_thread import start_thread
from runflat.errors import RunError
from runflat.parallel.move import Held, ShardState, Slab, relayout_param, slab_view
from runflat.parallel.move_pieces import Layout
from runflat.parallel.sockets import GroupSockets
from runflat.parallel.staging import host_copy
from runflat.plan.buddies import buddy
from runflat.plan.piece_moves import union
from runflat.plan.plan import Plan, ReplicaPlan
from runflat.plan.units import TENSORS, ModelSpec, ParamSpec
from runflat.train.checkpoint import Progress
from runflat.train.engine import Engine

NUM_KEPT = 2
TIMEOUT_S = 30.0
HELLO_S = 5.0
POLL_S = 0.5


@dataclass(frozen=True)
class Kept:
    """What `device` held of step `progress.step` under `plan`; `tensors` as in `ShardState`, on the CPU."""

    device: str
    plan: Plan
    progress: Progress
    tensors: Mapping[str, Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Recalled:
    """What a device has of an older step: its own copy and those of others, in one state.

    `plan` gives this device the units of all copies; `layout` says how the state lies.
    """

    plan: Plan
    layout: Layout
    state: ShardState
    progress: Progress


class Copies:
    """The copies that one device has, and the threads that give and take them."""

    def __init__(self, engine: Engine, device_id: str, store: Address, sockets: GroupSockets, say: Callable[..., None]):
        """Listen for copies, and say where; `sockets` says on which address, and what an abort spares.

        `say` tells the controller of strangers who were refused.
        """
        self._engine = engine
        self._device_id = device_id
        self._exempt = sockets.exempt.add
        self._plans: dict[int, Plan] = {}
        self._kept: dict[str, deque[Kept]] = defaultdict(lambda: deque(maxlen=NUM_KEPT))
        self._lock = threading.Lock()
        self._outgoing: queue.Queue[Kept] = queue.Queue()
        self._void = (0, -1)
        token = secrets.token_hex(16)
        self._store = TCPStore(store[0], store[1], is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
        self._listener = Listener(
            "copies",
            token,
            self._serve,
            hello_s=HELLO_S,
            timeout_s=TIMEOUT_S,
            host=sockets.host,
            exempt=self._exempt,
            log=lambda text: say("remark", text=text),
        )
        host, port = self._listener.address
        self._store.set(f"copies/{device_id}", f"{host} {port} {token}")
        self._closed = False
        start_thread("copies out", self._give)

    # ---- the main thread

    def snapshot(self, plan: Plan) -> None:
        """Keep this device's state as of now, and have a copy brought to its buddy."""
        engine = self._engine
        state = engine.state()
        tensors = {
            kind: {name: host_copy(tensor) for name, tensor in named.items()} for kind, named in state.tensors.items()
        }
        kept = Kept(self._device_id, plan, engine.progress, tensors)
        self.learn(plan)
        with self._lock:
            self._kept[self._device_id].append(kept)
        self._outgoing.put(kept)

    def learn(self, plan: Plan) -> None:
        """`plan` is in force: copies of its generation may come."""
        with self._lock:
            self._plans[plan.generation] = plan
            for old in sorted(self._plans)[: -2 * NUM_KEPT]:
                del self._plans[old]

    def forget_after(self, step: int, generation: int) -> None:
        """The run goes on from `step` under `generation`: what older generations have of later steps is void."""
        with self._lock:
            self._void = (step, generation)
            for device, copies in self._kept.items():
                self._kept[device] = deque((kept for kept in copies if not self._is_void(kept)), maxlen=NUM_KEPT)

    def _is_void(self, kept: Kept) -> bool:
        step, generation = self._void
        return kept.progress.step > step and kept.plan.generation < generation

    def listing(self) -> list[dict[str, Any]]:
        """(device, step, generation) of every copy here, this device's own among them."""
        with self._lock:
            return [
                {"device": device, "step": kept.progress.step, "generation": kept.plan.generation}
                for device, copies in self._kept.items()
                for kept in copies
            ]

    def combined(self, step: int) -> Recalled | None:
        """All that this device has of `step`, in one; None if it has nothing of it.

        The plan is that of its own copy (or of the first it has), with the units of all copies in this device's slot.
        """
        with self._lock:
            found = [kept for copies in self._kept.values() for kept in copies if kept.progress.step == step]
        found.sort(key=lambda kept: kept.device != self._device_id)
        if not found:
            return None
        spec, first = self._engine.spec, found[0]
        held: dict[str, set[int]] = defaultdict(set)
        received: dict[str, dict[str, dict[Slab, torch.Tensor]]] = {kind: defaultdict(dict) for kind in TENSORS}
        layouts = [self._layout(kept.plan, kept.device) for kept in found]
        for kept, layout in zip(found, layouts, strict=True):
            for kind, units in layout.held.items():
                held[kind].update(units)
            for kind, param, _ in layout.written(spec):
                slabs = _slabs(spec, param, layout.of(kind, param), kept.tensors[kind][param.name])
                received[kind][param.name].update(slabs)
        joined = Layout(
            {kind: tuple(sorted(units)) for kind, units in held.items()}, union(layout.kept for layout in layouts)
        )
        device = self._engine.device
        tensors: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in TENSORS}
        for kind, param, _ in joined.written(spec):
            nothing: Held = dict.fromkeys(param.kinds, ())
            parts = received[kind][param.name]
            whole = relayout_param(spec, param, nothing, joined.of(kind, param), None, parts)
            tensors[kind][param.name] = whole.to(device)
        plan = _with_units(first.plan, first.device, self._device_id, joined.held)
        return Recalled(plan, joined, ShardState(tensors, first.progress.optimizer_step), first.progress)

    def _layout(self, plan: Plan, device: str) -> Layout:
        """How the state of `device` lies under `plan`."""
        engine = self._engine
        held = plan.held(engine.spec.kinds, device)
        place = plan.place(device)
        if not engine.zero1 or place is None:
            return Layout.alike(engine.spec, held)
        return Layout(held, engine.ownership(plan).kept(place))

    def close(self) -> None:
        """Listen no more."""
        self._closed = True
        self._listener.close()

    # ---- giving

    def _give(self) -> None:
        while not self._closed:
            with contextlib.suppress(queue.Empty):
                kept = self._outgoing.get(timeout=POLL_S)
                # A buddy that is gone gets nothing; the copies of the step are then incomplete and never used.
                with contextlib.suppress(RunError, OSError, RuntimeError):
                    self._send(kept)

    def _send(self, kept: Kept) -> None:
        place = kept.plan.place(self._device_id)
        target = buddy(kept.plan, place) if place is not None else None
        if target is None:
            return
        host, port, token = self._store.get(f"copies/{kept.plan.device(target)}").decode().split()
        with socket.create_connection((host, int(port)), TIMEOUT_S) as connected:
            self._exempt(inode(connected))
            connection = Connection(connected, kept.plan.device(target), TIMEOUT_S)
            introduce(connection, Hello(source=self._device_id, token=token), TIMEOUT_S)
            layout = self._layout(kept.plan, kept.device)
            tensors = [kept.tensors[kind][param.name] for kind, param, _ in layout.written(self._engine.spec)]
            frame = Copy(device=kept.device, generation=kept.plan.generation, progress=asdict(kept.progress))
            connection.send(frame, tensors)
            connection.receive()  # the other end closes when it has it

    # ---- taking

    def _serve(self, connection: Connection, source: str) -> None:
        with contextlib.suppress(RunError):  # a copy that did not come whole is none
            self._take(connection, source)

    def _take(self, connection: Connection, source: str) -> None:
        frame, payload = connection.receive()
        if not isinstance(frame, Copy):
            raise FeedError(f"{source} sends no copy.")
        with self._lock:
            plan = self._plans.get(frame.generation)
        if plan is None or plan.place(frame.device) is None:
            raise FeedError(f"{source} sends a copy of generation {frame.generation}, which is not known here.")
        kept = Kept(frame.device, plan, Progress(**frame.progress), self._tensors(plan, frame.device, payload))
        with self._lock:
            if not self._is_void(kept):
                self._kept[frame.device].append(kept)

    def _tensors(self, plan: Plan, device: str, payload: bytearray) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors of a copy, which lie in the payload by parameter and kind."""
        spec, dtype = self._engine.spec, self._engine.dtype
        found: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in TENSORS}
        position = 0
        for kind, param, shape in self._layout(plan, device).written(spec):
            size = torch.Size(shape).numel() * dtype.itemsize
            (found[kind][param.name],) = payload_tensors(payload[position : position + size], shape, 1, dtype)
            position += size
        return found


def _slabs(spec: ModelSpec, param: ParamSpec, held: Held, tensor: torch.Tensor) -> dict[Slab, torch.Tensor]:
    """A tensor unit by unit; that of a replicated parameter whole."""
    if param.dim is None:
        return {Slab(param.name): tensor}
    return {
        slab: slab_view(spec, param, slab, held, tensor)
        for index, segment in enumerate(param.segments)
        for unit in held[segment.kind]
        for slab in (Slab(param.name, index, unit, unit + 1),)
    }


def _with_units(plan: Plan, seat: str, device: str, held: Held) -> Plan:
    """`plan` with `device` in the place of `seat`, holding the units `held`."""
    place = plan.place(seat)
    assert place is not None

    def changed(replica: ReplicaPlan) -> ReplicaPlan:
        if replica.replica != place[0]:
            return replica
        devices = tuple(device if slot == place[1] else name for slot, name in enumerate(replica.devices))
        assignments = tuple(
            (kind, tuple(tuple(held[kind]) if slot == place[1] else units for slot, units in enumerate(assignment)))
            for kind, assignment in replica.assignments
        )
        return replace(replica, devices=devices, assignments=assignments)

    return replace(plan, replicas=tuple(changed(replica) for replica in plan.replicas))
