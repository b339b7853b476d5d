"""What controller and workers say to each other: JSON objects, checked on arrival, never pickled.

The controller sends orders, workers send messages. Words used here and in the protocol:

    generation    number of a plan; only the controller gives numbers out, each once, rising
    incarnation   how often a device's process has been started; what an older one says is dropped
    committed     number of committed steps, so the next step to run has this index
    holds         generation of the plan whose units a device has complete; -1 for none
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from runflat.errors import RunError


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def encode(self) -> bytes:
        """The JSON text that goes over the wire."""
        return json.dumps(self.model_dump(mode="python", by_alias=True)).encode()


class Move(_Wire):
    """Units start..stop-1 of `kind` go from `source` to `target`: `num_bytes` over all parameters and moments."""

    kind: str
    start: int
    stop: int
    source: str
    target: str
    num_bytes: int = 0


class Resume(_Wire):
    """How a plan is taken up. Everybody stands at `committed` afterwards.

    start        fresh weights, or those of the checkpoint on disk
    forward      those at committed-1 hold complete gradients and apply that step with `scalars`; the others wait
    discard      the step in flight is dropped; all are at `committed`
    checkpoint   all load `checkpoint` from disk
    memory       all take the copies in memory of step `committed`; `transfers` go out of such copies

    `transfers` run after the groups are formed. A target that holds nothing gets the replicated parameters too, from
    the source of its first transfer.
    """

    action: Literal["start", "forward", "discard", "checkpoint", "memory"]
    committed: int
    scalars: tuple[float, ...] | None = None
    checkpoint: str | None = None
    transfers: tuple[Move, ...] = ()


class Abort(_Wire):
    """Leave every generation below `generation` now, then send `status` with this number."""

    type: Literal["abort"] = "abort"
    generation: int


class PlanOrder(_Wire):
    """Adopt this plan next: roll forward or discard as `resume` says, then send `ready` (or `lowmem`)."""

    type: Literal["plan"] = "plan"
    generation: int
    plan: str
    resume: Resume
    network: dict[str, Any] | None = None


class Go(_Wire):
    """All are ready: form the groups, prove them, run the transfers, compare digests, train on."""

    type: Literal["go"] = "go"
    generation: int


class Prepare(_Wire):
    """Form the groups of the plan on a side thread while training goes on; answer `prepared`.

    A device that the plan leaves out gets this too: it has nothing to form and answers at once.
    """

    type: Literal["prepare"] = "prepare"
    generation: int
    plan: str


class Unprepare(_Wire):
    """Forget the generation that was prepared; a newcomer stops receiving and waits for another `receive`."""

    type: Literal["unprepare"] = "unprepare"
    generation: int


class Switch(_Wire):
    """Go over to the prepared generation after the commit of the step in flight; answer `switched`.

    `transfers` are units that devices which train already owe each other (a device that leaves makes some): they run
    at the boundary, in the new groups. A device that the plan leaves out answers, stops and waits for `exit`.
    """

    type: Literal["switch"] = "switch"
    generation: int
    transfers: tuple[Move, ...] = ()


class Feed(_Wire):
    """Stream these units to a newcomer under compute, and each later step's changes to them."""

    type: Literal["feed"] = "feed"
    generation: int
    target: str
    address: tuple[str, int]
    token: str
    transfers: tuple[Move, ...]


class Unfeed(_Wire):
    """Stop streaming to this newcomer."""

    type: Literal["unfeed"] = "unfeed"
    target: str


class Receive(_Wire):
    """Newcomer: listen for feeds of this plan, answer `listening`."""

    type: Literal["receive"] = "receive"
    generation: int
    plan: str
    token: str


class Stop(_Wire):
    """End after the step in flight, save, send `done`, and wait for `exit`."""

    type: Literal["stop"] = "stop"


class Exit(_Wire):
    """Leave now with exit code 0."""

    type: Literal["exit"] = "exit"


Order = Abort | PlanOrder | Go | Prepare | Unprepare | Switch | Feed | Unfeed | Receive | Stop | Exit


class _Said(_Wire):
    incarnation: int


class Hello(_Said):
    """The process is up."""

    type: Literal["hello"] = "hello"
    pid: int


class Heartbeat(_Said):
    """Sent every quarter of a second by a thread of its own: where the device is, and what it waits for."""

    type: Literal["heartbeat"] = "heartbeat"
    generation: int
    committed: int
    phase: str
    waits_for: str | None = None
    since_s: float = 0.0


class MemoryCopy(_Wire):
    """A copy in memory of what `device` held of step `step` under plan `generation`."""

    device: str
    step: int
    generation: int


class Status(_Said):
    """Answer to `abort`: `complete` says that the summed gradients of step `committed` are final here.

    `scalars` are those of the last applied step's barrier; `memory` lists the copies that this device has, its own
    among them; `generation` is the number in the order.
    """

    type: Literal["status"] = "status"
    generation: int
    committed: int
    complete: bool
    holds: int
    scalars: tuple[float, ...] | None = None
    memory: tuple[MemoryCopy, ...] = ()


