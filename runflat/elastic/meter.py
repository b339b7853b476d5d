"""The ledger of a live run: each device-second is charged as it passes, and charged again when it proves otherwise."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from runflat.cluster.ledger import Category, Ledger
from runflat.elastic.actions import Action, Closed, Grew, Opened, Planned, Took
from runflat.elastic.device import LIVE, Device, Standing
from runflat.elastic.state import Stage, State

REMEMBERED_STEPS = 4096


class Meter:
    """Charges time to categories. `advance` before each happening, `learn` with the actions after it."""

    def __init__(self, num_devices: int):
        """Start at second 0 of the run."""
        self._ledger = Ledger()
        self.num_devices = num_devices
        self._now = 0.0
        self._ran = False
        self._open: dict[str, float] = {}
        """Per device: seconds of the step in flight, productive so far."""
        self._in_flight_s = 0.0
        self._steps: deque[tuple[int, float]] = deque(maxlen=REMEMBERED_STEPS)
        """(step, productive device-seconds) of committed steps."""
        self._state: State | None = None
        """How the devices spent the time up to now that is not charged yet; None: there is none."""
        self._passed_s = 0.0

    @property
    def ledger(self) -> Ledger:
        """Where the time went up to the last `advance`."""
        self._charge()
        return self._ledger

    def advance(self, state: State, now: float) -> None:
        """Charge the time since the last call, which all devices spent as `state` says."""
        passed_s, self._now = max(now - self._now, 0.0), max(now, self._now)
        if self._state is not None and not self._alike(self._state, state):
            self._charge()
        self._state = state
        self._passed_s += passed_s

    def _alike(self, before: State, after: State) -> bool:
        """Whether both charge each device to the same category, as between most messages."""
        return before is after or (
            before.devices.standings is after.devices.standings
            and before.stage is after.stage
            and self._loads(before) == self._loads(after)
            and (
                after.stage is not Stage.FORM
                or before.formed is after.formed
                or before.all_in(before.formed) == after.all_in(after.formed)
            )
        )

    def _charge(self) -> None:
        """Charge what has passed, device by device."""
        state, passed_s = self._state, self._passed_s
        self._state, self._passed_s = None, 0.0
        if state is None:
            return
        has_formed = state.stage is Stage.FORM and state.all_in(state.formed)
        for device in state.devices.values():
            category = self._category(state, device, has_formed)
            self._ledger.charge(category, passed_s)
            if category is Category.PRODUCTIVE:
                self._open[device.name] = self._open.get(device.name, 0.0) + passed_s

    def _category(self, state: State, device: Device, has_formed: bool) -> Category:
        if device.standing in (Standing.LOST, Standing.OUT):
            return Category.FAILED
        if device.standing in (Standing.STANDBY, Standing.PARKED):
            return Category.IDLE
        if state.stage is Stage.PAUSE and device.standing in LIVE:
            return Category.PAUSE
        if not self._ran and not (device.healthy and device.standing is Standing.STARTING):
            return Category.START
        if self._loads(state) and (device.awaited or device.standing in LIVE):
            return Category.RESTART
        if device.standing is Standing.STARTING:
            return Category.IDLE if device.healthy else Category.FAILED
        if state.stage is Stage.FORM:
            return Category.TRANSFER if has_formed else Category.REFORM
        return Category.PRODUCTIVE if state.stage in (Stage.RUN, Stage.FINISHED) else Category.REFORM

    @staticmethod
    def _loads(state: State) -> bool:
        """Whether processes start again, or everybody loads."""
        return state.stage is Stage.START or (state.stage is Stage.READY and state.loading)

    def learn(self, before: State, action: Action) -> None:
        """Charge again what an action shows to have been something else; `before` is the state that it followed."""
        if isinstance(action, Opened | Planned | Took | Closed | Grew):
            self._charge()
        if isinstance(action, Opened):
            detect_s = dict(action.disturbance.phases_s).get("detect", 0.0)
            for name in self._open:
                part = min(detect_s, self._open[name])
                self._move(Category.PRODUCTIVE, Category.DETECT, part)
                self._in_flight_s += self._open[name] - part
            self._open.clear()
        elif isinstance(action, Planned):
            if action.resume.action != "forward":
                self._move(Category.PRODUCTIVE, Category.REPLAY, self._in_flight_s)
            self._in_flight_s = 0.0
            while self._steps and self._steps[-1][0] >= action.resume.committed:
                self._move(Category.PRODUCTIVE, Category.REPLAY, self._steps.pop()[1])
        elif isinstance(action, Took):
            self._ran = True
        elif isinstance(action, Closed):
            members = len(action.devices) and sum(d.standing in LIVE for d in before.devices.values())
            self._move(Category.TRANSFER, Category.REFORM, action.incident.phases_s.get("digest", 0.0) * members)
        elif isinstance(action, Grew):
            self._move(Category.PRODUCTIVE, Category.REFORM, action.stopped_s * len(action.growth.everyone))

    def committed(self, step: int) -> None:
        """The step in flight is committed: what it took was productive."""
        self._charge()
        self._steps.append((step, sum(self._open.values())))
        self._open.clear()

    def imbalance(self, waited_s: Mapping[int, float], degrees: Mapping[int, int]) -> None:
        """Replicas waited for slower ones in a committed step: seconds per replica, and its degree."""
        for replica, seconds in waited_s.items():
            self._move(Category.PRODUCTIVE, Category.IMBALANCE, seconds * degrees.get(replica, 0))

    def saved(self, seconds: float) -> None:
        """A device stood still for `seconds` to write its part of a checkpoint."""
        self._move(Category.PRODUCTIVE, Category.CHECKPOINT, seconds)

    def _move(self, source: Category, target: Category, device_s: float) -> None:
        """As much as there is: what a worker measured may exceed what was charged here by clock noise."""
        self._charge()
        self._ledger.move(source, target, min(device_s, self._ledger.device_s[source]))
