"""The worker's side of a return: feed a newcomer while training, or be one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from runflat.elastic.feed import Feeder, Link, LiveState
from runflat.elastic.frames import FeedError, Hello
from runflat.elastic.orders import Feed, Receive
from runflat.elastic.receive import Receiver, Target
from runflat.errors import RunError
from runflat.parallel.comms import CommsError
from runflat.parallel.move import replicated_slabs, unit_slabs
from runflat.parallel.sockets import GroupSockets
from runflat.plan.plan import Place, Plan, plan_from_wire
from runflat.train.engine import Engine
from runflat.train.step import StepResult

SELF_TEST_SIZE = 192


class Feeds:
    """What a device that trains sends to newcomers. `lock` is held by whoever changes or reads its state."""

    def __init__(self, engine: Engine, device_id: str, say: Callable[..., None], exempt: Callable[[int], object]):
        """Nobody is fed yet; `exempt` is told the sockets that an abort must not shut."""
        self._say = say
        self._keeps_up: dict[str, int] = {}
        self._works: dict[str, int] = {}
        self.lock = threading.Lock()
        self._engine = engine
        self._device_id = device_id
        self._exempt = exempt
        self._feeders: dict[str, Feeder] = {}

    def start(self, order: Feed) -> None:
        """Begin to feed `order.target`; call between steps."""
        engine = self._engine
        slabs = [slab for move in order.transfers for slab in unit_slabs(engine.spec, move.kind, move.start, move.stop)]
        if order.replicated:
            slabs += replicated_slabs(engine.spec)
        state = LiveState(engine.spec, engine.held, engine.params, engine.optimizer, self.lock)
        self.stop(order.target)
        self._keeps_up[order.target] = self._works[order.target] = order.generation
        self._feeders[order.target] = Feeder(
            state,
            slabs,
            Hello(source=self._device_id, token=order.token),
            order.address,
            engine.progress.step,
            engine.progress.optimizer_step,
            link=Link(self._rate(order.target)),
            exempt=self._exempt,
        )

    def _rate(self, target: str) -> float | None:
        """Bytes per second of the emulated link to `target`: the domain's inside a replica, else the network's."""
        declared = self._engine.job.emulated
        if declared is None:
            return None
        near = target.partition(":")[0] == self._device_id.partition(":")[0]
        return (declared.domain_bytes if near else None) or declared.network_bytes

    def after_commit(self, result: StepResult) -> None:
        """A step has been applied: what newcomers have of it goes after them. Call with `lock` held."""
        progress = self._engine.progress
        for target, feeder in self._feeders.items():
            feeder.after_commit(progress.step, progress.optimizer_step, result.lr, result.skipped)
            if target in self._keeps_up and feeder.progress.behind:
                self._say("behind", generation=self._keeps_up.pop(target), target=target)
            if target in self._works and feeder.error is not None:
                self._say("formfail", generation=self._works.pop(target), text=str(feeder.error))

    def stop(self, target: str) -> None:
        """Feed `target` no more."""
        feeder = self._feeders.pop(target, None)
        if feeder is not None:
            feeder.close()

    def stop_all(self) -> None:
        """Feed nobody any more."""
        for target in list(self._feeders):
            self.stop(target)


def own_place(plan: Plan, device: str) -> Place:
    """Where `device` is in `plan`, which was sent to it; RunError if it is not there."""
    place = plan.place(device)
    if place is None:
        raise RunError(f"{device} got a plan of generation {plan.generation} that has no place for it.")
    return place


class Newcomer:
    """A device that is being fed: its plan to come, and what it has received."""

    def __init__(self, engine: Engine, device_id: str, order: Receive, say: Callable[..., None], sockets: GroupSockets):
        """Listen for the sources of `order.plan`."""
        self.plan: Plan = plan_from_wire(order.plan)
        place = own_place(self.plan, device_id)
        self._engine = engine
        self._held = self.plan.replica(place[0]).held(engine.spec.kinds, place[1])
        target = Target(engine.spec, self._held, engine.settings, engine.dtype, engine.device)
        self._receiver = Receiver(
            target,
            order.token,
            self._on_fed,
            host=sockets.host,
            log=lambda text: say("remark", text=text),
            exempt=sockets.exempt.add,
        )
        self._say = say
        say("listening", generation=order.generation, address=list(self._receiver.address))

    def _on_fed(self, committed: int) -> None:
        fields = {"committed": committed, "bytes": self._receiver.received_bytes}
        self._say("fed", generation=self.plan.generation, **fields)

    def take_over(self, committed: int, timeout_s: float) -> int:
        """Wait for everything as of `committed` and make it this device's state; returns the bytes received.

        Raises:
            CommsError: a source was lost, or it took too long.
        """
        try:
            self._receiver.wait_for(committed, timeout_s)
            state, reached = self._receiver.state()
        except FeedError as error:
            raise CommsError(f"the units of the newcomer did not all arrive: {error}") from error
        if reached != committed:
            raise CommsError(f"the newcomer was fed as of step {reached}, the others stand at {committed}.")
        self._engine.adopt(self._held, state)
        return self._receiver.received_bytes

    def close(self) -> None:
        """Listen no more."""
        self._receiver.close()


def self_test(device: torch.device) -> str:
    """Empty if this device computes right, else what is wrong.

    A product of small whole numbers is exact in float32 whatever the order of summation, so it must equal the one in
    integers bit for bit.
    """
    generator = torch.Generator().manual_seed(1)
    shape = (SELF_TEST_SIZE, SELF_TEST_SIZE)
    left, right = (torch.randint(-8, 9, shape, generator=generator) for _ in range(2))
    product = (left.float().to(device) @ right.float().to(device)).cpu()
    wrong = int((product != (left @ right).float()).sum())
    return f"{wrong} of {product.numel()} elements of a fixed matrix product are wrong" if wrong else ""