class Ready(_Said):
    """The plan is adopted; `go` may come."""

    type: Literal["ready"] = "ready"
    generation: int


class Formed(_Said):
    """The groups are formed and proved."""

    type: Literal["formed"] = "formed"
    generation: int
    form_s: float = 0.0


class FormFail(_Said):
    """The groups could not be formed, now or on the side thread."""

    type: Literal["formfail"] = "formfail"
    generation: int
    text: str


class Running(_Said):
    """Its first step is about to run; `bytes_moved` is what this device received."""

    type: Literal["running"] = "running"
    generation: int
    bytes_moved: int = 0
    phases_s: dict[str, float] = Field(default_factory=dict)


class Prepared(_Said):
    """The groups of the next generation are formed and proved."""

    type: Literal["prepared"] = "prepared"
    generation: int


class Switched(_Said):
    """The device works under `generation` from step `committed` on."""

    type: Literal["switched"] = "switched"
    generation: int
    committed: int
    bytes_moved: int = 0
    phases_s: dict[str, float] = Field(default_factory=dict)


class Listening(_Said):
    """A newcomer takes feeds at this address."""

    type: Literal["listening"] = "listening"
    address: tuple[str, int]


class SelfTested(_Said):
    """A newcomer has imported, warmed up and tested itself."""

    type: Literal["selftested"] = "selftested"
    ok: bool
    text: str = ""


class Fed(_Said):
    """A newcomer has all its units as of `committed`; `bytes` in all so far."""

    type: Literal["fed"] = "fed"
    committed: int
    bytes: int = 0


class Commit(_Said):
    """The barrier of step `step` gave these scalars; sent before the step is applied."""

    type: Literal["commit"] = "commit"
    generation: int
    step: int
    scalars: tuple[float, ...]


class StepReport(_Said):
    """One replica's account of a step that it has applied."""

    type: Literal["step"] = "step"
    generation: int
    step: int
    replica: int
    first_sample: int
    num_samples: int
    loss: float
    grad_norm: float
    lr: float
    num_target_tokens: int
    skipped: bool
    compute_s: float
    sync_s: float
    step_s: float


class Suspect(_Said):
    """A collective failed here; nobody is blamed by it."""

    type: Literal["suspect"] = "suspect"
    generation: int
    phase: str
    text: str


class Mismatch(_Said):
    """Holders of these units do not have the same bits."""

    type: Literal["mismatch"] = "mismatch"
    generation: int
    units: tuple[str, ...]


class LowMem(_Said):
    """The device cannot hold what the plan asks of it; sent instead of `ready`."""

    type: Literal["lowmem"] = "lowmem"
    generation: int
    need_bytes: int
    free_bytes: int


class Shard(_Said):
    """The device's part of a checkpoint is on disk, or `error` says why not."""

    type: Literal["shard"] = "shard"
    generation: int
    progress: dict[str, Any]
    shard: dict[str, Any] | None = None
    error: str | None = None
    seconds: float = 0.0


class Holdout(_Said):
    """The held-out loss after `step` steps."""

    type: Literal["holdout"] = "holdout"
    step: int
    loss: float


class Done(_Said):
    """Training has ended here, and the shard is written."""

    type: Literal["done"] = "done"
    step: int
    stopped: bool


class Failed(_Said):
    """The worker ends by a Python error: `user` (unusable input), `comms` (a peer is gone) or `other`."""

    type: Literal["error"] = "error"
    cause: Literal["user", "comms", "other"]
    class_name: str = Field(alias="class")
    text: str
    traceback: str


class Exited(_Said):
    """Added by the launcher when everything that a process sent has been read: it has ended with `code`."""

    type: Literal["exit"] = "exit"
    code: int | None


Message = (
    Hello
    | Heartbeat
    | Status
    | Ready
    | Formed
    | FormFail
    | Running
    | Prepared
    | Switched
    | Listening
    | SelfTested
    | Fed
    | Commit
    | StepReport
    | Suspect
    | Mismatch
    | LowMem
    | Shard
    | Holdout
    | Done
    | Failed
    | Exited
)

_MESSAGES: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])
_ORDERS: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="type")])


_T = TypeVar("_T")


def parse_message(device: str, text: bytes) -> Message:
    """The message that `device` sent.

    Raises:
        RunError: it is none of the messages above; names the device and shows the text.
    """
    return _parsed(_MESSAGES, text, f"worker {device} sent")


def parse_order(text: bytes) -> Order:
    """The order that the controller sent.

    Raises:
        RunError: it is none of the orders above; shows the text.
    """
    return _parsed(_ORDERS, text, "the controller sent")


def _parsed(adapter: TypeAdapter[_T], text: bytes, who: str) -> _T:
    try:
        return adapter.validate_python(json.loads(text))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        reason = f"{where}: {first['msg']}" if where else first["msg"]
    except ValueError as error:  # not JSON, or not text
        reason = str(error)
    raise RunError(f"{who} what is no message of this version ({reason}): {text[:200]!r}.")
