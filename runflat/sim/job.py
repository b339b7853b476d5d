"""One job over time: failures and returns come in, seconds are booked by category, sequences are committed.

Between events the job runs at constant rates; an event may discard the step in flight (or the work since the newest
checkpoint) and make everybody wait through the phases of a recovery. A second fault during a recovery starts it again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from runflat.cluster.ledger import Category, Ledger
from runflat.plan.strategies import Strategy
from runflat.power.views import IDLE_POWER
from runflat.sim.arrange import Arrangement
from runflat.sim.placement import Placement
from runflat.sim.rates import Rates, RateSource

Phases = tuple[tuple[Category, float], ...]
"""Seconds of each phase of a recovery, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What disturbances cost, in seconds during which the whole job waits."""

    start_s: float = 0.0
    """Before the first step."""
    loss: dict[Strategy, Phases] = field(default_factory=dict)
    """Recovery from a loss by each link."""
    gain: dict[Strategy, Phases] = field(default_factory=dict)
    """Taking a returned device in, by the link that had handled its loss."""
    discard_step: bool = False
    """Whether a loss throws away the step in flight."""
    checkpoint_interval_s: float = math.inf
    """Running seconds from one save to the next."""
    checkpoint_save_s: float = 0.0
    """Seconds that a save stops training."""
    copy_every: int = 0
    """Steps from one copy in memory to the next, which stops nobody; in the place of the saves above. 0: none."""


@dataclass(slots=True)
class Series:
    """State after each event, for plots: time, rate over the healthy rate, live share of devices, draw in watts."""

    time_s: list[float] = field(default_factory=list)
    throughput: list[float] = field(default_factory=list)
    live: list[float] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)
    reduced: list[int] = field(default_factory=list)
    hit_groups: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Totals:
    """What came out of a run; device-seconds stand in ``ledger``."""

    ledger: Ledger
    sequences: float
    energy_j: float
    wall_s: float
    num_devices: int
    incidents: Counter[str]
    """Recoveries by link, returns as ``+link``."""
    pauses: int
    """Times that the job fell below the target and paused."""
    peak_hit_groups: int
    series: Series | None


class JobSim:
    """The state of one simulated job.

    Args:
        placement: Health of the devices held.
        arrangement: Replicas that the health allows.
        table: Rates of a set of replicas.
        costs: Costs of disturbances.
        record: Keep the series.
        nominal_w: Draw of a working device, for the energy of idle and waiting ones.
    """

    def __init__(
        self,
        placement: Placement,
        arrangement: Arrangement,
        table: RateSource,
        costs: Costs,
        *,
        record: bool = False,
        nominal_w: float = 0.0,
    ) -> None:
        self._placement, self._arrangement, self._table, self._costs = placement, arrangement, table, costs
        self._held = placement.topology.num_devices
        self._nominal_w = nominal_w
        self._now_s = 0.0
        self._booked = dict.fromkeys(Category, 0.0)
        self._sequences = self._unsaved = self._unsaved_busy = self._unsaved_wait = 0.0
        self._steps = self._unsaved_steps = 0.0
        self._cycle_s = 0.0  # position in the cycle of running and saving
        self._energy_j = 0.0
        self._waiting: list[tuple[Category, float]] = []
        self._restarting = False
        self._incidents: Counter[str] = Counter()
        self._pauses = self._peak = 0
        self._series = Series() if record else None
        self._cache: dict[Hashable, Rates] = {}
        self._rates = self._look()
        if costs.start_s:
            self._waiting.append((Category.START, costs.start_s))

    @property
    def rates(self) -> Rates:
        """Rates in force."""
        return self._rates

    @property
    def num_hit_groups(self) -> int:
        """Groups that lack a device."""
        return len(self._placement.lost)

    @property
    def steps(self) -> float:
        """Steps done, the part of the one in flight included."""
        return self._steps

    def time_at(self, step: float) -> float:
        """Time in seconds at which ``steps`` will reach ``step``, if nothing happens; infinite if it never will.

        Saves are not looked ahead for, so this is exact only without checkpoints that stop training.
        """
        waiting_s = sum(seconds for _, seconds in self._waiting)
        left = max(step - self._steps, 0.0)
        if left == 0.0:
            return self._now_s
        return self._now_s + waiting_s + left * self._rates.step_s if self._rates.sequences else math.inf

    def settle(self, devices: Iterable[int]) -> None:
        """Devices that are down before the job starts: they cost no incident."""
        for device in devices:
            change = self._placement.fail(device)
            if change is not None:
                self._arrangement.apply(change, failed=True)
        self._rates = self._look()
        self._note()

    def fail(self, time_s: float, devices: Iterable[int]) -> None:
        """Devices that go down together."""
        self.advance(time_s)
        heaviest: Strategy | None = None
        for device in devices:
            change = self._placement.fail(device)
            if change is not None:
                heaviest = _heavier(heaviest, self._arrangement.apply(change, failed=True))
        self._after(heaviest, failed=True)

    def back(self, time_s: float, devices: Iterable[int]) -> None:
        """Devices that are healthy again."""
        self.advance(time_s)
        heaviest: Strategy | None = None
        for device in devices:
            change = self._placement.back(device)
            if change is not None:
                heaviest = _heavier(heaviest, self._arrangement.apply(change, failed=False))
        self._after(heaviest, failed=False)

    def occur(self, time_s: float, devices: Iterable[int], strategy: Strategy | None, *, failed: bool) -> None:
        """Devices go down or come back, and somebody else has decided which link handles it."""
        self.advance(time_s)
        for device in devices:
            (self._placement.fail if failed else self._placement.back)(device)
        self._after(strategy, failed=failed)

    def _after(self, strategy: Strategy | None, *, failed: bool) -> None:
        """Take in what an event changed: rates, and the recovery that it starts."""
        rates = self._look()
        if strategy is not None:
            restart = strategy is Strategy.RESTART
            self._incidents[strategy.value if failed else f"+{strategy.value}"] += 1
            phases = (self._costs.loss if failed else self._costs.gain).get(strategy, ())
            if failed:
                self._discard(everything=restart)
            if self._restarting and self._waiting and not restart:
                # The job was restarting: that starts again, whatever the second fault alone would have cost.
                phases = self._costs.loss.get(Strategy.RESTART, ()) if failed else tuple(self._waiting)
                restart = True
            if failed or phases:
                self._waiting = [phase for phase in phases if phase[1] > 0]
            self._restarting = restart
        if rates.sequences == 0 and self._rates.sequences:
            self._pauses += 1
        self._rates = rates
        self._note()

    def _discard(self, *, everything: bool) -> None:
        """Book as replay what a loss throws away: the step in flight, or all since the newest checkpoint."""
        if everything:
            self._move(self._unsaved_busy, self._unsaved_wait)
            self._sequences -= self._unsaved
            self._steps -= self._unsaved_steps
            self._unsaved = self._unsaved_busy = self._unsaved_wait = self._unsaved_steps = self._cycle_s = 0.0
            return
        part = self._steps - math.floor(self._steps + 1e-9)  # 1e-9: a sum that should be whole counts as whole
        if self._costs.discard_step and self._rates.sequences and part > 0:
            part_s = part * self._rates.step_s
            busy = min(part_s * self._rates.busy, self._booked[Category.PRODUCTIVE])
            wait = min(part_s * (self._rates.working - self._rates.busy), self._booked[Category.IMBALANCE])
            self._move(busy, wait)
            lost = min(part * self._rates.sequences, self._sequences)
            self._sequences -= lost
            self._unsaved = max(self._unsaved - lost, 0.0)
            self._unsaved_busy = max(self._unsaved_busy - busy, 0.0)
            self._unsaved_wait = max(self._unsaved_wait - wait, 0.0)
            self._steps -= part
            self._unsaved_steps = max(self._unsaved_steps - part, 0.0)

    def _move(self, busy: float, wait: float) -> None:
        self._booked[Category.PRODUCTIVE] -= busy
        self._booked[Category.IMBALANCE] -= wait
        self._booked[Category.REPLAY] += busy + wait

    def advance(self, time_s: float) -> None:
        """Book everything up to ``time_s``."""
        left_s = time_s - self._now_s
        if left_s <= 0:
            return
        self._now_s = time_s
        booked, rates = self._booked, self._rates
        failed = self._placement.num_failed
        idle = self._held - failed - rates.working
        booked[Category.FAILED] += failed * left_s
        booked[Category.IDLE] += idle * left_s
        self._energy_j += idle * left_s * self._nominal_w * IDLE_POWER
        while self._waiting and left_s > 0:
            category, seconds = self._waiting[0]
            spent_s = min(seconds, left_s)
            booked[category] += rates.working * spent_s
            self._energy_j += rates.working * spent_s * self._nominal_w * IDLE_POWER
            left_s -= spent_s
            if spent_s < seconds:
                self._waiting[0] = (category, seconds - spent_s)
            else:
                del self._waiting[0]
        if left_s > 0:
            self._run(left_s)

    def _run(self, seconds: float) -> None:
        """Book ``seconds`` without a recovery: steps and saves, or a pause."""
        rates = self._rates
        if not rates.sequences:
            self._booked[Category.PAUSE] += rates.working * seconds
            self._energy_j += rates.watts * seconds
            return
        running_s, since_s, saved = self._between_saves(seconds)
        self._booked[Category.CHECKPOINT] += rates.working * (seconds - running_s)
        if saved:
            self._unsaved = self._unsaved_busy = self._unsaved_wait = self._unsaved_steps = 0.0
        busy, wait = rates.busy, rates.working - rates.busy
        self._booked[Category.PRODUCTIVE] += busy * running_s
        self._booked[Category.IMBALANCE] += wait * running_s
        per_s = rates.sequences_per_s
        self._sequences += per_s * running_s
        self._unsaved += per_s * since_s
        self._unsaved_busy += busy * since_s
        self._unsaved_wait += wait * since_s
        self._steps += running_s / rates.step_s
        self._unsaved_steps += since_s / rates.step_s
        self._energy_j += rates.watts * seconds

    def _between_saves(self, seconds: float) -> tuple[float, float, bool]:
        """Of the next ``seconds``: those of steps, those of steps that no save covers, and whether one is made."""
        costs = self._costs
        if costs.copy_every:
            step_s = self._rates.step_s
            done = self._steps % costs.copy_every + seconds / step_s
            copies = math.floor((done + 1e-9) / costs.copy_every)  # 1e-9: as in `_discard`
            left = max(done - copies * costs.copy_every, 0.0)
            return seconds, left * step_s if copies else seconds, copies > 0
        interval_s, cycle_s = costs.checkpoint_interval_s, costs.checkpoint_interval_s + costs.checkpoint_save_s
        if math.isinf(interval_s):
            return seconds, seconds, False
        before, after = self._cycle_s, self._cycle_s + seconds
        saves = math.floor(after / cycle_s)
        self._cycle_s = after - saves * cycle_s
        since_s = min(self._cycle_s, interval_s)
        running_s = saves * interval_s + since_s - min(before, interval_s)
        return running_s, since_s if saves else running_s, saves > 0

    def _look(self) -> Rates:
        """Rates of the replicas that the present health allows."""
        key = self._arrangement.key()
        if key not in self._cache:
            if len(self._cache) > 4096:
                self._cache.clear()
            self._cache[key] = self._table.rates(self._arrangement.classes())
        return self._cache[key]

    def _note(self) -> None:
        hit = len(self._placement.lost)
        self._peak = max(self._peak, hit)
        if self._series is not None:
            rates, series = self._rates, self._series
            series.time_s.append(self._now_s)
            series.throughput.append(rates.sequences_per_s)
            series.live.append(1 - self._placement.num_failed / self._held)
            idle = self._held - self._placement.num_failed - rates.working
            series.watts.append(rates.watts + idle * self._nominal_w * IDLE_POWER)
            series.reduced.append(rates.num_reduced)
            series.hit_groups.append(hit)

    def totals(self, end_s: float) -> Totals:
        """The result at ``end_s``; the ledger is checked against devices times seconds."""
        self.advance(end_s)
        ledger = Ledger({category: max(seconds, 0.0) for category, seconds in self._booked.items()})
        ledger.check(self._held, end_s)
        return Totals(
            ledger=ledger,
            sequences=self._sequences,
            energy_j=self._energy_j,
            wall_s=end_s,
            num_devices=self._held,
            incidents=self._incidents,
            pauses=self._pauses,
            peak_hit_groups=self._peak,
            series=self._series,
        )


_WEIGHT = {None: 0, Strategy.SPARE: 1, Strategy.NTP: 2, Strategy.DROP: 3, Strategy.RESTART: 4}


def _heavier(first: Strategy | None, second: Strategy | None) -> Strategy | None:
    """The heavier of two links: one incident takes the heaviest recovery of all that it hit."""
    return first if _WEIGHT[first] >= _WEIGHT[second] else second
