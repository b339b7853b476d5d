"""The life of one worker: take orders from the controller, work under plan after plan, in the same process.

The listener thread takes orders as they come. An abort acts at once from there: it wakes the main thread and shuts the
sockets of the generations that are to be left. All other orders wait in a queue for the main thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from runflat.cluster.events import Event, event_to_json
from runflat.elastic.agree import agree
from runflat.elastic.bringing import bring
from runflat.elastic.copies import Copies
from runflat.elastic.duties import Duties, every
from runflat.elastic.formation import FORM_PER_DEVICE_S, PATIENCE, Address, Formation, drop
from runflat.elastic.inbox import Channel, Inbox
from runflat.elastic.inject import Striker
from runflat.elastic.inspection import Inspection
from runflat.elastic.joining import own_place, self_test
from runflat.elastic.orders import Abort, Exit, Go, Order, PlanOrder, Receive, Resume, Switch
from runflat.elastic.presence import Heart, Presence
from runflat.elastic.prospects import ORDERS, Prospects
from runflat.elastic.stepping import Step
from runflat.elastic.strike import announce_pid, suffer
from runflat.parallel.comms import AbortedError, CommsError, Interrupt, Network
from runflat.parallel.sockets import GroupSockets, Sockets
from runflat.plan.plan import Plan, plan_from_wire
from runflat.train.engine import Engine
from runflat.train.job import Job, timeline_of, worker_device
from runflat.train.room import memory_short
from runflat.train.step import Scalars, StepResult


class Session:
    """One worker process (or thread, in tests)."""

    def __init__(
        self,
        job: Job,
        device_id: str,
        channel: Channel,
        store: Address,
        index: int,
        returning: bool = False,
        sockets: GroupSockets | None = None,
        suffer: Callable[[Event, Path, Engine], None] = suffer,
        network: Network = PATIENCE,
    ):
        """`store` is where the process groups meet; `index` numbers the workers of this machine.

        `returning`: the device has been here before, or is a spare: it tests itself before it may join. `sockets` are
        those of a process that sessions share, `suffer` is what injected events do, `network` has time-outs of forming.
        """
        self.returning = returning
        self.job = job
        self.device_id = device_id
        self.channel = channel
        self.store = store
        self.sockets: GroupSockets = sockets or Sockets()
        self._suffer = suffer
        self.presence = Presence()
        self.interrupt = Interrupt()
        device = worker_device(index, job.emulated is not None)
        timeline = timeline_of(job, device_id, device)
        self.network = replace(
            network,
            timeout_s=job.train.timeout_s,
            form_timeout_s=network.form_timeout_s + job.tp_full * job.replicas * FORM_PER_DEVICE_S,
            interrupt=self.interrupt,
            waiting=self.presence.waits,
            waited=self.presence.waited,
            launched=timeline.launched if timeline else None,
        )
        self.striker = Striker(job.inject, device_id)
        self.inbox = Inbox(channel, self._leave_below, self.striker.add)
        self.engine = Engine(job, device, self._phase, timeline)
        self.inspection = Inspection(self.engine, self.say)
        self.duties = Duties(self.engine, self.say, self._phase, self.inspection.before_save, self.interrupt)
        self.base: Plan | None = None
        self.recalled: Plan | None = None
        self.plan: Plan | None = None
        self.resume: Resume | None = None
        self.prospects = Prospects(self.engine, device_id, self._form, self.say, self.sockets)
        self.copies = Copies(self.engine, device_id, store, self.sockets, self.say) if job.train.memory_every else None
        self.healed = False
        self.last: Scalars | None = None
        self.stop_at: int | None = None
        self.times: dict[str, float] = {}
        self._mark = time.monotonic()

    # ---- threads beside the main one

    def _leave_below(self, generation: int) -> None:
        """Wake the main thread out of every older generation, whatever it waits for."""
        self._mark = time.monotonic()
        self.interrupt.leave_below(generation)
        prepared = self.prospects.formation
        for plan in (self.plan, prepared.plan if prepared else None):
            if plan is not None and plan.generation < generation:
                self.sockets.abort(plan.generation)

    def _phase(self, name: str) -> None:
        """The main thread begins phase `name`: say so, and let the injector strike."""
        self.presence.enter(name)
        for event in self.striker.at(self.engine.progress.step, name):
            self.say("struck", event=event_to_json(event))
            self._suffer(event, Path(self.job.run), self.engine)

    def say(self, kind: str, **fields: Any) -> None:
        """Send one message to the controller."""
        self.channel.send({"type": kind, **fields})

    # ---- the main thread

    def run(self) -> None:
        """Train with runflat's own loop until the controller says `exit`, or is gone."""
        for step in self.steps():
            with step:
                step.compute()

    def steps(self) -> Iterator[Step]:
        """The steps that this device takes part in, under plan after plan; each is to be run inside `with step:`.

        A step that could not commit because a device was lost comes again. Ends when the controller says `exit`, or is
        gone.
        """
        self.inbox.start()
        heart = Heart(self.presence, self.channel.send)
        announce_pid(Path(self.job.run), self.device_id)
        try:
            self._phase("import")
            self.say("hello", pid=os.getpid())
            if self.returning:
                self._phase("selftest")
                problem = self_test(self.engine.device)
                self.engine.warm_up()
                self.say("selftested", ok=not problem, text=problem)
            while (order := self._next()) is not None and not isinstance(order, Exit):
                if isinstance(order, Go):
                    yield from self._until_left(self._form_and_train())
                elif isinstance(order, Switch):
                    yield from self._until_left(self._join(order))
                else:
                    self._obey(order)
            self.duties.end(self.presence.generation, abandoned=order is None)
        finally:
            heart.stop()

    def _next(self) -> Order | None:
        """The next order. The controller's end of the channel bounds the wait: when it closes, None comes."""
        self.presence.enter("idle", "an order of the controller")
        return self.inbox.next()

    def _obey(self, order: Order) -> None:
        if isinstance(order, Abort):
            self._answer_abort(order)
        elif isinstance(order, PlanOrder):
            self._take_plan(order)
        elif isinstance(order, ORDERS):
            if isinstance(order, Receive):
                self._phase("copy")
            self.prospects.obey(order)

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
            drop(kept, self.sockets)
        self.prospects.forget_all()
        self.inbox.switch = None

    def close(self) -> None:
        """Let go of everything that outlives the main thread, where the process goes on."""
        self._abandon()
        if self.copies is not None:
            self.copies.close()

    def _answer_abort(self, order: Abort) -> None:
        self.times = {}
        self._phase("detect")
        self._abandon()
        self._phase("abort")
        engine = self.engine
        self._lap("abort")
        self.say(
            "status",
            generation=order.generation,
            committed=engine.progress.step,
            complete=engine.final is not None,
            holds=self.base.generation if self.base else -1,
            gathered=engine.gathered,
            scalars=self.last.to_list() if self.last else None,
            memory=self.copies.listing() if self.copies else [],
        )

    # ---- entering one

    def _take_plan(self, order: PlanOrder) -> None:
        """Bring the state to where the plan starts, then report ready."""
        plan, resume, engine = plan_from_wire(order.plan), order.resume, self.engine
        place = own_place(plan, self.device_id)
        short = memory_short(engine, plan, place)
        if short is not None:
            self.say("lowmem", generation=plan.generation, need_bytes=short[0], free_bytes=short[1])
            return
        if self.plan is None:
            self._mark = time.monotonic()  # no generation was left for it
        self.plan, self.resume, self.stop_at = plan, resume, resume.committed if resume.stop else self.stop_at
        self.presence.generation = plan.generation
        self.healed = self.device_id in resume.healed
        self.recalled = None
        if resume.back or self.healed:
            engine.restore_settings()
        if self.copies is not None and (resume.back or resume.healed):
            # What is healed now may have been copied with wrong bits.
            self.copies.forget_after(resume.committed - bool(resume.healed), plan.generation)
        if resume.action in ("start", "checkpoint"):
            self.presence.enter("copy")
            engine.build(plan, place, resume.checkpoint)
            self.base = plan
            self.duties.excuse(plan.generation)
        elif resume.action == "memory":
            self._recall(resume.committed)
        elif resume.action == "forward" and self.base and engine.progress.step == resume.committed - 1:
            assert resume.scalars is not None
            self._apply(Scalars(*resume.scalars))
            self._keep_copy()
        engine.final = None
        self._phase("barrier")
        self._lap("barrier")
        self.say("ready", generation=plan.generation)

    def _recall(self, step: int) -> None:
        """Go back to what there is in memory of `step`: this device's own state, and copies of others."""
        found = self.copies.combined(step) if self.copies else None
        self.base = None  # what it has now is no shard of any plan: it must not be asked for it
        if found is not None:
            self.recalled, self.engine.progress = found.plan, found.progress
            self.engine.adopt(found.plan.held(self.engine.spec.kinds, self.device_id), found.state, found.layout.kept)
            self.presence.committed = step

    def _until_left(self, steps: Iterator[Step]) -> Iterator[Step]:
        """`steps`, until they end or the generation is left."""
        try:
            yield from steps
        except AbortedError:
            return  # the abort order is next in the queue
        except CommsError as error:
            self._suspect(error)

    def _join(self, order: Switch) -> Iterator[Step]:
        """A newcomer goes over to the prepared plan together with all the others."""
        formation = self.prospects.formation
        if formation is None or order is not self.inbox.switch:
            return  # of a change that was given up meanwhile
        self.plan = formation.plan
        self.presence.generation = self.plan.generation
        self._phase("join")
        self._go_over()
        yield from self._train()

    def _form_and_train(self) -> Iterator[Step]:
        """Form the groups of the plan taken, move what must move, compare, and train until something ends it."""
        assert self.plan is not None
        assert self.resume is not None
        self._phase("form")
        formation = self._form(self.plan)
        try:
            comms = formation.wait()
        except (AbortedError, CommsError):
            formation.abandon()
            raise
        self._lap("form")
        self.say("formed", generation=self.plan.generation, form_s=formation.seconds)
        num_bytes = self._enter(self.plan, comms, self.resume)
        self.say("running", generation=self.plan.generation, bytes_moved=num_bytes, phases_s=self.times)
        yield from self._train()

    def _suspect(self, error: CommsError) -> None:
        """A collective failed. That names nobody: report it and wait for what the controller makes of it."""
        assert self.plan is not None
        forming, phase = self.presence.phase == "form", {"phase": self.presence.phase}
        fields = {"generation": self.plan.generation, "text": str(error), **({} if forming else phase)}
        self.say("formfail" if forming else "suspect", **fields)

    def _form(self, plan: Plan) -> Formation:
        engine = self.engine
        place, layout = own_place(plan, self.device_id), engine.layout(plan)
        return Formation(plan, layout, place, self.network, self.sockets, self.store, engine.device)

    def _enter(self, plan: Plan, comms: Any, order: Resume | Switch) -> int:
        """Move state to `plan`'s layout as `order` says, over its groups, and compare; returns the bytes received."""
        engine, place = self.engine, own_place(plan, self.device_id)
        engine.join(comms)
        self._phase("transfer")
        healed, self.healed = self.healed, False
        engine.progress = agree(comms, engine.progress if (self.base or self.recalled) and not healed else None)
        num_bytes = 0
        if self.prospects.newcomer is not None:
            num_bytes = self.prospects.newcomer.take_over(engine.progress.step, self.network.timeout_s)
            self.base = plan
        num_bytes += bring(engine, self.device_id, self.base or self.recalled, plan, order, comms, healed=healed)
        self.base, self.recalled = plan, None
        self._lap("transfer")
        self._phase("digest")
        engine.enter(plan, place, comms)
        self.inspection.compare()
        if self.copies is not None:
            self.copies.learn(plan)
        self._lap("digest")
        self.prospects.forget_all()
        self.presence.generation = plan.generation
        self.presence.committed = engine.progress.step
        return num_bytes

    # ---- training

    def _train(self) -> Iterator[Step]:
        """Steps until the end, a stop, a leave, or an error of a collective."""
        while self.plan is not None:
            self._poll()
            if self.duties.fulfil(self.presence.generation, self.stop_at):
                return
            step = Step(self, self.presence.generation)
            yield step
            scalars = step.outcome()
            if scalars.stop > 0:
                self.stop_at = self.engine.progress.step
            if scalars.all_switch:
                self._go_over()

    def _poll(self) -> None:
        """Between steps: leave if that is due, and take up orders that act beside training."""
        self.interrupt.check(self.presence.generation)
        while (order := self.inbox.poll((*ORDERS, Switch))) is not None:
            if isinstance(order, ORDERS):
                self.prospects.obey(order)

    def wishes(self) -> tuple[bool, bool]:
        """Whether this device wants to stop, and to switch, after the step in flight."""
        return self.inbox.stop.is_set(), self.inbox.switch is not None

    def commit(self, scalars: Scalars) -> StepResult:
        """Apply the step whose gradients are final, and get what others update; CommsError: one of them was lost."""
        result = self._apply(scalars)
        self.engine.gather()
        self._keep_copy()
        return result

    def _apply(self, scalars: Scalars) -> StepResult:
        """Apply the step whose gradients are final."""
        self.last = scalars
        with self.prospects.feeds.lock:
            result = self.engine.commit(scalars)
            self.prospects.feeds.after_commit(result)
        self.presence.committed = self.engine.progress.step
        return result

    def _keep_copy(self) -> None:
        """Keep the state in memory, if that is due and all of it is of the last step."""
        due = self.engine.gathered and every(self.job.train.memory_every, self.presence.committed)
        if due and self.copies is not None and self.base:
            self.copies.snapshot(self.base)

    def _go_over(self) -> None:
        """At the boundary: take up the prepared plan, or leave if it has no place for this device."""
        order, formation = self.inbox.switch, self.prospects.take_groups()
        self.inbox.switch = None
        assert order is not None
        committed = self.engine.progress.step
        self.times, self._mark = {}, time.monotonic()
        old = self.engine.leave()
        if formation is None:
            drop(old, self.sockets)
            self.say("switched", generation=order.generation, committed=committed)
            self.plan = None
            return
        self.plan = formation.plan
        num_bytes = self._enter(formation.plan, formation.wait(), order)
        drop(old, self.sockets)
        moved = {"bytes_moved": num_bytes, "phases_s": self.times}
        self.say("switched", generation=order.generation, committed=committed, **moved)
