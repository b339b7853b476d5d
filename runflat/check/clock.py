"""A clock that only a test moves: threads that sleep on it stand still until their time has come."""

from __future__ import annotations

import threading
from collections.abc import Callable

LOST_S = 20.0  # real seconds after which a test that does not move the clock on is told so
_LOOK_S = 0.005


class ManualClock:
    """Time for one thread that works and sleeps. `clock` and `sleep` are what code takes in place of the real ones."""

    def __init__(self) -> None:
        """It is 0 o'clock."""
        self._now = 0.0
        self._wake_at: float | None = None
        self._num_woken = 0
        self._open = False
        self._change = threading.Condition()

    def clock(self) -> float:
        """Seconds now."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Return when the clock has been moved on by `seconds`, or was opened.

        Raises:
            TimeoutError: nobody moves the clock.
        """
        with self._change:
            wake_at = self._wake_at = self._now + seconds
            self._change.notify_all()
            woken = self._change.wait_for(lambda: self._open or self._now >= wake_at, LOST_S)
            self._wake_at = None
            self._num_woken += 1
            self._change.notify_all()
        if not woken:
            raise TimeoutError(f"nobody has moved the clock on to {wake_at:.3f} s")

    def open(self) -> None:
        """Let the sleeper go, and everybody after it: no sleep takes time any more."""
        with self._change:
            self._open = True
            self._change.notify_all()

    def run_until(self, time_s: float, resting: Callable[[], bool]) -> None:
        """Move on to `time_s` from sleep to sleep; `resting` tells that the thread has nothing to do.

        Raises:
            TimeoutError: the thread neither sleeps nor rests.
        """
        with self._change:
            while True:
                for _ in range(int(LOST_S / _LOOK_S)):
                    if self._wake_at is not None or resting():
                        break
                    self._change.wait(_LOOK_S)
                else:
                    raise TimeoutError("the thread neither sleeps nor rests")
                if self._wake_at is None or self._wake_at > time_s:
                    self._now = time_s
                    return
                self._wake(self._wake_at)

    def _wake(self, time_s: float) -> None:
        """Move on to `time_s`, and wait until the sleeper has seen it."""
        self._now, before = time_s, self._num_woken
        self._change.notify_all()
        self._change.wait_for(lambda: self._num_woken != before, LOST_S)
