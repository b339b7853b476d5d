"""What a job's site on Ray does: which actors to ask for, when to start one again, when to go on without. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
    Group,
    Happening,
    Interrupt,
    Over,
    Placed,
    Rules,
    Say,
    Seat,
    SeatStage,
    Site,
    StartController,
    StartSeat,
    StopAsked,
    Tick,
    Up,
)
from runflat.errors import INTERRUPTED


def open_site(places: Sequence[str], spares: Sequence[str], tp: int) -> Site:
    """The groups and seats of a job: one group per replica, one for each `tp` spares, one for each spare that is left.

    Rank r drives the r-th of places and spares.
    """
    parts: list[tuple[str, tuple[int, ...]]] = [
        (f"replica {first // tp}", tuple(range(first, first + tp))) for first in range(0, len(places), tp)
    ]
    devices = (*places, *spares)
    for first in range(len(places), len(devices), tp):
        ranks = tuple(range(first, min(first + tp, len(devices))))
        if len(ranks) == tp and tp > 1:
            parts.append((f"spares {devices[ranks[0]]} to {devices[ranks[-1]]}", ranks))
        else:
            parts += [(f"spare {devices[rank]}", (rank,)) for rank in ranks]
    return Site(
        groups={name: Group(name, ranks, len(ranks)) for name, ranks in parts},
        seats={rank: Seat(rank, devices[rank], name) for name, ranks in parts for rank in ranks},
    )


@dataclass
class _Turn:
    rules: Rules
    site: Site
    now: float
    actions: list[Action] = field(default_factory=list)

    def do(self, *actions: Action) -> None:
        self.actions += actions

    def seat(self, seat: Seat) -> None:
        self.site = replace(self.site, seats={**self.site.seats, seat.rank: seat})

    def group(self, group: Group) -> None:
        self.site = replace(self.site, groups={**self.site.groups, group.name: group})


def decide(rules: Rules, site: Site, happening: Happening, now: float) -> tuple[Site, list[Action]]:
    """The next state, and what is to be done; `now` in seconds."""
    turn = _Turn(rules, site, now)
    if isinstance(happening, Begin):
        _begin(turn)
    elif isinstance(happening, Placed | Displaced):
        _on_place(turn, happening)
    elif isinstance(happening, Up | Gone | Failed | Over):
        _on_seat(turn, happening)
    elif isinstance(happening, ControllerEnded):
        turn.do(End(happening.code, happening.text))
    elif isinstance(happening, ControllerGone):
        _on_controller_gone(turn, happening)
    elif isinstance(happening, StopAsked):
        _on_stop(turn)
    else:
        _on_tick(turn, happening)
    _control(turn)
    _fill(turn)
    return turn.site, turn.actions


def _begin(turn: _Turn) -> None:
    turn.site = replace(turn.site, began=turn.now)
    for group in turn.site.groups.values():
        turn.group(replace(group, since=turn.now, due=turn.now + turn.rules.pending_s))
        turn.do(Ask(group.name, group.asked))


def _on_place(turn: _Turn, happening: Placed | Displaced) -> None:
    group = turn.site.groups[happening.group]
    if isinstance(happening, Placed):
        turn.group(replace(group, placed=True))
        turn.do(Say(f"{group.name}: placed on {', '.join(happening.nodes)}"))
    else:
        turn.group(replace(group, placed=False, since=turn.now, due=turn.now + turn.rules.pending_s))
        turn.do(Say(f"{group.name}: lost its node; waits for another"))


def _on_seat(turn: _Turn, happening: Up | Gone | Failed | Over) -> None:
    seat = turn.site.seats[happening.rank]
    if happening.life != seat.life or seat.stage not in (SeatStage.STARTING, SeatStage.UP):
        return  # of an actor that was given up
    if isinstance(happening, Up):
        turn.seat(replace(seat, stage=SeatStage.UP, since=turn.now))
        turn.do(Say(f"{seat.device}: actor {seat.life} runs on {happening.node}"))
    elif isinstance(happening, Over):
        turn.seat(replace(seat, stage=SeatStage.OVER))
    elif isinstance(happening, Gone):
        _again(turn, seat, f"its actor is lost ({happening.text})")
    else:
        _on_failed(turn, seat, happening.text)


def _again(turn: _Turn, seat: Seat, reason: str, errors: int = 0) -> None:
    """Have a seat's next actor start, the later the oftener the last ones did not live long."""
    steady = seat.stage is SeatStage.UP and turn.now - seat.since >= turn.rules.steady_s
    losses = 1 if steady else seat.losses + 1
    pause_s = min(turn.rules.back_off_s * 2.0 ** (losses - 1), turn.rules.max_back_off_s)
    turn.seat(replace(seat, stage=SeatStage.AWAITED, since=turn.now + pause_s, losses=losses, errors=errors))
    turn.do(Say(f"{seat.device}: {reason}; another one starts after {pause_s:g} s, where there is room"))


