"""What the power agent decides: who may do what, and when it ends. No socket, no clock, no file of its own.

`handle` answers a request of a caller, `tick` ends leases that were not renewed and looks at the devices, `stop` ends
all of them. Whatever ends a lease - release, silence, an order to stop, a crash and a new start - ends it at nominal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runflat.power.devices import PowerBackend
from runflat.power.journal import Journal
from runflat.power.keeper import Audit, Keeper
from runflat.power.site import SiteLimits
from runflat.power.wire import (
    Acquire,
    ErrorCode,
    Failure,
    Granted,
    Read,
    Release,
    Released,
    Renew,
    Reply,
    Request,
    SetDone,
    SetLimits,
    Telemetry,
)

LOOK_S = 1.0
"""How often all devices are looked at."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is at the other end of a connection, as the kernel says."""

    uid: int
    pid: int


@dataclass
class _Lease:
    caller: Caller
    job: str
    ttl_s: float
    ends_s: float


class Agent:
    """The rules of one node's agent. `now` is seconds of a clock that never goes back.

    Args:
        site: What is allowed.
        backend: The devices.
        journal: What survives a crash.
        audit: Gets (event, facts) of everything that happens.
        new_id: A fresh name for a lease that nobody can guess.
        now: Start; what an earlier agent left behind is restored before this returns.
        dry_run: Only said in telemetry: the backend writes nothing.
    """

    def __init__(
        self,
        site: SiteLimits,
        backend: PowerBackend,
        journal: Journal,
        audit: Audit,
        new_id: Callable[[], str],
        now: float,
        *,
        dry_run: bool = False,
    ):
        self._site = site
        self._audit = audit
        self._new_id = new_id
        self._dry_run = dry_run
        self._leases: dict[str, _Lease] = {}
        self._next_look_s = now + LOOK_S
        self.keeper = Keeper(site.devices, backend, journal, audit, now)

    def may_talk(self, caller: Caller) -> bool:
        """Whether the site lets this user talk to the agent at all."""
        return caller.uid in self._site.allow_uids

    def handle(self, caller: Caller, request: Request, now: float) -> Reply:
        """Do what a caller asks for, or say why not."""
        self._end_silent(now)
        if not self.may_talk(caller):
            return self._refuse(caller, "not-allowed", f"user {caller.uid} is not in allow_uids of the limits file")
        if isinstance(request, Read):
            states = tuple(self.keeper.describe(uuid, now) for uuid in self._site.devices)
            return Telemetry(devices=states, budget_w=self._site.budget_w, dry_run=self._dry_run)
        if isinstance(request, Acquire):
            return self._acquire(caller, request, now)
        lease = self._leases.get(request.lease)
        if lease is None or lease.caller.uid != caller.uid:
            return self._refuse(caller, "no-lease", "there is no such lease: it has ended, or it is not yours")
        lease.ends_s = now + lease.ttl_s
        if isinstance(request, Renew):
            return Granted(lease=request.lease, ttl_s=lease.ttl_s)
        if isinstance(request, SetLimits):
            return self._set(caller, request, now)
        assert isinstance(request, Release)
        return Released(owed=self._end(request.lease, "released", now))

    def tick(self, now: float) -> float:
        """End leases that are over, look at the devices if it is time; returns seconds until the next call is due."""
        self._end_silent(now)
        if now >= self._next_look_s:
            self.keeper.look(now)
            self._next_look_s = now + LOOK_S
        due_s = min([self._next_look_s, *(lease.ends_s for lease in self._leases.values())])
        return max(due_s - now, 0.0)

    def stop(self, now: float) -> tuple[str, ...]:
        """End every lease and restore; returns the devices that are still owed their nominal limit."""
        for name in list(self._leases):
            self._end(name, "stopped", now)
        for uuid in list(self.keeper.owed):
            self.keeper.restore(uuid, now)
        self._audit("stopped", {"owed": list(self.keeper.owed)})
        return tuple(self.keeper.owed)

    def refuse(self, caller: Caller, error: ErrorCode, text: str) -> Failure:
        """A refusal for what never became a request; recorded like the others."""
        return self._refuse(caller, error, text)

    def _acquire(self, caller: Caller, request: Acquire, now: float) -> Reply:
        if request.ttl_s > self._site.max_lease_s:
            text = f"a lease of {request.ttl_s:g} s is longer than max_lease_s, {self._site.max_lease_s:g} s"
            return self._refuse(caller, "range", text)
        found = {uuid: self.keeper.unavailable(uuid, now) for uuid in request.devices}
        bad = {uuid: reason for uuid, reason in found.items() if reason is not None}
        if bad:
            text = f"{len(bad)} of {len(found)} devices cannot be leased now"
            return self._refuse(caller, "unavailable", text, bad)
        name = self._new_id()
        self._leases[name] = _Lease(caller, request.job, request.ttl_s, now + request.ttl_s)
        for uuid in found:
            self.keeper.lease(uuid, name)
        facts = {"uid": caller.uid, "pid": caller.pid, "job": request.job, "ttl_s": request.ttl_s}
        self._audit("leased", {**facts, "lease": name[:8], "devices": list(found)})
        return Granted(lease=name, ttl_s=request.ttl_s)

    def _set(self, caller: Caller, request: SetLimits, now: float) -> Reply:
        refusal = self._check_set(caller, request)
        if refusal is not None:
            return refusal
        kept = self.keeper.kept
        order = sorted(request.limits_w, key=lambda uuid: request.limits_w[uuid] - (kept[uuid].written_w or 0.0))
        failed: dict[str, str] = {}
        facts = {"uid": caller.uid, "lease": request.lease[:8], "reason": request.reason}
        self._audit("set-asked", {**facts, "limits_w": request.limits_w})
        for uuid in order:
            # A lowering that has failed still holds its watts: a raise that counted on them must not happen.
            over_w = self._over_budget_w({uuid: request.limits_w[uuid]})
            if over_w > 0 and request.limits_w[uuid] > self.keeper.allotted_w(uuid):
                failed[uuid] = f"the node's budget would be exceeded by {over_w:g} W"
                continue
            error = self.keeper.write(uuid, request.limits_w[uuid], now)
            if error is not None:
                failed[uuid] = error
        if failed:
            text = f"{len(failed)} of {len(order)} devices did not take their limit"
            return self._refuse(caller, "device", text, failed)
        return SetDone(devices=tuple(self.keeper.describe(uuid, now) for uuid in request.limits_w))

    def _check_set(self, caller: Caller, request: SetLimits) -> Failure | None:
        """The refusal of a request of which nothing may be done; None if it is within all bounds."""
        not_leased, bad = {}, {}
        for uuid, limit_w in request.limits_w.items():
            kept = self.keeper.kept.get(uuid)
            if kept is None or not kept.is_listed or kept.lease != request.lease:
                not_leased[uuid] = (kept.trouble if kept else None) or "it is not in this lease"
            elif not kept.site.low_w <= limit_w <= kept.site.ceiling_w:
                bad[uuid] = f"{limit_w:g} W is not within {kept.site.low_w:g} to {kept.site.ceiling_w:g} W"
        if not_leased:
            return self._refuse(caller, "not-leased", f"{len(not_leased)} devices are not in this lease", not_leased)
        if bad:
            return self._refuse(caller, "range", f"{len(bad)} limits are out of range; nothing was set", bad)
        over_w = self._over_budget_w(request.limits_w)
        if over_w > 0:
            budget_w = self._site.budget_w
            return self._refuse(
                caller, "budget", f"the node's budget of {budget_w:g} W would be exceeded by {over_w:g} W"
            )
        return None

    def _over_budget_w(self, wanted_w: dict[str, float]) -> float:
        """Watts by which the listed devices would exceed the node's budget if `wanted_w` were in force too."""
        if self._site.budget_w is None:
            return 0.0
        total_w = sum(
            max(wanted_w[uuid], site.nominal_w) if uuid in wanted_w else self.keeper.allotted_w(uuid)
            for uuid, site in self._site.devices.items()
        )
        return total_w - self._site.budget_w

    def _end_silent(self, now: float) -> None:
        for name, lease in list(self._leases.items()):
            if now >= lease.ends_s:
                self._end(name, "expired", now)

    def _end(self, name: str, why: str, now: float) -> tuple[str, ...]:
        """End a lease: its devices go back to nominal, now or as soon as they can."""
        lease = self._leases.pop(name)
        mine = [uuid for uuid, kept in self.keeper.kept.items() if kept.lease == name]
        facts = {"uid": lease.caller.uid, "pid": lease.caller.pid, "job": lease.job}
        self._audit("lease-ended", {**facts, "lease": name[:8], "why": why, "devices": mine})
        for uuid in mine:
            self.keeper.kept[uuid].lease = None
        return tuple(uuid for uuid in mine if not self.keeper.restore(uuid, now))

    def _refuse(self, caller: Caller, error: ErrorCode, text: str, devices: dict[str, str] | None = None) -> Failure:
        facts = {"uid": caller.uid, "pid": caller.pid, "error": error, "text": text}
        self._audit("refused", {**facts, "devices": devices} if devices else facts)
        return Failure(error=error, text=text, devices=devices or {})
