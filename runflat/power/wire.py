"""What the power agent and its clients say to each other: one JSON object a line, checked on arrival.

Limits are watts at a device; a lease is the right to change the limits of some devices for `ttl_s` seconds, renewed by
every message that names it. Errors are data: a `Failure` is an answer like any other.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from runflat.power.devices import Reason

MAX_MESSAGE_BYTES = 16_384
"""Longest line that the agent reads, its end included."""
MAX_DEVICES = 64
"""Most devices in a message."""
MAX_REPLY_BYTES = 262_144
"""Longest line that a client reads."""

Uuid = Annotated[str, Field(min_length=1, max_length=96, pattern=r"^[\x21-\x7e]+$")]
LeaseId = Annotated[str, Field(min_length=1, max_length=64)]
Watts = Annotated[float, Field(gt=0, le=100_000, allow_inf_nan=False)]
Devices = Annotated[tuple[Uuid, ...], Field(min_length=1, max_length=MAX_DEVICES)]

ErrorCode = Literal[
    "not-allowed",  # the caller is not on the agent's list
    "malformed",  # not a message, or a field has a value that no client sends
    "oversized",
    "busy",  # too many connections; try again
    "unavailable",  # devices that cannot be leased now; `devices` says why, one by one
    "no-lease",  # ended, or never was, or somebody else's
    "not-leased",  # a device outside of this lease
    "range",  # a limit below the floor or above the ceiling
    "budget",  # the sum of limits would exceed the node's budget
    "journal",  # the intent could not be recorded, so nothing was written
    "device",  # the device did not do it, or somebody else set it; `devices` says what, one by one
    "unreachable",  # said by the client: no agent there
    "timeout",  # no answer in time; in the agent's log: a caller that did not send or take in time
]

State = Literal["free", "leased", "restoring", "given-up"]
"""free: at nominal, nobody's. restoring: nominal is still owed. given-up: another writer was seen; left alone."""


class Wire(BaseModel):
    """Base of all messages: frozen, nothing beyond the declared fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Read(Wire):
    """Tell me about all devices."""

    type: Literal["read"] = "read"


class Acquire(Wire):
    """Give me a lease on these devices, all or none. `job` is for the log."""

    type: Literal["acquire"] = "acquire"
    devices: Devices
    ttl_s: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)]
    job: Annotated[str, Field(max_length=200)] = ""


class Renew(Wire):
    """I am still here."""

    type: Literal["renew"] = "renew"
    lease: LeaseId


class SetLimits(Wire):
    """Set these limits; lowers come before raises."""

    type: Literal["set"] = "set"
    lease: LeaseId
    limits_w: Annotated[dict[Uuid, Watts], Field(min_length=1, max_length=MAX_DEVICES)]
    reason: Annotated[str, Field(max_length=200)] = ""


class Release(Wire):
    """Back to nominal; I am done."""

    type: Literal["release"] = "release"
    lease: LeaseId


Request = Read | Acquire | Renew | SetLimits | Release
_REQUESTS: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="type")])


class DeviceState(Wire):
    """One device as the agent last saw it, `age_s` ago; None for what is not known.

    `floor_w`, `nominal_w` and `ceiling_w` are the site's; `min_w`, `max_w`, `default_w` the device's own. `confirmed`
    is false while a raise is not yet seen in `enforced_w`. `trouble` says in words what keeps the device from a boost.
    """

    uuid: str
    index: int | None = None
    name: str | None = None
    state: State
    min_w: float | None = None
    max_w: float | None = None
    default_w: float | None = None
    floor_w: float
    nominal_w: float
    ceiling_w: float
    limit_w: float | None = None
    enforced_w: float | None = None
    draw_w: float | None = None
    temperature_c: float | None = None
    margin_c: float | None = None
    clock_mhz: float | None = None
    energy_j: float | None = None
    reasons: tuple[Reason, ...] | None = None
    confirmed: bool = True
    age_s: float | None = None
    trouble: str | None = None


class Telemetry(Wire):
    """Answer to `read`. `budget_w` bounds the sum of limits on this node; None where only ceilings count."""

    type: Literal["telemetry"] = "telemetry"
    devices: tuple[DeviceState, ...]
    budget_w: float | None = None
    dry_run: bool = False


class Granted(Wire):
    """Answer to `acquire` and `renew`: the lease ends in `ttl_s` unless it is renewed."""

    type: Literal["granted"] = "granted"
    lease: str
    ttl_s: float


class SetDone(Wire):
    """Answer to `set`: what each device now has; where `confirmed` is false in its state, look again in a second."""

    type: Literal["set-done"] = "set-done"
    devices: tuple[DeviceState, ...]


class Released(Wire):
    """Answer to `release`: devices that are not yet back at nominal; the agent goes on until they are."""

    type: Literal["released"] = "released"
    owed: tuple[str, ...] = ()


class Failure(Wire):
    """Nothing, or not all, of what was asked for was done. `devices`: reasons by UUID."""

    type: Literal["failure"] = "failure"
    error: ErrorCode
    text: str
    devices: dict[str, str] = Field(default_factory=dict)


Reply = Telemetry | Granted | SetDone | Released | Failure
_REPLIES: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Field(discriminator="type")])


def parse_request(line: bytes) -> Request:
    """The request in a line; raises `pydantic.ValidationError` (a `ValueError`) if it is none."""
    return _REQUESTS.validate_json(line)


def parse_reply(line: bytes) -> Reply:
    """The reply in a line; raises `pydantic.ValidationError` (a `ValueError`) if it is none."""
    return _REPLIES.validate_json(line)


def to_line(message: Request | Reply) -> bytes:
    """A message as it goes over the socket."""
    return message.model_dump_json(exclude_none=True).encode() + b"\n"


def finite(value: float | None) -> float | None:
    """The number, or None where JSON has none for it."""
    return value if value is not None and math.isfinite(value) else None
