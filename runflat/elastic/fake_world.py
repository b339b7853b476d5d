"""The protocol and workers that only talk, joined under a fake clock."""

from __future__ import annotations

from collections.abc import Callable

from runflat.elastic.actions import Action, Begin, Finish, Happening, Heard, Kill, Send, Start, Tick
from runflat.elastic.fake_launcher import FakeLauncher
from runflat.elastic.fake_rules import Rules
from runflat.elastic.protocol import decide
from runflat.elastic.state import State
from runflat.elastic.watch import deadlines

TICK_S = 0.25


class World:
    """The protocol without its executor: a fault in any phase is tried in milliseconds.

    Every decision is held against the rules of `fake_rules`.
    """

    def __init__(self, state: State, launcher: FakeLauncher):
        """Nothing happens before `run` or `run_until`."""
        self.state = state
        self.launcher = launcher
        self.actions: list[tuple[float, Action]] = []
        """(when, what) of all that was decided."""
        self.finished: Finish | None = None
        self._begun = False
        self._rules = Rules()

    @property
    def now(self) -> float:
        """The fake clock."""
        return self.launcher.now

    def happen(self, happening: Happening) -> None:
        """Let the protocol decide, and do what it says."""
        if self.finished is not None:
            return
        before = self.state
        self.state, actions = decide(before, happening, self.now)
        self._rules.check(before, happening, self.state, actions, self.now)
        for action in actions:
            self.actions.append((self.now, action))
            self._act(action)

    def _act(self, action: Action) -> None:
        if isinstance(action, Send):
            self.launcher.send(action.device, action.order)
        elif isinstance(action, Kill):
            self.launcher.kill(action.device)
        elif isinstance(action, Start):
            self.launcher.start(action.device, action.incarnation)
        elif isinstance(action, Finish):
            self.finished = action

    def run(self, limit_s: float = 4000.0) -> Finish:
        """Run until the protocol is finished.

        Raises:
            AssertionError: it is not after `limit_s`, or a worker was told something that it must not do.
        """
        self.run_until(lambda: False, limit_s)
        assert self.finished is not None
        return self.finished

    def run_until(self, condition: Callable[[], bool], limit_s: float = 4000.0) -> State:
        """Run until `condition` holds, or the protocol is finished; returns its state."""
        if not self._begun:
            self._begun = True
            self.happen(Begin())
            self.launcher.later(TICK_S, self._tick)
        while self.finished is None and not condition():
            assert self.now < limit_s, f"silence in {self.state.stage}, waiting for {deadlines(self.state)[:3]}"
            self.launcher.advance()
            for device, incarnation, message in self.launcher.messages(0.0):
                if incarnation == self.state.devices[device].incarnation:
                    self.happen(Heard(device, message))
        return self.state

    def _tick(self) -> None:
        self.happen(Tick())
        if self.finished is None:
            self.launcher.later(TICK_S, self._tick)
