"""What passes between workers and controller, counted: by the step, or by the change of plan, that it is about."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator

from runflat.elastic.fake_launcher import FakeLauncher, Fault
from runflat.elastic.launch_threads import PATIENCE, ThreadWorkers
from runflat.elastic.messages import Commit, Exited, Heartbeat, Message, Shard, StepReport, Suspect, parse_message
from runflat.elastic.orders import Order
from runflat.parallel.comms import Network
from runflat.train.job import Job

Heading = tuple[str, int, Message]


class Tally:
    """Numbers of messages and orders by type, and the bytes of orders."""

    def __init__(self) -> None:
        """Nobody has said anything."""
        self.of_step: dict[int, Counter[str]] = defaultdict(Counter)
        """What each step takes."""
        self.of_change: dict[int, Counter[str]] = defaultdict(Counter)
        """What each plan takes: orders and answers, by generation."""
        self.order_bytes: Counter[int] = Counter()
        """Bytes of the orders of each plan."""
        self.others: Counter[str] = Counter()
        """All else: heartbeats, starts and ends of processes, suspicions, shards."""

    def order(self, order: Order) -> None:
        """An order was given to one device."""
        generation = getattr(order, "generation", None)
        if generation is None:
            self.others[order.type] += 1
        else:
            self.of_change[generation][order.type] += 1
            self.order_bytes[generation] += len(order.encode())

    def message(self, message: Message) -> None:
        """A device has said something."""
        generation = getattr(message, "generation", None)
        if isinstance(message, Commit | StepReport):
            self.of_step[message.step][message.type] += 1
        elif generation is None or isinstance(message, Heartbeat | Suspect | Shard):
            self.others[message.type] += 1
        else:
            self.of_change[generation][message.type] += 1


class Counted(ThreadWorkers):
    """Workers as threads that are counted."""

    def __init__(self, job: Job, network: Network = PATIENCE):
        """As `ThreadWorkers`."""
        super().__init__(job, network)
        self.tally = Tally()
        self.cpu_s: dict[str, float] = {}
        """CPU seconds of this process when the first commit of a generation or of a step came, and the first exit."""

    def send(self, device: str, order: Order) -> None:
        """Count, and give the order."""
        self.tally.order(order)
        super().send(device, order)

    def messages(self, timeout_s: float) -> Iterator[Heading]:
        """What arrives, counted."""
        for device, incarnation, message in super().messages(timeout_s):
            self.tally.message(message)
            if isinstance(message, Commit):
                self.cpu_s.setdefault(f"step {message.step}", time.process_time())
                self.cpu_s.setdefault(f"generation {message.generation}", time.process_time())
            elif isinstance(message, Exited):
                self.cpu_s.setdefault("exit", time.process_time())
            yield device, incarnation, message


class Timed(FakeLauncher):
    """Workers that only talk, and the CPU seconds that the controller takes for each thing that it hears.

    Reading a message and writing an order are part of it, as if they came from a wire.
    """

    def __init__(self, num_steps: int, faults: tuple[Fault, ...] = ()):
        """As `FakeLauncher`."""
        super().__init__(num_steps, faults)
        self.tally = Tally()
        self.seconds: dict[str, float] = defaultdict(float)
        """CPU seconds by type of message; those between messages as "tick"."""
        self._left = time.process_time()

    def send(self, device: str, order: Order) -> None:
        """Count, and give the order."""
        order.encode()
        self.tally.order(order)
        super().send(device, order)

    def messages(self, timeout_s: float) -> Iterator[Heading]:
        """What arrives, timed until the controller asks for more."""
        self._book("tick")
        for device, incarnation, message in super().messages(timeout_s):
            self.tally.message(message)
            text = message.encode()
            self._left = time.process_time()
            parse_message(device, text)
            yield device, incarnation, message
            self._book(message.type)
        self._left = time.process_time()

    def _book(self, what: str) -> None:
        self.seconds[what] += time.process_time() - self._left