def _on_failed(turn: _Turn, seat: Seat, text: str) -> None:
    errors = seat.errors + 1
    if errors < turn.rules.max_errors:
        _again(turn, seat, f"its actor failed: {text}", errors)
        return
    turn.seat(replace(seat, stage=SeatStage.OUT))
    turn.do(Say(f"{seat.device}: stays out, its actor failed {errors} times: {text}"))
    if all(other.stage is SeatStage.OUT for other in turn.site.seats.values()):
        turn.do(End(1, f"no worker can run on this cluster: {text}"))


def _on_controller_gone(turn: _Turn, happening: ControllerGone) -> None:
    """A controller that died is started again, if the one before got any further."""
    if turn.site.stop_asked or happening.committed <= turn.site.committed:
        turn.do(End(1, f"the controller's actor died ({happening.text}); go on with --resume"))
        return
    restart_at = turn.now + turn.rules.resume_after_s
    turn.site = replace(turn.site, running=False, restart_at=restart_at, committed=happening.committed)
    turn.do(
        Say(
            f"the controller's actor died at step {happening.committed} ({happening.text}): workers save, and another "
            f"one resumes the run in {turn.rules.resume_after_s:g} s"
        )
    )


def _on_stop(turn: _Turn) -> None:
    if turn.site.stop_asked or not turn.site.running:
        turn.do(End(INTERRUPTED, "interrupted"))
        return
    turn.site = replace(turn.site, stop_asked=True)
    turn.do(Interrupt())


def _on_tick(turn: _Turn, tick: Tick) -> None:
    for group in turn.site.groups.values():
        if not group.placed and turn.now >= group.due:
            _on_overdue(turn, group, max(tick.room, default=0))
    for seat in turn.site.seats.values():
        if seat.stage is not SeatStage.STARTING or turn.now - seat.since < turn.rules.start_s:
            continue
        if turn.site.groups[seat.group].placed:
            turn.do(EndSeat(seat.rank, seat.life))
            _again(turn, seat, f"its actor did not start within {turn.rules.start_s:g} s")
        else:  # it waits for a node
            turn.seat(replace(seat, since=turn.now))


def _on_overdue(turn: _Turn, group: Group, room: int) -> None:
    """A group was in vain asked for: ask for what the roomiest node holds (7 of 8, say), else say it and wait on."""
    waited_s = turn.now - group.since
    group = replace(group, due=turn.now + turn.rules.pending_s)
    nobody = all(turn.site.seats[rank].stage in (SeatStage.AWAITED, SeatStage.STARTING) for rank in group.ranks)
    if 0 < room < group.asked and nobody and not turn.rules.may_span:
        for seat in (turn.site.seats[rank] for rank in group.ranks):
            if seat.stage is SeatStage.STARTING:
                turn.do(EndSeat(seat.rank, seat.life))
                turn.seat(replace(seat, stage=SeatStage.AWAITED, since=turn.now))
        text = f"no node has room for {group.asked} devices after {waited_s:.0f} s; {room} are asked for"
        turn.do(Say(f"{group.name}: {text}"), Drop(group.name), Ask(group.name, room))
        group = replace(group, asked=room, since=turn.now)
    else:
        turn.do(Say(f"{group.name}: waits since {waited_s:.0f} s for room for {group.asked} devices"))
    turn.group(group)


def _control(turn: _Turn) -> None:
    """Start the controller when all groups are placed, or some for long enough."""
    site, rules = turn.site, turn.rules
    if site.running or any(isinstance(action, End) for action in turn.actions):
        return
    replicas = [group for group in site.groups.values() if group.name.startswith("replica")]
    whole = all(group.placed for group in site.groups.values())
    if site.starts > 0:
        ready = site.restart_at is not None and turn.now >= site.restart_at
    else:
        late = turn.now - site.began >= rules.wait_s
        ready = whole or (late and any(group.placed for group in replicas))
        if late and not ready:
            turn.do(
                End(
                    1,
                    f"no node has had room for a replica ({replicas[0].asked} devices) within {rules.wait_s:.0f} s "
                    f"(--wait-s). `ray status` shows what nodes have; --per-device says what a device needs.",
                )
            )
    if not ready:
        return
    missing = [group.name for group in site.groups.values() if not group.placed]
    if missing:
        turn.do(Say(f"starts without {', '.join(missing)}"))
    turn.do(StartController(site.starts > 0, rules.late_wait_s if missing else rules.wait_s))
    turn.site = replace(site, running=True, starts=site.starts + 1, restart_at=None)


def _fill(turn: _Turn) -> None:
    """Start the actors that are due in groups that are placed."""
    if not turn.site.starts or any(isinstance(action, End) for action in turn.actions):
        return
    for seat in turn.site.seats.values():
        group = turn.site.groups[seat.group]
        bundle = group.ranks.index(seat.rank)
        if seat.stage is SeatStage.AWAITED and group.placed and bundle < group.asked and turn.now >= seat.since:
            started = replace(seat, stage=SeatStage.STARTING, life=seat.life + 1, since=turn.now)
            turn.seat(started)
            turn.do(StartSeat(seat.rank, started.life, seat.device, group.name, bundle))
