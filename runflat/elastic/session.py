"""The life of one worker: take orders from the controller, work under plan after plan, in the same process.

The listener thread takes orders as they come. An abort acts at once from there: it wakes the main thread and shuts the
sockets of the generations that are to be left. All other orders wait in a queue for the main thread.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from safetensors import SafetensorError

from runflat.elastic.formation import Address, Formation, bury
from runflat.elastic.orders import Abort, Exit, Go, Order, PlanOrder, Prepare, Resume, Stop, Switch, Unprepare
from runflat.elastic.presence import Heart, Presence
from runflat.errors import RunError
from runflat.parallel.comms import AbortedError, CommsError, Interrupt, Network
from runflat.parallel.digest import compare, unit_digests
from runflat.parallel.move import NOTHING, Change, execute_transfers, read_state
from runflat.parallel.optimizer import learning_rate
from runflat.parallel.sockets import Sockets
from runflat.plan.plan import Place, Plan, plan_from_json
from runflat.plan.transfers import Transfer
from runflat.train.checkpoint import shard_to_json
from runflat.train.engine import Engine, Job, progress_json, worker_device
from runflat.train.step import Scalars

FORM_TIMEOUT_S = 5.0
FOREVER = 1 << 60
"""A generation above all: everything is to be left."""


class Channel(Protocol):
    """A worker's end of the connection to the controller."""

    def send(self, message: Mapping[str, Any]) -> None:
        """Deliver one JSON-ready message; nothing happens when the controller is gone."""

    def receive(self) -> Order | None:
        """The next order; None when the controller is gone."""


