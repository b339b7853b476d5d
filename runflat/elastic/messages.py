"""What workers say to the controller: JSON objects, checked on arrival; the words are those of `orders`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from runflat.elastic.orders import Wire, parsed


class _Said(Wire):
    incarnation: int


class Hello(_Said):
    """The process is up."""

    type: Literal["hello"] = "hello"
    pid: int


class Heartbeat(_Said):
    """Sent every quarter of a second by a thread of its own: where the device is, and what it waits for.

    `waited_s` are the seconds that it has waited for peers since its process began.
    """

    type: Literal["heartbeat"] = "heartbeat"
    generation: int
    committed: int
    phase: str
    waits_for: str | None = None
    since_s: float = 0.0
    waited_s: float = 0.0


class MemoryCopy(Wire):
    """A copy in memory of what `device` held of step `step` under plan `generation`."""

    device: str
    step: int
    generation: int


class Status(_Said):
    """Answer to `abort`: `complete` says that the summed gradients of step `committed` are final here.

    `scalars` are those of the last applied step's barrier; `memory` lists the copies that this device has, its own
    among them; `generation` is the number in the order. `gathered` is false where optimizer state is sharded and the
    last applied step's new weights have not come from the other devices.
    """

    type: Literal["status"] = "status"
    generation: int
    committed: int
    complete: bool
    holds: int
    gathered: bool = True
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
    """The groups could not be formed, now or on the side thread; or one of the feeds before it has failed."""

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
    """A newcomer takes feeds for this generation at this address."""

    type: Literal["listening"] = "listening"
    generation: int
    address: tuple[str, int]


class SelfTested(_Said):
    """A newcomer has imported, warmed up and tested itself."""

    type: Literal["selftested"] = "selftested"
    ok: bool
    text: str = ""


class Fed(_Said):
    """A newcomer has all its units of this generation as of `committed`; `bytes` in all so far."""

    type: Literal["fed"] = "fed"
    generation: int
    committed: int
    bytes: int = 0


class Behind(_Said):
    """A source: the link to the newcomer `target` does not carry the gradients as fast as they come."""

    type: Literal["behind"] = "behind"
    generation: int
    target: str


class Commit(_Said):
    """The barrier of step `step` gave these scalars; sent before the step is applied.

    `compared`: the bits that the step began from were compared, and are the same on all holders.
    """

    type: Literal["commit"] = "commit"
    generation: int
    step: int
    scalars: tuple[float, ...]
    compared: bool = False


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
    own_s: float = 0.0
    """Emulated: declared seconds of this replica's slowest device up to the gradient sync."""
    billed_s: float = 0.0
    """Emulated: declared seconds of the step."""
    late_s: float = 0.0
    """Emulated: seconds by which real time fell behind in it."""
    parts_s: dict[str, float] = {}
    """Seconds by part: data, forward, backward, sync, commit, update; in a loop of one's own data has its forward."""
    peak_bytes: int = 0
    """Most memory that the device has used."""


class Suspect(_Said):
    """A collective failed here; nobody is blamed by it."""

    type: Literal["suspect"] = "suspect"
    generation: int
    phase: str
    text: str


class Mismatch(_Said):
    """Holders of these units (`kind number`) do not have the same bits; all devices say the same.

    `wrong` are per device the units in which it differs from the majority of holders, `unclear` per unit without a
    majority its holders.
    """

    type: Literal["mismatch"] = "mismatch"
    generation: int
    units: tuple[str, ...]
    wrong: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    unclear: dict[str, tuple[str, ...]] = Field(default_factory=dict)


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
    """The worker ends by an error: `user` (unusable input), `comms` (a peer is gone), `device` (broken) or `other`."""

    type: Literal["error"] = "error"
    cause: Literal["user", "comms", "device", "other"]
    class_name: str = Field(alias="class")
    text: str
    traceback: str


class Struck(_Said):
    """The injector strikes here: said just before, so that everybody knows when, and that it does not come again."""

    type: Literal["struck"] = "struck"
    event: dict[str, Any]


class Remark(_Said):
    """A line for the log of the run."""

    type: Literal["remark"] = "remark"
    text: str = Field(max_length=500)


class Exited(_Said):
    """Added by the launcher when everything that a process sent has been read: it has ended with `code`.

    `absent`: nobody is there either who could start another one, until the launcher says `back`.
    """

    type: Literal["exit"] = "exit"
    code: int | None
    absent: bool = False


class Back(_Said):
    """Added by the launcher: processes of the device can be started now, in this domain.

    `may_span`: a replica may span several domains.
    """

    type: Literal["back"] = "back"
    domain: str | None = None
    may_span: bool = False


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
    | Behind
    | Commit
    | StepReport
    | Suspect
    | Mismatch
    | LowMem
    | Shard
    | Holdout
    | Done
    | Failed
    | Struck
    | Remark
    | Exited
    | Back
)

_MESSAGES: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def parse_message(device: str, text: bytes) -> Message:
    """The message that `device` sent.

    Raises:
        RunError: it is none of the messages above; names the device and shows the text.
    """
    return parsed(_MESSAGES, text, f"worker {device} sent")