class Session:
    """One worker process (or thread, in tests)."""

    def __init__(self, job: Job, device_id: str, channel: Channel, store: Address, index: int):
        """`store` is where the process groups meet; `index` numbers the workers of this machine."""
        self.job = job
        self.device_id = device_id
        self.channel = channel
        self.store = store
        self.sockets = Sockets()
        self.presence = Presence()
        self.interrupt = Interrupt()
        self.network = Network(
            timeout_s=job.train.timeout_s,
            form_timeout_s=FORM_TIMEOUT_S,
            interrupt=self.interrupt,
            waiting=self._waiting,
        )
        self.orders: queue.Queue[Order | None] = queue.Queue()
        self.stop = threading.Event()
        self.orphaned = threading.Event()
        self.engine = Engine(job, worker_device(index), self._phase)
        self.base: Plan | None = None
        self.plan: Plan | None = None
        self.resume: Resume | None = None
        self.prepared: Formation | None = None
        self.switch: Switch | None = None
        self.last: tuple[int, Scalars] | None = None
        self.done_at: tuple[int, int] | None = None
        self.times: dict[str, float] = {}
        self._mark = time.monotonic()
        self._done: dict[str, tuple[int, int]] = {}

    # ---- threads beside the main one

    def listen(self) -> None:
        """Take orders until the controller is gone; runs in a thread of its own."""
        while (order := self.channel.receive()) is not None:
            if isinstance(order, Abort):
                self._leave_below(order.generation)
            elif isinstance(order, Stop):
                self.stop.set()
                continue
            elif isinstance(order, Switch):
                self.switch = order
                continue
            elif isinstance(order, Exit):
                self._leave_below(FOREVER)
            self.orders.put(order)
        self.orphaned.set()
        self.stop.set()
        self.orders.put(None)

    def _leave_below(self, generation: int) -> None:
        """Wake the main thread out of every older generation, whatever it waits for."""
        self._mark = time.monotonic()
        self.interrupt.leave_below(generation)
        for plan in (self.plan, self.prepared.plan if self.prepared else None):
            if plan is not None and plan.generation < generation:
                self.sockets.abort(plan.generation)

    def _waiting(self, what: str | None) -> None:
        self.presence.enter(self.presence.phase, what)

    def _phase(self, name: str) -> None:
        """The main thread begins phase `name`: say so, and let the injector strike."""
        self.presence.enter(name)

    def _say(self, kind: str, **fields: Any) -> None:
        self.channel.send({"type": kind, **fields})

    # ---- the main thread

    def run(self) -> None:
        """Work until the controller says `exit`, or is gone."""
        threading.Thread(target=self.listen, name="orders", daemon=True).start()
        heart = Heart(self.presence, self.channel.send)
        self._say("hello", pid=os.getpid())
        try:
            while (order := self._next()) is not None and not isinstance(order, Exit):
                self._obey(order)
            if order is None:
                self._save_orphaned()
        finally:
            heart.stop()

    def _next(self) -> Order | None:
        """The next order. The controller's end of the channel bounds the wait: when it closes, None comes."""
        self.presence.enter("idle", "an order of the controller")
        return self.orders.get()

    def _obey(self, order: Order) -> None:
        if isinstance(order, Abort):
            self._answer_abort(order)
        elif isinstance(order, PlanOrder):
            self._take_plan(order)
        elif isinstance(order, Go):
            self._go()
        elif isinstance(order, Prepare):
            self._prepare(order)
        elif isinstance(order, Unprepare):
            self._unprepare()

    def _lap(self, name: str) -> None:
        now = time.monotonic()
        self.times[name] = self.times.get(name, 0.0) + now - self._mark
        self._mark = now

    # ---- leaving a generation

    def _abandon(self) -> None:
        """Drop the groups in force; what a collective in flight may write to is never used again."""
        kept = self.engine.leave()
        if kept:
            comms = kept[0]
            self.sockets.abort(comms.generation)
            bury([comms.close], kept)
        self._unprepare()

    def _answer_abort(self, order: Abort) -> None:
        self.times = {}
        self._phase("detect")
        self._abandon()
        self._phase("abort")
        engine = self.engine
        self._lap("abort")
        self._say(
            "status",
            generation=order.generation,
            committed=engine.progress.step,
            complete=engine.final is not None,
            holds=self.base.generation if self.base else -1,
            scalars=self.last[1].to_list() if self.last else None,
        )

    # ---- entering one

    def _take_plan(self, order: PlanOrder) -> None:
        """Bring the state to where the plan starts, then report ready."""
        plan, resume, engine = plan_from_json(order.plan), order.resume, self.engine
        place = self._place(plan)
        self.plan, self.resume = plan, resume
        self.presence.generation = plan.generation
        if resume.action in ("start", "checkpoint"):
            self.presence.enter("copy")
            engine.build(plan, place, resume.checkpoint)
            self.base = plan
            # What the checkpoint's step asked for was done when it was saved.
            key = (engine.progress.step, plan.generation)
            self._done = {"holdout": key, "save": key}
        elif resume.action == "forward" and engine.progress.step == resume.committed - 1:
            assert resume.scalars is not None
            self._commit(Scalars(*resume.scalars))
        engine.final = None
        self._phase("barrier")
        self._lap("barrier")
        self._say("ready", generation=plan.generation)

    def _place(self, plan: Plan) -> Place:
        place = plan.place(self.device_id)
        if place is None:
            raise RunError(f"{self.device_id} got a plan of generation {plan.generation} that has no place for it.")
        return place

    def _go(self) -> None:
        """Form the groups of the plan taken, move what must move, compare, and train until something ends it."""
        assert self.plan is not None
        assert self.resume is not None
        moves = tuple(Transfer(**move.model_dump()) for move in self.resume.transfers)
        try:
            self._phase("form")
            formation = self._form(self.plan)
            try:
                comms = formation.wait()
            except (AbortedError, CommsError):
                formation.abandon()
                raise
            self._lap("form")
            self._say("formed", generation=self.plan.generation, form_s=formation.seconds)
            num_bytes = self._enter(self.plan, comms, moves)
            self._say("running", generation=self.plan.generation, bytes_moved=num_bytes, phases_s=self.times)
            self._train()
        except AbortedError:
            return  # the abort order is next in the queue
        except CommsError as error:
            self._suspect(error)

    def _suspect(self, error: CommsError) -> None:
        """A collective failed. That names nobody: report it and wait for what the controller makes of it."""
        assert self.plan is not None
        kind = "formfail" if self.presence.phase == "form" else "suspect"
        fields: dict[str, Any] = {"generation": self.plan.generation, "text": str(error)}
        if kind == "suspect":
            fields["phase"] = self.presence.phase
        self._say(kind, **fields)

    def _form(self, plan: Plan) -> Formation:
        engine = self.engine
        return Formation(
            plan,
            engine.layout(plan),
            self._place(plan),
            self.network,
            self.sockets,
            self.store,
            engine.device.type == "cuda",
        )

    def _enter(self, plan: Plan, comms: Any, moves: tuple[Transfer, ...]) -> int:
        """Move state to `plan`'s layout over its groups, compare digests; returns the bytes received."""
        engine, place = self.engine, self._place(plan)
        engine.join(comms)
        self._phase("transfer")
        old = self.base or plan
        num_bytes = 0
        if moves or old.generation != plan.generation:
            change = Change(engine.spec, old, plan, moves, self.device_id, engine.dtype, engine.device)
            state = read_state(engine.params, engine.optimizer) if self.base else NOTHING
            moved = execute_transfers(change, state, comms)
            engine.adopt(change.held(plan), moved.state)
            num_bytes = moved.received_bytes
        self.base = plan
        self._lap("transfer")
        self._phase("digest")
        engine.enter(plan, place, comms)
        self._compare(plan, comms)
        self._lap("digest")
        self.presence.generation = plan.generation
        return num_bytes

    def _compare(self, plan: Plan, comms: Any) -> None:
        engine = self.engine
        progress = engine.progress
        scalars = (float(progress.step), float(progress.optimizer_step), learning_rate(engine.settings, progress.step))
        state = read_state(engine.params, engine.optimizer)
        held = engine.held
        differ = compare(engine.spec, unit_digests(engine.spec, held, state.tensors, scalars), comms)
        if differ:
            units = [f"{kind} {unit}" for kind, unit in differ]
            self._say("mismatch", generation=plan.generation, units=units)
            raise CommsError(f"holders of {', '.join(units[:5])} do not have the same bits.")

    # ---- growth and orderly leaves: the next groups form while training goes on

    def _prepare(self, order: Prepare) -> None:
        plan = plan_from_json(order.plan)
        if plan.place(self.device_id) is not None:
            self._unprepare()
            self.prepared = self._form(plan)
            self.prepared_plan = plan
        self._watch_preparation(order.generation)

    def _watch_preparation(self, generation: int) -> None:
        """Report when the prepared groups are there, from a side thread: the main thread trains on."""
        formation = self.prepared

        def watch() -> None:
            try:
                if formation is not None:
                    formation.wait()
                self._say("prepared", generation=generation)
            except AbortedError:
                return
            except CommsError as error:
                self._say("formfail", generation=generation, text=str(error))

        threading.Thread(target=watch, name="prepare", daemon=True).start()

    def _unprepare(self) -> None:
        if self.prepared is not None:
            self.prepared.abandon()
        self.prepared = None
        self.switch = None

    # ---- training

    def _train(self) -> None:
        """Steps until the end, a stop, a switch, or an error of a collective."""
        assert self.plan is not None
        while True:
            self._poll()
            if self._due():
                return
            switched = self._step()
            if switched:
                self._go_over()
                if self.plan is None:
                    return

    def _poll(self) -> None:
        """Between steps: orders that act on side threads are taken up here."""
        self.interrupt.check(self.presence.generation)
        while True:
            try:
                order = self.orders.get_nowait()
            except queue.Empty:
                return
            if isinstance(order, Prepare | Unprepare):
                self._obey(order)
            elif order is not None:
                self.orders.put(order)
                return

    def _step(self) -> bool:
        """Run one step and report it; returns whether all devices agreed to switch after it."""
        engine = self.engine
        started = time.perf_counter()
        first, count = engine.samples()
        step = engine.progress.step
        engine.compute()
        computed = time.perf_counter()
        engine.finish()
        synced = time.perf_counter()
        scalars = engine.barrier(self.stop.is_set(), self.switch is not None)
        self.last = (step, scalars)
        generation = self.presence.generation
        if engine.reports:
            self._say("commit", generation=generation, step=step, scalars=scalars.to_list())
        result = self._commit(scalars)
        if engine.reports:
            assert engine.place is not None
            self._say(
                "step",
                generation=generation,
                step=step,
                replica=engine.place[0],
                first_sample=first,
                num_samples=count,
                **vars(replace(result, compute_s=computed - started, sync_s=synced - computed)),
                step_s=time.perf_counter() - started,
            )
        if scalars.stop > 0:
            self.done_at = (engine.progress.step, generation)
        return scalars.switch > 0

    def _commit(self, scalars: Scalars) -> Any:
        result = self.engine.commit(scalars)
        self.presence.committed = self.engine.progress.step
        return result

    def _go_over(self) -> None:
        """At the boundary: take up the prepared plan, or leave if it has no place for this device."""
        order, formation = self.switch, self.prepared
        self.switch = self.prepared = None
        assert order is not None
        committed = self.engine.progress.step
        self.times, self._mark = {}, time.monotonic()
        old = self.engine.leave()
        if formation is None:
            bury([old[0].close], old)
            self._say("switched", generation=order.generation, committed=committed)
            self.plan = None
            return
        self.plan = formation.plan
        comms = formation.wait()
        moves = tuple(Transfer(**move.model_dump()) for move in order.transfers)
        num_bytes = self._enter(formation.plan, comms, moves)
        bury([old[0].close], old)
        self._say(
            "switched",
            generation=order.generation,
            committed=committed,
            bytes_moved=num_bytes,
            phases_s=self.times,
        )

    # ---- held-out loss, checkpoints, the end

    def _due(self) -> bool:
        """Do what is due after the last step; returns whether training has ended here."""
        engine, train = self.engine, self.job.train
        step = engine.progress.step
        stopped = self.done_at is not None and self.done_at[0] == step
        last = stopped or step >= train.steps
        if self.orphaned.is_set() and last:
            return True
        if engine.corpus.num_holdout and step and (last or _every(train.eval_every, step)):
            self._once("holdout", lambda: self._say("holdout", step=step, loss=engine.holdout_loss()))
        if step and (last or _every(train.checkpoint_every, step)):
            self._once("save", self._save)
        if last:
            self._say("done", step=step, stopped=stopped and step < train.steps)
        return last

    def _once(self, what: str, act: Callable[[], None]) -> None:
        """Do `act` once per step and generation: after a recovery it is due again."""
        key = (self.engine.progress.step, self.presence.generation)
        if self._done.get(what) != key:
            act()
            self._done[what] = key

    def _save(self) -> None:
        """Write this device's shard and tell the controller, which alone publishes."""
        started = time.monotonic()
        fields: dict[str, Any] = {"progress": progress_json(self.engine.progress)}
        try:
            _, shard = self.engine.save()
            fields["shard"] = shard_to_json(shard)
        except (OSError, SafetensorError) as error:
            fields["error"] = str(error)
        self._say("shard", generation=self.presence.generation, seconds=time.monotonic() - started, **fields)

    def _save_orphaned(self) -> None:
        """The controller is gone: leave the state on disk, unpublished, for whoever resumes the run."""
        if self.engine.plan is not None and self.engine.progress.step:
            self._save()


def _every(interval: int, step: int) -> bool:
    return bool(interval) and step % interval == 0
